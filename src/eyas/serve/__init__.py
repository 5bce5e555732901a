"""`eyas serve`: an OpenAI-compatible API over one engine, with metrics, logs and a playground.

From the bottom up: `engine_thread` and `observe`, bodies (`schema`), `errors`, `tools`, `context`, requests and streams
(`http`), routes (`api`), the application (`app`), and its process (`run`).
"""
