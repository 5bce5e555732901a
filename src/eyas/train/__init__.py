"""Training of drafters and of small language models, with one training loop for both."""
