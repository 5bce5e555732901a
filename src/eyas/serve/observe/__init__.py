"""Observers of a server: Prometheus metrics and logs."""
