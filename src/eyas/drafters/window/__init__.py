"""Drafters that attend to a window: a row's first pairs and its last ones, however long the row is."""
