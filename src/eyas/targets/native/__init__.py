"""Kernels of our own for CPUs: whole passes of a decoder whose results don't depend on what else is in the pass."""
