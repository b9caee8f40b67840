"""Trajectories told apart by other keys after rows were stored, against a ring that had these keys from the start."""

import numpy as np
import pytest
from face import Ring, refused
from ring_model import Streams, batch_of, check, next_bits

import rlcli.data.ring.write as remark_module
from rlcli.data import LazyTensorStorage, ReplayBuffer, SliceSampler
from rlcli.errors import MissingKeyError

OTHER = {"traj_key": "episode_id", "end_keys": (("next", "done"),)}


def a_batch(rng, streams, lanes, known):
    steps = int(rng.integers(1, 12))
    envs = range(streams.envs) if lanes > 1 else rng.permutation(streams.envs)[: rng.integers(1, streams.envs + 1)]
    played = [streams.play(int(env), steps) for env in envs]
    if rng.random() < 0.1:  # steps out of order
        played = [[lane[i] for i in rng.permutation(steps)] for lane in played]
    if rng.random() < 0.15:  # something is lost
        for env in range(streams.envs):
            streams.play(env, 1)
    td, _ = batch_of(played, [len(played), steps], next_obs=known, ids=True)
    td["episode_id"] = td["collector", "traj_ids"].clone()
    td["collector", "traj_ids"] = td["episode_id"] // 2  # trajectories that the first keys do not tell apart
    return td


def answers(index, rows, evicted):
    """What is to be the same; positions only where the first row of a trajectory is still there."""
    numbers = index.numbers(rows)
    _, together = np.unique(numbers, return_inverse=True)
    first = {}
    together = [first.setdefault(n, len(first)) for n in together.tolist()]
    out = [index.successors(rows).tolist(), index.ids(rows).tolist(), together, index.count]
    found = index.trajectories()
    out += [found["length"].tolist(), found["row"].tolist(), found["closed"].tolist()]
    return out if evicted else [*out, index.whose(rows)[1].tolist()]


def go(seed):
    rng = np.random.default_rng(seed)
    lanes, steps = int(rng.choice([1, 1, 2, 3])), int(rng.choice([5, 20, 61, 200]))
    known, mode = bool(rng.random() < 0.8), str(rng.choice(["exact", "full"]))
    streams = Streams(
        rng, lanes if lanes > 1 else int(rng.integers(1, 4)), values=str(rng.choice(["letters", "floats", "bytes"])),
        end=float(rng.choice([0.05, 0.3])), ids="unique",
    )  # fmt: skip
    late, early = (Ring(LazyTensorStorage(steps * lanes, ndim=1 if lanes == 1 else 2), next_obs=mode) for _ in range(2))
    early.use_markers(**OTHER)
    batches = [a_batch(rng, streams, lanes, known) for _ in range(int(rng.integers(2, 12)))]
    asked = int(rng.integers(1, len(batches)))
    for k, td in enumerate(batches):
        if k == asked:
            late.use_markers(**OTHER)
        for ring in (late, early):
            ring.extend(td)
        if k >= asked - 1:
            if k == asked - 1:
                version = late.index.version
                late.use_markers(**OTHER)
                assert late.index.version > version
            rows = np.arange(len(late))
            assert answers(late.index, rows, late.base > 0) == answers(early.index, rows, late.base > 0)
            check(late)
            if known:
                assert next_bits(late, rows) == next_bits(early, rows)
            assert late.index.slots_in_use == early.index.slots_in_use


@pytest.mark.filterwarnings("ignore:.*not followed by their own")
@pytest.mark.parametrize("piece", [1, 2000, 1 << 26])
@pytest.mark.parametrize("block", [*range(3), *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 12))])
@pytest.mark.every(2)
def test_it_answers_as_one_that_had_the_keys_from_the_start(monkeypatch, piece, block):
    monkeypatch.setattr(remark_module, "_PIECE", piece)
    for seed in range(block * 12, block * 12 + 12):
        go(seed)


@pytest.mark.filterwarnings("ignore:.*not followed by their own")
@pytest.mark.parametrize("mode", ["exact", "full"])
def test_without_ids_nothing_is_joined_and_next_observations_keep_their_bytes(mode):
    rng = np.random.default_rng(0)
    for _ in range(20):
        ring, streams = Ring(LazyTensorStorage(60), next_obs=mode), Streams(rng, 2)
        for _ in range(5):
            ring.extend(a_batch(rng, streams, 1, True))
        ring.use_markers(**OTHER)
        rows = np.arange(len(ring))
        before, bits = ring.index.successors(rows), next_bits(ring, rows)
        ring.tell_apart(type(ring.markers)(None, (("next", "done"),)))
        after = ring.index.successors(rows)
        assert next_bits(ring, rows) == bits
        in_lane = np.where(before == (rows + 1) % 60, before, -1)
        assert after.tolist() == in_lane.tolist()
        check(ring)


def test_a_key_that_is_not_stored_changes_nothing():
    ring = Ring(LazyTensorStorage(60))
    ring.extend(a_batch(np.random.default_rng(0), Streams(np.random.default_rng(0), 1), 1, True))
    index = ring.index
    refused(MissingKeyError, "nowhere", lambda: ring.use_markers("nowhere"))
    ring.use_markers()
    assert ring.index is index


def test_a_dump_is_read_with_the_keys_of_the_buffer_that_loads_it(tmp_path):
    rng = np.random.default_rng(0)
    streams = Streams(rng, 2, end=0.1)
    first = ReplayBuffer(storage=LazyTensorStorage(100))
    for _ in range(6):
        first.extend(a_batch(rng, streams, 1, True))
    first.dumps(tmp_path)
    second = ReplayBuffer(
        storage=LazyTensorStorage(100), sampler=SliceSampler(slice_len=2, traj_key="episode_id"), batch_size=2
    )
    second.loads(tmp_path)
    rows = np.arange(len(second))
    assert second.ring.index.ids(rows).tolist() == second[:]["episode_id"].tolist()
