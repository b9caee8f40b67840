"""Random streams into plain values and back, so that a checkpoint can hold them.

Every stream of a run is one of these: torch's generators, numpy's, Python's.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from rlcli.errors import ArgumentError

Stream = torch.Generator | np.random.Generator | random.Random


def capture(stream: Stream) -> Any:
    """The stream's position: a uint8 tensor (torch), a dict (numpy), or a tuple (Python)."""
    if isinstance(stream, torch.Generator):
        return stream.get_state()
    if isinstance(stream, np.random.Generator):
        return stream.bit_generator.state
    if isinstance(stream, random.Random):
        return stream.getstate()
    raise ArgumentError(
        f"{type(stream).__name__} is not a random stream", fix="Pass a torch, numpy or Python generator."
    )


def put_back(stream: Stream, state: Any) -> None:
    """Set the stream to a captured position; its next numbers are those that followed the capture.

    Raises
    ------
    ArgumentError
        The state is of another kind of stream.
    """
    try:
        if isinstance(stream, torch.Generator):
            stream.set_state(state)
        elif isinstance(stream, np.random.Generator):
            stream.bit_generator.state = state
        else:
            stream.setstate(state)
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise ArgumentError(f"this state is not one of a {type(stream).__name__}", why=str(error)) from error
