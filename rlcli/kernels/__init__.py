"""The arithmetic that must be fast: one operation per folder, its backends side by side behind one function.

`reference`, where there is one, is plain torch, differentiable, and the oracle; `cpu` is compiled. Nothing here knows
TensorDicts.
"""
