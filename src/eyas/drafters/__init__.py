"""Drafters: the networks that propose tokens, their files, and how they decode."""
