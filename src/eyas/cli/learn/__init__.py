"""`eyas learn`."""
