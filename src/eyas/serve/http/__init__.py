"""The HTTP side of the server: process, app, middleware, request bodies, errors, event streams."""
