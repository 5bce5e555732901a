"""Check that other engines run exported drafters as eyas does: `make engines`; formats: docs/formats.md."""
