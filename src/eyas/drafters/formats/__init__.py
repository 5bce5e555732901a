"""Readers of checkpoints of any origin: from files to native keys, and from keys to a configuration."""
