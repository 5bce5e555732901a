"""`eyas serve`: an OpenAI-compatible API over one engine, with metrics, logs and a playground."""
