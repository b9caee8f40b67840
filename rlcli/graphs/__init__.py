"""Work of a GPU that is recorded once and run again as one: what it reads and writes stays where it is."""
