"""The drafter kinds: one file each, with its config, network, reader and writer of config.json, and its `Kind`."""

from pkgutil import iter_modules

NAMES = tuple(sorted(module.name for module in iter_modules(__path__)))
"""The names of all kinds, which are their files' names; known without importing them."""
