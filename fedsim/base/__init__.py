"""What every package builds on: errors, files, randomness, progress, tasks, papers, pure metrics."""
