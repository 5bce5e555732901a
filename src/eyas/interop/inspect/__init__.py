"""Reports on checkpoint directories: targets and drafters."""
