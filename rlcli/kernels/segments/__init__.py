"""Rows in pieces of memory that lie anywhere, copied in one compiled pass."""
