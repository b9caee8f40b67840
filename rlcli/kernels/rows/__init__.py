"""Copying rows of many columns at once, by address, in compiled passes."""
