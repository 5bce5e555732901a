"""Drafters written in the forms that other engines read."""
