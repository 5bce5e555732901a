"""The drafter kinds: a file each, with its config, its network, how config.json is read and written, and its `Kind`."""

from pkgutil import iter_modules

NAMES = tuple(sorted(module.name for module in iter_modules(__path__)))
"""The names of all kinds, which their files have, too; known without importing them."""
