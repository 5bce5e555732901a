"""The drafter kinds: one file each, with its config, its network, and how its config.json is read and written."""
