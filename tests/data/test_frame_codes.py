"""Patches and LZ4 blocks: what is decoded is what was encoded, and no code reads or writes outside."""

from __future__ import annotations

import lz4.block
import numpy as np
import pytest
import torch

from rlcli.data.fields import Field
from rlcli.data.storages.frame_column import FrameColumn
from rlcli.kernels.frames import cpu


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
            assert cpu.decode_lz4(code.ctypes.data, len(code), out.ctypes.data + 16, width)
            np.testing.assert_array_equal(out[16:-16], frame)
            assert (out[:16] == 170).all() and (out[-16:] == 170).all()


@pytest.mark.parametrize("width", [1, 7, 8, 9, 64, 255, 256, 257, 1000, 7056])
def test_a_patch_turns_one_frame_into_another(width):
    rng = np.random.default_rng(width)
    frames = pictures(rng, 60, width)
    for key, frame in zip(frames, np.roll(frames, 7, 0), strict=True):
        code = np.full(4 * width + 64, 170, np.uint8)
        length = cpu.make_patch(key.ctypes.data, frame.ctypes.data, width, code.ctypes.data, 4 * width)
        assert length >= 0 and (code[length:] == 170).all()
        out = np.concatenate([key, np.full(16, 170, np.uint8)])
        assert cpu.apply_patch(code.ctypes.data, length, out.ctypes.data, width)
        np.testing.assert_array_equal(out[:-16], frame)
        assert (out[-16:] == 170).all()
        if length:
            assert cpu.make_patch(key.ctypes.data, frame.ctypes.data, width, code.ctypes.data, length - 1) == -1


def test_altered_codes_never_write_outside():
    rng, width = np.random.default_rng(0), 500
    for frame in pictures(rng, 40, width):
        block = lz4.block.compress(frame, store_size=False)
        patch = np.zeros(4 * width, np.uint8)
        length = cpu.make_patch(
            np.zeros(width, np.uint8).ctypes.data, frame.ctypes.data, width, patch.ctypes.data, 2000
        )
        for code, decode in ((np.frombuffer(block, np.uint8), cpu.decode_lz4), (patch[:length], cpu.apply_patch)):
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
    data = np.frombuffer(FrameColumn.pack(frames, lanes), np.uint8)
    field = Field.of(frames)
    assert torch.equal(FrameColumn.unpack(data, field, count, lanes), frames)
    for bad in (data[:-1], data[: 5 * count - 1], np.append(data, 0).astype(np.uint8), data[:0]):
        with pytest.raises(ValueError):
            FrameColumn.unpack(bad, field, count, lanes)
