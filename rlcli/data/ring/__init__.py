"""Rows in time: a storage as a ring of steps, with the index of its trajectories, and each next observation once."""
