"""Plots and the one-page HTML report."""
