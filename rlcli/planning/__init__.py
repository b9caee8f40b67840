"""Plan what a run will need, before it runs: the tensors of its parts, counted without memory."""
