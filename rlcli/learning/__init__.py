"""Learning from batches and stored rows: the update, the loops around it, and playing episodes to judge a policy."""
