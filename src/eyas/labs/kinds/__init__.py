"""Block drafters that hardly anybody but their authors publishes: one file each, like those in `drafters/kinds/`."""
