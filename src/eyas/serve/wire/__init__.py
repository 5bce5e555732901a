"""The wire: what requests and answers look like, once and for all; `/openapi.json` is made of it."""
