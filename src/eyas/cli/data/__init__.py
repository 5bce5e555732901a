"""The verbs that prepare training data."""
