"""The verbs about a drafter on disk: inspect, doctor, export."""
