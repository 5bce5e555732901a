"""Which reading of a drafter's files its weights were trained for, decided by measurement."""
