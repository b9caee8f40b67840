"""Frames as key frames and patches; see `cpu`."""
