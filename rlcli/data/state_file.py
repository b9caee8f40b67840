"""A nested state as the content of one safetensors file; see `rlcli.data.state_tree` for what it may hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from rlcli.data.state_tree import flatten, restore
from rlcli.data.tensor_file import decode, encode
from rlcli.errors import DamagedDataError
from rlcli.typed import mapping, parsed

_TREE = "@tree"


def encode_state(state: Mapping[str, Any]) -> list[bytes | memoryview]:
    """The file's content.

    Raises
    ------
    ArgumentError
        The state holds something that has no place in a file.
    """
    tree, tensors = flatten(dict(state))
    text = json.dumps(tree, allow_nan=False).encode()
    return encode({**tensors, _TREE: torch.frombuffer(bytearray(text), dtype=torch.uint8)})


def decode_state(content: bytes, where: str) -> dict[str, Any]:
    """The inverse of `encode_state`; tensors on the CPU.

    Raises
    ------
    DamagedDataError
        It is no such file.
    """
    tensors = decode(content, where)
    try:
        state = restore(parsed(tensors.pop(_TREE).numpy().tobytes()), tensors)
        mapping()(state)
        return state
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise DamagedDataError("not a whole state", where=where, why=str(error)) from error
