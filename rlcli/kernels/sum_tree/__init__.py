"""Rows drawn in proportion to their priority: a tree of sums (Schaul et al., 2016, arXiv:1511.05952, appendix B.2.1).

`tree.SumTree` is what is used, over the compiled passes of `cpu`.
"""

FAN = 8  # children of a node: eight sums are one cache line
