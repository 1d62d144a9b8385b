"""Engine of the attacks that optimise dummy data: problems, objectives and the descent."""
