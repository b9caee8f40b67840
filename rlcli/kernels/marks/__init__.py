"""Boundary flags of slices, written in place; `rlcli.data.samplers.slice_marks` says the same in plain indexing."""
