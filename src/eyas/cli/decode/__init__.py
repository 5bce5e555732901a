"""The verbs that decode: generate, chat, verify, demo."""
