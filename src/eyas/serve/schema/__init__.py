"""Request and response bodies of the API as pydantic models, from which `/openapi.json` is generated."""
