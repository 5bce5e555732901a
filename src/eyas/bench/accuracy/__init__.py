"""Accuracy: tasks with right answers, scored with and without speculation."""
