"""Servers and commands under attack, load and kill -9: each script checks promises and fails if one doesn't hold."""
