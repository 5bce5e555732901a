"""`eyas serve --engine`: whether another engine can read a drafter, and the command that serves it there."""
