"""`eyas plan`: the disk space, hours, price and speedup of a drafter, before anything is downloaded."""
