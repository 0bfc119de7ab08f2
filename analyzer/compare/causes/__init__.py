"""What holds a run up, and what each cause is worth by a replay without it."""
