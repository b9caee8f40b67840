"""Which observations of a batch are stacks of frames, by what a person asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlcli.data.fields import Field
from rlcli.errors import ArgumentError
from rlcli.keys import NEXT, Key, as_tuple, show, unravel


def stacked_keys(
    fields: Mapping[Key, Field], observations: Sequence[Key], frame_stack: int | Mapping[Key, int] | None
) -> dict[Key, int]:
    """The keys that are stored one frame a row, and how many frames a stack of theirs has.

    Raises
    ------
    ArgumentError
        A key that is not in the batch, or a number that fits no observation.
    """
    if frame_stack is None:
        return {}
    if isinstance(frame_stack, Mapping):
        for key in frame_stack:
            if unravel(key) not in fields:
                raise ArgumentError(f"frame_stack names {show(key)}, which is not in the batch")
        return {unravel(key): frames for key, frames in frame_stack.items()}
    among = observations or [key for key in fields if as_tuple(key)[0] != NEXT]
    fit = [key for key in among if len(fields[key].shape) > 1 and fields[key].shape[0] % frame_stack == 0]
    if not fit:
        raise ArgumentError(
            f"no observation is a stack of {frame_stack} frames",
            where="frame_stack",
            why=", ".join(f"{show(key)} is {fields[key]} a row" for key in among),
            fix="The first dim must hold the frames; name the key: frame_stack={'pixels': 4}.",
        )
    return dict.fromkeys(fit, frame_stack)
