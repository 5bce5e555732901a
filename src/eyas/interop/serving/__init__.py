"""Other engines' servers: is a drafter readable there, and which command serves it."""
