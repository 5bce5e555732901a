"""The verbs for a drafter on disk: inspect, doctor, export, push."""
