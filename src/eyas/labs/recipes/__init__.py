"""Recipes of the experimental drafter kinds, found by name like those in `eyas.recipes`."""
