"""Everything that is worth knowing of eyas on a GPU, in one call: `make gpu`."""
