"""Servers under load: eyas's with and without speculation, and other engines'."""
