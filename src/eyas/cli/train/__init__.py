"""The verbs that plan, train and sweep drafters."""
