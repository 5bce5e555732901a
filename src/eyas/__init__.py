"""eyas: the whole life of an EAGLE drafter."""
