"""The verbs that plan and train drafters."""
