"""Kernels as operations of torch: compiled for a CPU, by Triton for a GPU; the host reads nothing of either.

The package of an operation has a file `cpu` and a file `triton`, each with a function of its name and `_of`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from rlcli.graphs import host


def serves(x: Tensor) -> bool:
    """Say whether there is a kernel for tensors like `x`."""
    return x.device.type == "cpu" or (x.is_cuda and importlib.util.find_spec("triton") is not None)


class Operations:
    """The operations of a package, by name; `schemas`: what each takes and gives, as torch writes it."""

    def __init__(self, package: str, **schemas: str) -> None:
        self._package, self._schemas = package, schemas

    @cached_property
    def _made(self) -> Any:
        room = self._package.replace(".", "_")
        library = torch.library.Library(room, "DEF")
        for name, schema in self._schemas.items():
            library.define(name + schema)
            for key, file in (("CPU", "cpu"), ("CUDA", "triton")):
                library.impl(name, partial(_call, f"{self._package}.{file}", f"{name}_of"), key)
        return getattr(torch.ops, room), library  # they live as long as it does

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made[0], name)

    def call(self, name: str, like: Tensor) -> Any:
        """Return an operation; where the host may ask, what is compiled for it, which is called without torch's way."""
        if not host.may_ask(like):
            return getattr(self, name)
        return getattr(importlib.import_module(f"{self._package}.cpu"), f"{name}_of")


def named(names: Sequence[str], figures: Tensor) -> dict[str, Any]:
    """Return figures by their names: numbers, or where the host may not ask, tensors."""
    return dict(zip(names, figures.tolist() if host.may_ask(figures) else figures.unbind(), strict=True))


def _call(file: str, name: str, like: Any, *given: Any) -> Any:
    """Call the function of a file, which loads a compiler."""
    with torch.cuda.device_of(like[0] if isinstance(like, list) else like):  # Triton launches on the current one
        return getattr(importlib.import_module(file), name)(like, *given)
