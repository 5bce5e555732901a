"""Drafters without weights: one file each, named after its method, with a `make` that builds it for a target."""

from pkgutil import iter_modules

NAMES = tuple(sorted(module.name for module in iter_modules(__path__)))
"""The names of all methods that need no files; known without importing them."""
ALONE = frozenset({"lookahead"})
"""Methods that can't be combined with a draft model: their trees fill the target's pass."""
