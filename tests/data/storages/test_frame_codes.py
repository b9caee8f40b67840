"""Patches and LZ4 blocks: what is decoded is what was encoded, and no code reads or writes outside."""

from __future__ import annotations

import lz4.block
import numpy as np
import pytest
import torch
from face import Field

from rlcli.data.storages.frame_column import FrameColumn, pack_frames, unpack_frames
from rlcli.kernels.frames import apply_patch, decode_lz4, make_patch


def pictures(rng, count, width):
    """Noise, stripes, single dots, runs of every length, and nothing at all."""
    out = np.zeros((count, width), np.uint8)
    for i, row in enumerate(out):
        kind = i % 6
        if kind == 0:
            row[:] = rng.integers(0, 256, width)
        elif kind == 1:
            row[:] = np.tile(rng.integers(0, 256, int(rng.integers(1, 40))), width)[:width]
        elif kind == 2:
            row[rng.integers(0, width, 5)] = 255
        elif kind == 3:
            row[:] = np.repeat(rng.integers(0, 4, width), rng.integers(1, 600, width))[:width]
        elif kind == 4:
            row[-int(rng.integers(1, 20)) :] = 9
    return out


@pytest.mark.parametrize("width", [1, 7, 8, 9, 64, 255, 256, 257, 1000, 7056])
def test_lz4_blocks_of_the_library_are_decoded(width):
    rng = np.random.default_rng(width)
    for frame in pictures(rng, 60, width):
        for mode in ("default", "high_compression"):
            code = np.frombuffer(lz4.block.compress(frame, store_size=False, mode=mode), np.uint8)
            out = np.full(width + 32, 170, np.uint8)
            assert decode_lz4(code.ctypes.data, len(code), out.ctypes.data + 16, width)
            np.testing.assert_array_equal(out[16:-16], frame)
            assert (out[:16] == 170).all() and (out[-16:] == 170).all()


@pytest.mark.parametrize("width", [1, 7, 8, 9, 64, 255, 256, 257, 1000, 7056])
def test_a_patch_turns_one_frame_into_another(width):
    rng = np.random.default_rng(width)
    frames = pictures(rng, 60, width)
    for key, frame in zip(frames, np.roll(frames, 7, 0), strict=True):
        code = np.full(4 * width + 64, 170, np.uint8)
        length = make_patch(key.ctypes.data, frame.ctypes.data, width, code.ctypes.data, 4 * width)
        assert length >= 0 and (code[length:] == 170).all()
        out = np.concatenate([key, np.full(16, 170, np.uint8)])
        assert apply_patch(code.ctypes.data, length, out.ctypes.data, width)
        np.testing.assert_array_equal(out[:-16], frame)
        assert (out[-16:] == 170).all()
        if length:
            assert make_patch(key.ctypes.data, frame.ctypes.data, width, code.ctypes.data, length - 1) == -1


def test_altered_codes_never_write_outside():
    rng, width = np.random.default_rng(0), 500
    for frame in pictures(rng, 40, width):
        block = lz4.block.compress(frame, store_size=False)
        patch = np.zeros(4 * width, np.uint8)
        length = make_patch(np.zeros(width, np.uint8).ctypes.data, frame.ctypes.data, width, patch.ctypes.data, 2000)
        for code, decode in ((np.frombuffer(block, np.uint8), decode_lz4), (patch[:length], apply_patch)):
            for _ in range(200):
                bad = code.copy()
                for at in rng.integers(0, len(bad), int(rng.integers(1, 4))) if len(bad) else ():
                    bad[at] = rng.integers(0, 256)
                bad = bad[: int(rng.integers(0, len(bad) + 1))]
                out = np.full(width + 200, 170, np.uint8)
                decode(bad.ctypes.data, len(bad), out.ctypes.data + 100, width)
                assert (out[:100] == 170).all() and (out[-100:] == 170).all()


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 40])
def test_packed_frames_come_back_and_altered_ones_are_refused(lanes, count):
    rng = np.random.default_rng(count)
    frames = torch.from_numpy(pictures(rng, count, 900).reshape(count, 30, 30))
    data = np.frombuffer(pack_frames(frames, lanes), np.uint8)
    field = Field.of(frames)
    assert torch.equal(unpack_frames(data, field, count, lanes), frames)
    for bad in (data[:-1], data[: 5 * count - 1], np.append(data, 0).astype(np.uint8), data[:0]):
        with pytest.raises(ValueError):
            unpack_frames(bad, field, count, lanes)


@pytest.mark.parametrize("lanes", [1, 2])
def test_frames_are_read_in_any_order_and_again(lanes):
    """Shortly after one another, as stacks that overlap are, the same frames are copied."""
    rng = np.random.default_rng(lanes)
    frames = torch.from_numpy(pictures(rng, 60, 900).reshape(60, 30, 30))
    frames[20:50] = frames[20]
    frames[20:50, 3, 3] = torch.arange(30, dtype=torch.uint8)  # a chain of patches
    column = FrameColumn(Field.of(frames), 64, lanes, 5)
    for start in range(0, 60, 12):
        column.write(np.arange(start, start + 12), frames[start : start + 12])
    for _ in range(50):
        first = rng.integers(0, 50, 20)
        rows = (first[:, None] + np.array([0, 1, 2, 3, 1, 2, 3, 4])).reshape(-1)
        rows = rows if rng.random() < 0.5 else rng.permutation(rows)
        assert torch.equal(column.read(rows), frames[torch.from_numpy(rows)])


def test_memory_is_taken_as_codes_need_it():
    """Frames that hardly change: few bytes of codes, so little more than one small piece and the book is held."""
    frames = torch.zeros(4000, 84, 84, dtype=torch.uint8)
    frames[torch.arange(4000), torch.arange(4000) % 84, 5] = 1
    column = FrameColumn(Field.of(frames), 4000, 1, 11)
    column.write(np.arange(4000), frames)
    codes = int(column.book[2].clip(0).sum())
    beside = 16 * 4000 + 2 * 7056 + 7056 // 4  # the book, the tail, a background, room for a patch
    assert codes < column.nbytes - beside < codes + codes // 8 + (1 << 16)
