"""Other engines at work for eyas: their servers, started for one process, and workers that have one each."""
