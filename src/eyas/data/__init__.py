"""Training data: chats, token rows with loss masks, regenerated answers, and captured features of a target."""
