"""What a drafter is trained for: the training-time test, its losses and their kernels."""
