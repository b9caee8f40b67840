"""Runs on disk: folder, lock, checkpoints, what a session of a run shares. Folders are read, nothing is rebuilt."""
