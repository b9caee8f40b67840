"""A nested state as JSON beside named tensors, or all of it as one file; and back: the same values, types and bits.

    {"actor": {"weight": Tensor}, "step": 3, "clip": (0.2, inf)}
 -> {"actor": {"weight": {"$tensor": "actor/weight"}}, "step": 3, "clip": {"$tuple": [0.2, {"$float":
 "inf"}]}}
    + {"actor/weight": Tensor}

Known: None, bool, int of any size (random states have 128 bits), float, str, bytes, list, tuple, dict with
any of these as keys, tensors, numpy arrays and scalars. Anything else is refused by its place in the tree.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from rlcli.errors import ArgumentError, DamagedDataError, RlcliError, in_words

_PLAIN = (type(None), bool, int, str)
_TREE = "@tree"  # the name of the JSON among a file's tensors; no path in a state begins with "@"
_MISFITS = (KeyError, IndexError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError)
RUN = "the checkpoint does not fit the run's configuration", "Restore config.json as the run wrote it."
ROWS = "the state of a buffer does not fit its rows", "Restore it from a copy."


def flatten(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return what JSON can hold, and named tensors; `restore` is the inverse."""
    tensors: dict[str, Tensor] = {}
    return _flatten(tree, "", tensors), tensors


def restore(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what `flatten` was given."""
    if isinstance(tree, list):
        return [restore(x, tensors) for x in tree]
    if not isinstance(tree, dict):
        return tree
    mark = next(iter(tree), "")
    if len(tree) == 1 and mark.startswith("$"):
        if mark not in _RESTORE:
            raise DamagedDataError("the state holds a kind of value that this version does not know", where=mark)
        return _RESTORE[mark](tree[mark], tensors)
    return {key: restore(x, tensors) for key, x in tree.items()}


def copied(tree: Any) -> Any:
    """Return a state whose tensors and arrays nobody else writes; tensors on the CPU."""
    tree = tree_map_only(np.ndarray, np.ndarray.copy, tree)
    return tree_map_only(Tensor, lambda x: x.detach().clone() if x.is_cpu else x.cpu(), tree)


def non_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that hold NaN or inf."""
    return [name for name, x in tensors.items() if x.is_floating_point() and not bool(torch.isfinite(x).all())]


def _flatten(x: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if type(x) in _PLAIN:
        return x
    if type(x) is float:
        return x if math.isfinite(x) else {"$float": repr(x)}
    if isinstance(x, Tensor):
        return {"$tensor": _add(path, x.detach(), tensors)}
    if isinstance(x, np.ndarray | np.generic):
        return {"$array" if isinstance(x, np.ndarray) else "$scalar": _add(path, _from_numpy(x, path), tensors)}
    if isinstance(x, bytes):
        return {"$bytes": base64.b64encode(x).decode()}
    if isinstance(x, list | tuple):
        items = [_flatten(item, f"{path}/{i}", tensors) for i, item in enumerate(x)]
        return items if isinstance(x, list) else {"$tuple": items}
    if isinstance(x, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in x):
            return {key: _flatten(item, f"{path}/{key}", tensors) for key, item in x.items()}
        pairs = x.items()
        return {"$pairs": [[_flatten(k, path, tensors), _flatten(v, f"{path}/{k}", tensors)] for k, v in pairs]}
    raise ArgumentError(
        f"{type(x).__name__} has no place in a checkpoint", where=path.removeprefix("/") or "the state itself",
        fix="Give tensors, arrays, numbers, strings, lists, tuples and dicts of them.",
    )  # fmt: skip


def _add(path: str, x: Tensor, tensors: dict[str, Tensor]) -> str:
    name = path.removeprefix("/") or "value"
    while name in tensors:  # "a/b" may be one key or two
        name += "'"
    tensors[name] = x
    return name


def _from_numpy(x: np.ndarray | np.generic, path: str) -> Tensor:
    try:
        copy = torch.from_numpy(np.array(x))  # contiguous and in the machine's byte order, or refused
        return copy if x.size else torch.empty(x.shape, dtype=copy.dtype)  # from_numpy gives empty arrays stride 0
    except TypeError as error:
        raise ArgumentError(f"an array of {x.dtype} has no place in a checkpoint", where=path) from error


def _tensor(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    if name not in tensors:
        raise DamagedDataError("a tensor that the state names is missing", where=name)
    return tensors[name]


_RESTORE: dict[str, Callable[[Any, Mapping[str, Tensor]], Any]] = {
    "$tensor": _tensor,
    "$array": lambda name, tensors: _tensor(name, tensors).numpy(),
    "$scalar": lambda name, tensors: _tensor(name, tensors).numpy()[()],
    "$float": lambda text, _: float(text),
    "$bytes": lambda text, _: base64.b64decode(text),
    "$tuple": lambda items, tensors: tuple(restore(x, tensors) for x in items),
    "$pairs": lambda pairs, tensors: {restore(k, tensors): restore(v, tensors) for k, v in pairs},
}


# ---- one file ------------------------------------------------------------------------------------------------------
def encode_state(state: Mapping[str, Any]) -> list[bytes | memoryview]:
    """Return the content of a safetensors file that holds a state."""
    tree, tensors = flatten(dict(state))
    from rlcli.data.files.tensors import encode  # not above: a run copies its state long before it writes one

    text = json.dumps(tree, allow_nan=False).encode()
    return encode({**tensors, _TREE: torch.frombuffer(bytearray(text), dtype=torch.uint8)})


def decode_state(content: bytes, where: str) -> dict[str, Any]:
    """Decode what `encode_state` gave; tensors on the CPU."""
    from rlcli.data.files.tensors import decode
    from rlcli.typed import mapping, parsed

    tensors = decode(content, where)
    try:
        state = restore(parsed(tensors.pop(_TREE).numpy().tobytes()), tensors)
        mapping()(state)
        return state
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise DamagedDataError("not a whole state", where=where, why=str(error)) from error


# ---- taking a state over -------------------------------------------------------------------------------------------
@contextlib.contextmanager
def loading_state(path: Path | str, said: tuple[str, str] = RUN) -> Iterator[None]:
    """Tell what goes wrong while the state in `path` is taken over: `said` is what is wrong, and what to do."""
    what, fix = said
    try:
        yield
    except RlcliError:
        raise
    except _MISFITS as error:
        raise DamagedDataError(what, where=str(path), why=in_words(error, 200), fix=fix) from error
