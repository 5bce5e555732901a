"""A drafter's training run: recipe, sizes, data, validation, checkpoints."""
