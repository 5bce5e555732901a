"""The training loop, shared by all objectives: optimizer, checkpoints, logs, processes."""
