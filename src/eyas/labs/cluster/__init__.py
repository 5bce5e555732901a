"""Work across machines: units that any worker may do, the workers, and a crew that hands the units out."""
