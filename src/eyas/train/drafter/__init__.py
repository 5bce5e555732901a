"""Training runs of drafters: recipe section, sizes, data, validation and checkpoints."""
