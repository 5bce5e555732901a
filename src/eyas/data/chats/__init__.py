"""From sources of chats to a chat folder: read, deduplicate, blend, split."""
