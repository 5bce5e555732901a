"""Measurements of servers under load, by HTTP alone."""
