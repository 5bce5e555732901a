"""The objective of drafter training: the training-time test, its losses and their kernels."""
