"""A drafter that learns from the traffic it serves: collecting, training, testing, swapping and reverting."""
