"""Content of the messages between server and clients: states, payloads and updates."""
