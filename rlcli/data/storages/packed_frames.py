"""Frames as one string of bytes, for files: each as what changed since the frame before it in its lane.

```
lengths int32 [N] | depths uint8 [N] | codes, one after another
```
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from rlcli.data.fields import Field
from rlcli.data.storages.code_memory import CodeMemory
from rlcli.data.storages.frame_column import FrameColumn


def pack_frames(frames: Tensor, lanes: int) -> bytes:
    """Frames `[N, *F]` as bytes."""
    column = FrameColumn(Field.of(frames), len(frames), lanes, 15, backgrounds=False)
    column.write(np.arange(len(frames)), frames.cpu().contiguous())
    _, _, length, depth = column.book
    codes = (column.codes.code(*where) for where in column.book[:3].T.tolist())
    return b"".join([length.tobytes(), depth.astype(np.uint8).tobytes(), *(code.tobytes() for code in codes)])


def unpack_frames(data: np.ndarray, field: Field, count: int, lanes: int) -> Tensor:
    """The inverse of `pack_frames`.

    Raises
    ------
    ValueError
        It is not what `pack_frames` gives for frames of this field.
    """
    head = 5 * count
    length = data[: 4 * count].view(np.int32).astype(np.int64)
    depth = data[4 * count : head].astype(np.int64)
    whole = len(data) >= head and (length >= 0).all() and head + length.sum() == len(data)
    if not whole or (depth * lanes > np.arange(count)).any():
        raise ValueError("frames are packed in another way")
    book = np.stack([np.zeros(count), np.cumsum(length) - length, length, depth]).astype(np.int32)
    codes = CodeMemory.of(np.ascontiguousarray(data[head:]))
    return FrameColumn.of(field, lanes, codes, book).read(np.arange(count))
