"""Observers of a server: Prometheus metrics, logs."""
