"""How checkpoints of any origin are read: from files to native keys, from keys to a configuration."""
