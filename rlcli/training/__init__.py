"""Training loops and what surrounds them: update, checkpoints, run folder, signals."""
