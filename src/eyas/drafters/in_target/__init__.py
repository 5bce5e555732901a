"""Drafters inside a target's own checkpoint: one file each, named after its method, with a `load` function."""

from pkgutil import iter_modules

NAMES = tuple(sorted(module.name for module in iter_modules(__path__) if not module.name.startswith("_")))
"""The names of all methods with a drafter in the target's own files; known without importing them."""
