"""Experiments, which may change or go. The core imports none of them; they come in by `entry_points.txt`.

That file has the form of an installed package's, and its groups are those by which other packages add something
(`eyas.plugins`).
"""
