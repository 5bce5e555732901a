"""Tokenizes chats into token ids with a loss mask, and groups them into batches."""
