"""Block drafters: all guesses of a draft come out of one pass over a block of masked tokens."""
