"""How checkpoints of any origin are read: from their files to native keys, and from keys to a configuration."""
