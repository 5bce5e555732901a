"""From chats to token ids with a loss mask, and to batches."""
