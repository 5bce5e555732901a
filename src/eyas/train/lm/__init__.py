"""Pretraining of the embedded demo target; nothing else needs this room."""
