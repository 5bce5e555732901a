"""`eyas data prepare`: reads sources of chats, deduplicates, blends and splits them into a chat folder."""
