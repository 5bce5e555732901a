"""The routes of the OpenAI-compatible API: from requests to the engine's form, from generations to JSON."""
