"""All parameters of a model in one tensor, all gradients in another: clip, step and copy are one call each.

```
flat   | w1 w1 w1 w1 . | b1 . . . | w2 ...      every parameter is a view; gaps align them to 64 bytes
grad   | g1 g1 g1 g1 . | ...                    every .grad is a view; gaps stay 0
```
A parameter that two networks share is there once. `load_state_dict` and `copy.deepcopy` of the model work
as ever; what was given new memory (`.to`, `assign=True`, `zero_grad()`) `bound` notices and `bind` takes back in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rlcli.errors import ArgumentError

_ALIGN = 16  # elements


def spans_of(parameters: Sequence[Tensor]) -> tuple[list[tuple[int, int]], int]:
    """Return first and last element of each parameter in the flat tensor, and its length."""
    spans, end = [], 0
    for p in parameters:
        spans.append((end, end + p.numel()))
        end += -(-p.numel() // _ALIGN) * _ALIGN
    return spans, end


class FlatParameters:
    """Hold a module's trainable parameters as views of one `tensor`; `version` counts how often memory moved."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters = self._trainable()
        self.version = 0
        if not self.parameters:
            raise ArgumentError("there is nothing to train", why="no parameter requires a gradient")
        self._spans, end = spans_of(self.parameters)
        like = self._common(self.parameters)
        self.tensor = nn.Parameter(torch.zeros(end, dtype=like.dtype, device=like.device))
        self.tensor.grad = torch.zeros_like(self.tensor)
        self._take_in()

    def bound(self, whole: bool = True) -> bool:
        """Return True if parameters and gradients are still views; not `whole`: look at the outer ones, in < 1 us."""
        return all(
            p.grad is grad and p.data_ptr() == address and table.get(name) is p
            for p, grad, address, table, name in (self._views if whole else self._outer)
        )

    @property
    def grad(self) -> Tensor:
        assert self.tensor.grad is not None
        return self.tensor.grad

    def bind(self) -> None:
        """Make every parameter and gradient a view again, keeping the values that the module has now."""
        current = self._trainable()
        if len(current) != len(self.parameters):
            raise ArgumentError(
                "the trainable parameters changed after the update was built",
                why=f"there were {len(self.parameters)}, now there are {len(current)}",
                fix="Build a new update",
            )
        same = all(a is b for a, b in zip(current, self.parameters, strict=True))
        if same and all(self._is_view(p, span) for p, span in zip(current, self._spans, strict=True)):
            return
        for old, new in zip(self.parameters, current, strict=True):
            if old.shape != new.shape:
                raise ArgumentError(
                    "a parameter changed its shape after the update was built",
                    why=f"{tuple(old.shape)} became {tuple(new.shape)}",
                    fix="Build a new update",
                )
        self.parameters = current
        like = self._common(current)
        if like.dtype != self.tensor.dtype or like.device != self.tensor.device:
            self.tensor.data = self.tensor.data.to(like)
            self.tensor.grad = torch.zeros_like(self.tensor)
        self._take_in()

    def _take_in(self) -> None:
        self.version += 1
        with torch.no_grad():
            for p, (start, stop) in zip(self.parameters, self._spans, strict=True):
                view = self.tensor.data[start:stop].view(p.shape)
                view.copy_(p)
                p.data = view
                p.grad = self.grad[start:stop].view(p.shape)
        addresses = {id(p): (p, p.grad, p.data_ptr()) for p in self.parameters}
        tables: list[dict] = [module._parameters for module in self.module.modules()]
        entries = [(table, name, id(p)) for table in tables for name, p in table.items()]
        self._views = [(*addresses[key], table, name) for table, name, key in entries if key in addresses]
        self._outer = self._views[:: max(1, len(self._views) - 1)]

    def _is_view(self, p: nn.Parameter, span: tuple[int, int]) -> bool:
        offset = span[0] * self.tensor.element_size()
        return (
            p.data_ptr() == self.tensor.data_ptr() + offset
            and p.grad is not None
            and p.grad.data_ptr() == self.grad.data_ptr() + offset
            and p.dtype == self.tensor.dtype
        )

    def _trainable(self) -> list[nn.Parameter]:
        return [p for p in self.module.parameters() if p.requires_grad]

    def _common(self, parameters: list[nn.Parameter]) -> nn.Parameter:
        kinds = {(str(p.dtype), str(p.device)) for p in parameters}
        if len(kinds) > 1:
            raise ArgumentError(
                "the trainable parameters do not share a dtype and a device",
                why=" and ".join(sorted(" on ".join(kind) for kind in kinds)),
                fix="Move the whole model with model.to(...)",
            )
        return parameters[0]
