"""Other frameworks, each measured in its own documented way; the only place that imports them, inside functions.

What is made of one that is not installed is None, or empty.
"""
