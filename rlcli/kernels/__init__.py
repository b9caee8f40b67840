"""The arithmetic that must be fast: one operation a module, or a folder where it has several forms, side by side.

`reference`, where there is one, is plain torch, differentiable, and the oracle; `cpu` is compiled. Nothing here knows
TensorDicts.

A file that loads the compiler, half a second, is imported when somebody first names it: `kernels.rows.put(...)`.
"""

from rlcli.exports import lazily

__getattr__ = lazily(__name__)[0]  # names of files
