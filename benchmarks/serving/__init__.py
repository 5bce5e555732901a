"""Servers under load: plain, speculating, and those of other engines."""
