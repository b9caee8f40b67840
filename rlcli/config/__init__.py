"""The configuration of a run: typed fields with defaults and meaning, checks, and names that may stand for code.

Nothing here imports torch, so that a mistake in a command is answered before torch is loaded.
"""
