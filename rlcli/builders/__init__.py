"""From a configuration to objects: the one room that knows both.

A file for each thing that is made. What becomes of them, and in which order they are made, is for `rlcli.jobs`.
"""
