"""Correctness, speed and memory of eyas on a GPU, in one call: `make gpu`."""
