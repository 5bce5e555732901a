"""`eyas data capture`: runs the target once over all chats and stores its hidden states."""
