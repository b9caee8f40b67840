"""Our slices, their markers and our epochs against upstream's, where both mean the same."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from rlcli.data import LazyTensorStorage, SamplerWithoutReplacement, SliceSampler, TensorDictReplayBuffer
from rlcli.data.samplers import Draw

upstream = pytest.importorskip("torchrl.data")
samplers = pytest.importorskip("torchrl.data.replay_buffers.samplers")

LENGTHS = [7, 12, 5, 13, 6]


def batch(ids=True, is_init=False):
    n = sum(LENGTHS)
    ends = torch.tensor(LENGTHS).cumsum(0) - 1
    done = torch.zeros(n, 1, dtype=torch.bool)
    done[ends] = True
    terminated = done.clone()
    terminated[ends[::2]] = False
    td = TensorDict({"action": torch.arange(n)}, [n])
    td["next"] = TensorDict({"done": done, "terminated": terminated, "truncated": done & ~terminated}, [n])
    if ids:
        td["collector", "traj_ids"] = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    if is_init:
        td["is_init"] = torch.cat((torch.ones(1, 1, dtype=torch.bool), done[:-1]))
    return td


def both(data, ours, theirs, batch_size):
    torch.manual_seed(0)
    one = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=ours, batch_size=batch_size)
    other = upstream.TensorDictReplayBuffer(
        storage=upstream.LazyTensorStorage(100), sampler=theirs, batch_size=batch_size
    )  # fmt: skip
    one.extend(data)
    other.extend(data)
    return one, other


@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("is_init", [True, False])
@pytest.mark.parametrize("slices", [{"num_slices": 6}, {"slice_len": 5}])
def test_the_same_slices_are_possible_and_marked_alike(ids, is_init, slices):
    keys = {"traj_key": ("collector", "traj_ids")} if ids else {"end_key": ("next", "done")}
    ours, theirs = both(
        batch(ids, is_init), SliceSampler(**slices, seed=0), samplers.SliceSampler(**slices, **keys), 30
    )  # fmt: skip
    starts = []
    for rb in (ours, theirs):
        drawn = [rb.sample()["action"].reshape(6, 5) for _ in range(100)]
        assert all((part.diff(dim=1) == 1).all() for part in drawn)
        starts.append({int(start) for part in drawn for start in part[:, 0]})
    assert starts[0] == starts[1]
    sample = theirs.sample()
    rows = sample["action"].numpy()
    columns = ours.ring.columns(rows)
    ours.sampler.mark(columns, Draw(rows, torch.full((6,), 5).numpy()))
    for key in (("next", "done"), ("next", "terminated"), *(["is_init"] if is_init else [])):  # theirs only if stored
        assert torch.equal(columns[key], sample[key].reshape(-1, 1)), key
    over = columns["next", "terminated"]  # theirs flags the last row truncated even where it was terminated
    assert torch.equal(columns["next", "truncated"], sample["next", "truncated"].reshape(-1, 1) & ~over)
    assert (columns["is_init"].reshape(6, 5)[:, 0]).all()


@pytest.mark.parametrize("drop_last", [True, False])
def test_epochs_have_the_same_batches(drop_last):
    ours, theirs = both(
        batch(), SamplerWithoutReplacement(drop_last), samplers.SamplerWithoutReplacement(drop_last), 16
    )  # fmt: skip
    sizes = [[len(part) for part in rb] for rb in (ours, theirs)]
    assert sizes[0] == sizes[1]
    flat = (
        SamplerWithoutReplacement(drop_last, shuffle=False),
        samplers.SamplerWithoutReplacement(drop_last, shuffle=False),
    )
    ours, theirs = both(batch(), *flat, 16)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one["action"], other["action"])
