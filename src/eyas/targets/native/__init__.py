"""eyas's own CPU kernels: whole passes of a decoder, in which a token's result doesn't depend on the other tokens."""
