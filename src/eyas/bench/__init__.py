"""Benchmarks: drafters and trees in this process, servers under load, and reports of both."""
