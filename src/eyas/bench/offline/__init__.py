"""Measurements of engines in this process: speedup, accept length, losslessness."""
