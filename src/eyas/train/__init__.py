"""Training of drafters and of the demo's language model, with one training loop for both."""
