"""Words of memory that processes share."""
