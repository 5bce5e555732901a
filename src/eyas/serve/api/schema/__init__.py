"""Requests and responses of the API as pydantic models; `/openapi.json` is made from them."""
