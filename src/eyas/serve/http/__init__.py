"""The HTTP server: app, middleware, request bodies, errors, event streams."""
