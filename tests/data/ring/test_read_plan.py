"""A planned read gives what the plain one gives, bit for bit, in memory of its own."""

import numpy as np
import pytest
import torch
from batches import same
from face import Ring
from plain_rings import play

from rlcli.data import LazyTensorStorage

pytestmark = pytest.mark.filterwarnings("ignore:.*not followed by their own")


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("next_obs", ["exact", "full"])
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_planned_and_plain_reads_give_the_same(ndim, next_obs, ids):
    rng = np.random.default_rng(ndim)
    ring = Ring(LazyTensorStorage(60, ndim=ndim), next_obs=next_obs)
    shapes = {1: [(7,), (20,), (3, 4)], 2: [(3, 5), (3, 1)], 3: [(2, 3, 4), (2, 3, 1)]}[ndim]
    for _ in range(30):
        ring.extend(play(rng, shapes[rng.integers(len(shapes))], ids=ids))
        for count in (1, 33, 0):
            rows = rng.integers(0, len(ring), count)
            planned, oracle = ring.columns(rows), ring.contents.read(rows)
            assert list(planned) == list(oracle) == list(ring.fields)
            same(planned, oracle)
    assert ring.reads is not None


def test_a_plan_follows_the_layout():
    """Rows cleared, told apart by other keys, loaded or written over between two reads."""
    rng = np.random.default_rng(0)
    ring = Ring(LazyTensorStorage(50), next_obs="exact")
    for turn in range(20):
        ring.extend(play(rng, (17,), dtype=np.float32 if turn < 10 else np.uint8))
        if turn % 5 == 1:
            ring.overwrite(np.array([3, 5]), play(rng, (2,), dtype=np.float32 if turn < 10 else np.uint8))
        elif turn % 5 == 2:
            ring.use_markers(end_keys=[("next", "done")] if turn % 2 else [])
        elif turn % 5 == 3:
            rows = {key: ring.storage.column(key)[: len(ring)].clone() for key in ring.storage.fields}
            ring.take_over(ring.read_state(ring.state_dict()))
            ring.storage.write(0, rows)
        rows = rng.integers(0, len(ring), 40)
        same(ring.columns(rows), ring.contents.read(rows))
        if turn == 9:
            ring.clear(fields=True)


def test_what_was_read_is_not_what_is_stored():
    rng = np.random.default_rng(0)
    ring = Ring(LazyTensorStorage(50), next_obs="exact")
    ring.extend(play(rng, (17,)))
    first, second = (ring.columns(np.arange(17)) for _ in range(2))
    for column in first.values():
        column.zero_()
    third = ring.columns(np.arange(17))
    same(second, third)
    assert torch.is_nonzero(third["observation"].sum())


def test_some_keys_and_other_kinds_of_rows_are_read_plainly():
    rng = np.random.default_rng(0)
    coded = Ring(LazyTensorStorage(50), codes=True)
    coded.extend(play(rng, (17,)))
    coded.columns(np.arange(17))
    assert coded.reads is None or not coded.contents.codes
    ring = Ring(LazyTensorStorage(50))
    ring.extend(play(rng, (17,)))
    assert list(ring.columns(np.arange(3), ["action"])) == ["action"] and ring.reads is None
