"""What a checkpoint directory holds: reports on targets and drafters."""
