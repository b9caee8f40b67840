"""The most bytes that tensors made by some code hold at one moment, counted operation by operation.

On the meta device nothing is allocated, and the count is the same: that is how a peak is known before a run. Below
torch's operations it sees nothing; what oneDNN's convolutions need beside their tensors is estimated.

The C library gives blocks of 32 MiB and more back when they are freed, and keeps smaller ones for later, in pieces that
the next stage seldom fits: what two stages leave behind adds up, and so `kept` is counted apart.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

GIVEN_BACK = 32 << 20  # glibc's largest threshold for blocks that are mapped on their own


class LiveBytes(TorchDispatchMode):
    """Counts what is allocated inside its context, and not what was there before.

    Parameters
    ----------
    reorders : bool
        The backward pass of a convolution also holds its operands and results once more, in the layout that oneDNN
        computes in.

    Attributes
    ----------
    now, peak : int
    kept : int
        The most in blocks that the C library does not give back.

    Examples
    --------
    >>> with LiveBytes() as live:
    ...     net(torch.empty(256, 4, device="meta")).sum().backward()
    >>> live.peak
    """

    def __init__(self, *, reorders: bool = False) -> None:
        super().__init__()
        self.now = self.peak = self.kept = self._small = 0
        self._reorders = reorders
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        mine = {x.untyped_storage()._cdata for x in given}
        made = [x for x in tree_iter(out) if isinstance(x, Tensor)]
        for x in made:
            storage = x.untyped_storage()
            name = storage._cdata
            if name not in mine and name not in self._known:
                self._known.add(name)
                self._count(storage.nbytes())
                weakref.finalize(storage, self._gone, name, storage.nbytes())
        extra = 0
        if self._reorders and func._schema.name == "aten::convolution_backward":
            extra = sum(x.untyped_storage().nbytes() for x in (*given, *made))
        self.peak, self.kept = max(self.peak, self.now + extra), max(self.kept, self._small)
        return out

    def _count(self, nbytes: int) -> None:
        self.now += nbytes
        self._small += nbytes if abs(nbytes) < GIVEN_BACK else 0

    def _gone(self, name: int, nbytes: int) -> None:
        self._known.discard(name)
        self._count(-nbytes)
