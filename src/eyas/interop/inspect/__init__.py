"""`eyas inspect`: reports on the checkpoints of targets and drafters."""
