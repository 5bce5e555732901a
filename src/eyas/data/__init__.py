"""From text to what a trainer reads: chats, documents, token rows with loss masks, packed blocks."""
