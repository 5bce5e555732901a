"""Drafters that come inside a target's own checkpoint: a file each, called as its method is, with a `load`."""

from pkgutil import iter_modules

NAMES = tuple(sorted(module.name for module in iter_modules(__path__) if not module.name.startswith("_")))
"""The names of all methods whose drafter may be in the target's files; known without importing them."""
