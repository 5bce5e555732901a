"""The verbs that measure."""
