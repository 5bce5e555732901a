"""What one process leaves in the user's cache for the next: its folder, and what is kept there for whom."""
