"""The drafter kinds: a file each, with its config, its network, how config.json is read and written, and its `Kind`."""
