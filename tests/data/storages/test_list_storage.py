"""Objects in a ring."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from face import refused
from tensordict import TensorDict

from rlcli.data import (
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from rlcli.data.storages import ListStorage
from rlcli.data.storages.list_storage import ObjectRing, collate
from rlcli.errors import ArgumentError
from rlcli.transforms import MultiStepTransform, Transform


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


def ragged(count, first=0):
    """Objects with tensors of other lengths, and a key that only some of them have."""
    items = []
    for i in range(first, first + count):
        item = TensorDict({"number": torch.tensor(i), "a": torch.full((1 + i % 3,), float(i))})
        if i % 4 == 0:
            item["b", "c"] = torch.tensor(i)
        items.append(item)
    return items


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("prefetch", [None, 2])
def test_ragged_tensordicts_are_stored_and_sampled_as_they_are(kind, prefetch):
    rb = kind(storage=ListStorage(10), sampler=RandomSampler(seed=0), batch_size=200, prefetch=prefetch)
    stored, items = {}, ragged(14)
    for first, last in ((0, 6), (6, 13), (13, 14)):
        for row, item in zip(rb.extend(items[first:last]).tolist(), items[first:last], strict=True):
            stored[row] = item
    one = ragged(1, first=14)[0]
    stored[rb.add(one)] = one
    with rb:
        batch, info = rb.sample(return_info=True)
        assert len(batch) == 200 and set(info["index"].tolist()) == set(range(10))
        for row, got in zip(info["index"].tolist(), batch, strict=True):
            if kind is TensorDictReplayBuffer:
                assert got["index"] == row
            assert {*got.keys(True, True)} - {"index"} == {*stored[row].keys(True, True)}
            assert all(torch.equal(got[key], stored[row][key]) for key in stored[row].keys(True, True))
        assert "index" not in stored[0] and rb[3]["number"] == stored[3]["number"]
        assert [int(item["number"]) for item in rb[:]] == [int(stored[row]["number"]) for row in range(10)]
    assert all("index" not in item for item in stored.values())


def test_alike_tensordicts_make_a_plain_batch():
    rb = TensorDictReplayBuffer(storage=ListStorage(10), batch_size=8)
    rb.extend([TensorDict({"x": torch.full((2,), float(i))}) for i in range(5)])
    sample = rb.sample()
    assert type(sample) is TensorDict and sample["x"].shape == (8, 2)
    assert torch.equal(sample["x"][:, 0], sample["index"].float())


@pytest.mark.parametrize("lengths", [[4, 4, 4], [4, 2, 3]])
@pytest.mark.parametrize("one_by_one", [True, False])
def test_objects_with_rows_of_their_own_have_one_priority_each(lengths, one_by_one):
    def trajectory(i, n):
        return TensorDict({"number": torch.full((n,), i), "td_error": torch.linspace(0, 1 + i, n)}, [n])

    rb = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, eps=0.0, storage=ListStorage(9), batch_size=30)
    items = [trajectory(i, n) for i, n in enumerate(lengths)]
    for batch in [[item] for item in items] if one_by_one else [items]:
        rb.extend(batch)
    assert rb.sampler.state_dict()["priorities"][:3].tolist() == [1, 2, 3]  # the largest of each
    sample = rb.sample()
    for item in sample.unbind(0):
        assert (item["index"] == item["number"]).all() and item["index"].shape == item.batch_size
        assert (item["priority_weight"] == item["priority_weight"][0]).all()
    for item in sample.unbind(0):
        item["td_error"] = torch.rand(item.shape) * 0 + 10.0 - item["number"]
    if len(set(lengths)) == 1:
        sample["td_error"] = 10.0 - sample["number"].float()
    rb.update_tensordict_priority(sample)
    drawn = {int(item["number"][0]) for item in sample.unbind(0)}
    assert {i: p for i, p in enumerate(rb.sampler.state_dict()["priorities"][:3].tolist()) if i in drawn} == {
        i: 10.0 - i for i in drawn
    }


def test_a_batch_of_trajectories_is_as_many_objects():
    rb = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=ListStorage(9), batch_size=4)
    batch = TensorDict({"x": torch.arange(6).reshape(2, 3), "td_error": torch.arange(6.0).reshape(2, 3)}, [2, 3])
    assert rb.extend(batch).tolist() == [0, 1]
    assert rb.sampler.state_dict()["priorities"][:2].tolist() == pytest.approx([2, 5])
    assert rb.sample()["index"].shape == (4, 3)


def test_transforms_pass_every_object_on_its_way_in():
    class Doubled(Transform):
        def inv(self, td):
            return td.set("a", td["a"] * 2)

        def forward(self, td):
            return td

    rb = ReplayBuffer(storage=ListStorage(9), transform=Doubled(), batch_size=4)
    items = ragged(3)
    rb.extend(items)
    assert [item["a"].tolist() for item in rb[:]] == [[0], [2, 2], [4, 4, 4]] and items[1]["a"].tolist() == [1, 1]


def test_an_ensemble_of_lists_gives_their_objects_end_to_end():
    members = [ReplayBuffer(storage=ListStorage(9)) for _ in range(2)]
    members[0].extend(["a", "b"])
    members[1].extend(ragged(5))
    sample = ReplayBufferEnsemble(*members, batch_size=6, sample_from_all=True).sample()
    assert len(sample) == 6 and set(sample[:3]) <= {"a", "b"} and all("a" in item for item in sample[3:])
    both = ReplayBufferEnsemble.per_worker(2, lambda: TensorDictReplayBuffer(storage=ListStorage(9)), batch_size=40)
    for member in range(2):
        both.extend(ragged(5), buffer=member)
    sample = both.sample()
    assert len(sample) == 40 and [int(item["index", "buffer_ids"]) for item in sample] == [0] * 20 + [1] * 20


def rows_state():
    return ReplayBuffer(storage=LazyTensorStorage(4)).state_dict()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ReplayBuffer(storage=ListStorage(4), frame_stack=4), "frame_stack: how rows are stored"),
        (lambda: ReplayBuffer(storage=ListStorage(4), codes=True, next_obs="exact"), "next_obs, codes: how rows"),
        (
            lambda: ReplayBuffer(storage=ListStorage(4), transform=MultiStepTransform(3, 0.9)),
            "MultiStepTransform reads",
        ),
        (lambda: ReplayBuffer(storage=ListStorage(4)).extend({"a": 1}), "got a dict. Use add"),
        (lambda: ReplayBuffer(storage=ListStorage(4)).load_state_dict(rows_state()), "no place in a file"),
        (lambda: ReplayBuffer(storage=LazyTensorStorage(9)).extend(ragged(3)), "these are not alike"),
    ],
)
def test_what_objects_have_no_use_for_is_refused(make, text):
    with pytest.raises(ArgumentError) as caught:
        make()
    assert text in str(caught.value)


def test_samples_of_objects_go_to_a_device_where_they_can():
    rb = ReplayBuffer(storage=ListStorage(4), batch_size=9, device="meta")
    rb.extend([torch.zeros(2), torch.zeros(3), "name"])
    assert {getattr(item, "device", item) for item in rb.sample()} <= {torch.device("meta"), "name"}


def test_like_is_stacked_and_the_rest_stays_a_list():
    assert collate([torch.zeros(2), torch.ones(2)]).shape == (2, 2)
    assert collate([TensorDict(a=torch.zeros(2)), TensorDict(a=torch.ones(2))])["a"].shape == (2, 2)
    assert isinstance(collate([torch.zeros(2), torch.ones(3)]), list)
    assert collate(["a", 1]) == ["a", 1] and collate([]) == []


def test_what_needs_columns_is_refused():
    storage = ListStorage(3)
    refused(ArgumentError, "place file", lambda: ObjectRing(storage).state_dict())
