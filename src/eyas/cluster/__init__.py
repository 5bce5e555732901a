"""Work past one machine: units that anyone may do, workers that do them, and a crew that hands them out."""
