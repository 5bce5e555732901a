"""Run the target once over all chats and store its hidden states."""
