"""The server verb, for this engine and for others."""
