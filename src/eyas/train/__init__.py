"""Training: one loop, one objective a file."""
