"""`eyas doctor`: measures which reading of a drafter's files its weights were trained for."""
