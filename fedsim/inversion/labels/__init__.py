"""Label recovery: how often each class occurs in the victim's data, read off the last layer."""
