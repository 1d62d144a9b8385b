"""Messages between server and clients."""
