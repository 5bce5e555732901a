"""Drafters without weights: a file each, called as its method is, with a `make` that builds it for a target."""

from pkgutil import iter_modules

NAMES = tuple(sorted(module.name for module in iter_modules(__path__)))
"""The names of all methods that need no files; known without importing them."""
ALONE = frozenset({"lookahead"})
"""Those that can't be united with a draft model: their trees fill the target's pass."""
