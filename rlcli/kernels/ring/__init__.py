"""A batch written to a ring, or read from it, in one compiled pass each: rows and index together."""
