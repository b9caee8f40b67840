"""Objects in a ring."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlcli.data.buffers.objects import ObjectRing
from rlcli.data.storages import ListStorage
from rlcli.data.storages.list_storage import collate
from rlcli.errors import ArgumentError


def test_the_newest_objects_are_there_in_their_rows():
    rng = np.random.default_rng(0)
    ring, model, count = ObjectRing(ListStorage(7)), {}, 0
    for _ in range(200):
        new = [object() for _ in range(int(rng.integers(0, 8)))]
        rows = ring.extend(new)
        for item in new:
            model[count % 7] = item
            count += 1
        assert len(ring) == min(count, 7) and ring.base == max(0, count - 7)
        assert all(model[row] is item for row, item in zip(rows.tolist(), new, strict=True))
        live = np.array(sorted(model), np.int64)
        assert all(a is model[row] for row, a in zip(live, ring.read(live), strict=True))


def test_written_over_and_cleared():
    ring = ObjectRing(ListStorage(3))
    ring.extend("abc")
    ring.extend("d")
    ring.overwrite(np.array([1, 1]), ["x", "y"])
    assert ring.read(np.arange(3)) == ["d", "y", "c"]
    ring.clear()
    assert len(ring) == 0 and ring.storage.nbytes == 0


def test_like_is_stacked_and_the_rest_stays_a_list():
    assert collate([torch.zeros(2), torch.ones(2)]).shape == (2, 2)
    assert collate([TensorDict(a=torch.zeros(2)), TensorDict(a=torch.ones(2))])["a"].shape == (2, 2)
    assert isinstance(collate([torch.zeros(2), torch.ones(3)]), list)
    assert collate(["a", 1]) == ["a", 1] and collate([]) == []


def test_what_needs_columns_is_refused():
    storage = ListStorage(3)
    for work in (
        lambda: storage.declare({}, 3),
        lambda: storage.write(0, {}),
        lambda: storage.gather(np.arange(1)),
        lambda: storage.scatter(np.arange(1), {}),
    ):
        with pytest.raises(ArgumentError, match="no columns"):
            work()
    with pytest.raises(ArgumentError, match="no place in a file"):
        ObjectRing(storage).state_dict()
