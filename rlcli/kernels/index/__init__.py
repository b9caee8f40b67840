"""The trajectory index of a ring as compiled passes over plain arrays.

`layout` names the arrays, `write` follows new rows, `read` looks rows up, `draw` draws slices.
"""
