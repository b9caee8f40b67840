"""Worker processes: shared memory, messages and signals, supervision. Needs neither torch nor what it serves."""
