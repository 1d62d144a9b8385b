"""Who is attacked with what knowledge, and by which process."""
