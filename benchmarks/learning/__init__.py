"""Gains, costs and robustness of a drafter that learns from traffic."""
