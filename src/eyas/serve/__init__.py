"""The server: an OpenAI-compatible API over one engine, and who watches it."""
