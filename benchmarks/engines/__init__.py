"""Do other engines run what `eyas export` writes as eyas does? `make engines`; how: docs/formats.md."""
