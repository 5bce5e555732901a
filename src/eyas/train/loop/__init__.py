"""The training loop that all objectives share, with its optimizers, checkpoints, logs and process groups."""
