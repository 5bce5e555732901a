"""The OpenAI-compatible endpoints and their replies."""
