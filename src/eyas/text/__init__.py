"""Chats, chat templates, prompt files and incremental detokenization: text as servers and command lines need it."""
