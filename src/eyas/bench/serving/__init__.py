"""Measurements of servers under load, over HTTP."""
