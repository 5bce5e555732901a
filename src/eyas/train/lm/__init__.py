"""Pretraining of the embedded demo target; used for nothing else."""
