"""What the curious server writes down, and how it is known to be whole."""
