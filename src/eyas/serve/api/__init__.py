"""The routes of the OpenAI-compatible API: requests to the engine's form, generations to JSON."""
