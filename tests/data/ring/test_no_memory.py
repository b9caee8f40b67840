"""Where there is no memory for more, a write is refused and the buffer is as it was; Ctrl-C splits none."""

import os
import signal

import numpy as np
import pytest
import torch
from face import Ring
from ring_model import Streams, batch_of, check
from tensordict import TensorDict

import rlcli.data.index.arrays as arrays
import rlcli.data.next_obs.pairs as pairs
import rlcli.data.ring.stacks as stacks_module
import rlcli.data.storages.frame_column as frame_column
from rlcli.data import PrioritizedSampler, TensorDictReplayBuffer
from rlcli.data.storages import CompressedStorage, LazyTensorStorage
from rlcli.data.storages.frame_column import CodeMemory
from rlcli.errors import ResourceError

MAKERS = ("empty", "zeros", "full", "concatenate")


class Allocator:
    """Numpy, whose k-th new array cannot be had."""

    def __init__(self, left):
        self.left = left

    def __getattr__(self, name):
        make = getattr(np, name)
        return self._counted(make) if name in MAKERS else make

    def _counted(self, make):
        def counted(*args, **options):
            self.left -= 1
            if self.left == 0:
                raise MemoryError("Unable to allocate")
            return make(*args, **options)

        return counted


def plain(seed, rows):
    streams = Streams(np.random.default_rng(seed), 2, values="bytes", end=0.5)
    return batch_of([streams.play(env, rows) for env in range(2)], [2, rows])[0]


def stacks(seed, rows):
    rng = np.random.default_rng(seed)
    td = TensorDict({}, [2, rows])
    for key in ("pixels", ("next", "pixels")):
        td[key] = torch.from_numpy(rng.integers(0, 255, (2, rows, 3, 2, 2)).astype(np.uint8))
    td["next", "done"] = torch.zeros(2, rows, 1, dtype=torch.bool)
    td["collector", "traj_ids"] = torch.arange(2)[:, None].expand(2, rows).contiguous()
    return td


def bits(ring):
    td = ring.read(np.arange(len(ring)))
    return {key: td[key].numpy().tobytes() for key in sorted(td.keys(True, True), key=str)}


def extended(make, ring):
    ring.extend(make(9, 40))


def overwritten(make, ring):
    ring.overwrite(np.arange(40), make(9, 40)[0])


@pytest.mark.filterwarnings("ignore:.*shifted by one")
@pytest.mark.filterwarnings("ignore:.*not followed by their own")
@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize(("write", "rows", "least"), [(extended, 80, 4), (overwritten, 40, 2)])
@pytest.mark.parametrize(("make", "frames"), [(plain, None), (stacks, 3)])
@pytest.mark.every(2)
def test_a_write_without_memory_changes_nothing(monkeypatch, make, frames, write, rows, least, ndim):
    refused = 0
    for left in range(1, 40):
        ring, twin = (Ring(LazyTensorStorage(120, ndim=ndim), next_obs="exact", frame_stack=frames) for _ in range(2))
        for other in (ring, twin):
            for seed in range(3):
                other.extend(make(seed, 16))
        before, allocator = bits(ring), Allocator(left)
        for module in (arrays, pairs, stacks_module):
            monkeypatch.setattr(module, "np", allocator)
        try:
            write(make, ring)
        except ResourceError as error:
            refused += 1
            assert f"no memory to index {rows} more rows" in str(error)
            monkeypatch.undo()
            assert (bits(ring), len(ring), ring.cursor) == (before, len(twin), twin.cursor)
            check(ring)
            write(make, ring)
        monkeypatch.undo()
        write(make, twin)
        assert bits(ring) == bits(twin)
        live = np.arange(len(ring))
        assert ring.index.successors(live).tolist() == twin.index.successors(live).tolist()
        check(ring)
        if allocator.left > 0:
            break
    assert refused >= least and allocator.left > 0


def _short(method, allocator):
    def short(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(frame_column, "np", allocator)
            return method(*args)

    return short


def noise(seed, rows):
    rng = np.random.default_rng(seed)
    keys = {key: torch.from_numpy(rng.integers(0, 255, (rows, 2048)).astype(np.uint8)) for key in ("left", "right")}
    return TensorDict({**keys, "step": torch.arange(rows) + 1000 * seed}, [rows])


@pytest.mark.parametrize("write", [lambda ring: ring.extend(noise(9, 70)),
                                   lambda ring: ring.overwrite(np.arange(0, 100, 2), noise(9, 50))])  # fmt: skip
def test_frames_for_which_there_is_no_memory_change_nothing(monkeypatch, write):
    refused = 0
    for left in range(1, 40):
        ring, twin = (Ring(CompressedStorage(120)) for _ in range(2))
        for other in (ring, twin):
            for seed in range(5):
                other.extend(noise(seed, 40))
        before, allocator = bits(ring), Allocator(left)
        for name in ("reserve", "next_piece"):
            monkeypatch.setattr(CodeMemory, name, _short(getattr(CodeMemory, name), allocator))
        try:
            write(ring)
        except ResourceError as error:
            refused += 1
            assert "no memory for" in str(error)
            monkeypatch.undo()
            assert (bits(ring), ring.cursor) == (before, twin.cursor)
            write(ring)
        monkeypatch.undo()
        write(twin)
        assert bits(ring) == bits(twin)
        if allocator.left > 0:
            break
    assert refused >= 2 and allocator.left > 0


class Interrupted(LazyTensorStorage):
    """Somebody types Ctrl-C when rows are written and nothing else is."""

    now = False

    def write(self, number, columns):
        super().write(number, columns)
        if self.now:
            os.kill(os.getpid(), signal.SIGINT)
            sum(range(1000))  # where Python looks for signals

    def scatter(self, rows, columns):
        super().scatter(rows, columns)
        if self.now:
            os.kill(os.getpid(), signal.SIGINT)
            sum(range(1000))


@pytest.mark.filterwarnings("ignore:.*shifted by one")
@pytest.mark.filterwarnings("ignore:.*not followed by their own")
@pytest.mark.parametrize("write", [extended, overwritten])
@pytest.mark.parametrize(("make", "frames"), [(plain, None), (stacks, 3)])
def test_rows_and_index_are_of_the_same_writes_after_a_ctrl_c(make, frames, write):
    ring, twin = (Ring(kind(120), next_obs="exact", frame_stack=frames) for kind in (Interrupted, LazyTensorStorage))
    for other in (ring, twin):
        for seed in range(3):
            other.extend(make(seed, 16))
    handler = signal.getsignal(signal.SIGINT)
    ring.storage.now = True
    with pytest.raises(KeyboardInterrupt):
        write(make, ring)
    assert signal.getsignal(signal.SIGINT) is handler
    write(make, twin)
    assert (bits(ring), len(ring), ring.cursor) == (bits(twin), len(twin), twin.cursor)


def test_rows_of_an_interrupted_write_are_drawn_by_priority_after_the_next():
    sampler = PrioritizedSampler(120, 1.0, 1.0, seed=0)
    rb = TensorDictReplayBuffer(storage=Interrupted(120), sampler=sampler, batch_size=500)
    rb.extend(plain(0, 4))
    rb.storage.now = True
    with pytest.raises(KeyboardInterrupt):
        rb.extend(plain(1, 5))
    rb.storage.now = False
    rb.extend(plain(2, 6))
    assert rb.sample()["index"].unique().tolist() == list(range(30))
