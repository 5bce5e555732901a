"""`eyas serve`: an OpenAI-compatible API over one engine, with metrics, logs and a playground.

From the ground up: `engine_thread` and `observe`, bodies (`schema`), `errors`, `tools`, `context`, requests and streams
(`http`), routes (`api`), and the application (`app`) in its process (`run`).
"""
