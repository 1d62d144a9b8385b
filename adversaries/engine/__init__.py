"""What attacks that optimise dummy data share."""
