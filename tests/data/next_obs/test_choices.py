"""One-hot observations of a buffer that packs its rows: next ones beside the rows are read as they were given."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.nn.functional import one_hot

from rlcli.data import LazyTensorStorage, TensorDictReplayBuffer

CHOICES = 500


def batch(seed, steps=40, length=5, *, spoilt=None):
    """Episodes of so many steps in two envs; `spoilt`: a final observation that is not one-hot."""
    rng = np.random.default_rng(seed)
    shown = one_hot(torch.from_numpy(rng.integers(CHOICES, size=(2, steps + 1))), CHOICES)
    done = torch.zeros(2, steps, 1, dtype=torch.bool)
    done[:, length - 1 :: length] = True
    after = shown[:, 1:].clone()
    finals = done[..., 0]
    after[finals] = one_hot(torch.from_numpy(rng.integers(CHOICES, size=int(finals.sum()))), CHOICES)
    if spoilt is not None:
        after[0, length - 1, :2] = spoilt
    root = {"observation": shown[:, :-1].contiguous(), "action": torch.from_numpy(rng.integers(4, size=(2, steps)))}
    flags = {"done": done, "terminated": done.clone(), "truncated": done & False}
    beside = {"observation": after, "reward": torch.ones(2, steps, 1), **flags}
    return TensorDict({**root, "next": TensorDict(beside, [2, steps])}, [2, steps])


def buffer(next_obs="exact"):
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(100), next_obs=next_obs, codes={"observation": CHOICES}, batch_size=32
    )


def same(one, other) -> bool:
    rows = one[:], other[:]
    return len(one) == len(other) and bool((rows[0] == rows[1]).all()) and str(rows[0]) == str(rows[1])


@pytest.mark.parametrize("spoilt", [None, torch.tensor([1, 1]), torch.tensor([2, 0])])
@pytest.mark.parametrize("state", ["live", "saved"])
def test_rows_are_read_as_they_were_given(spoilt, state):
    small, plain = buffer(), buffer("full")
    for seed in range(4):  # goes round
        for each in (small, plain):
            each.extend(batch(seed, spoilt=spoilt if seed == 2 else None))
        if state == "saved":
            saved, small = small.state_dict(), buffer()
            small.load_state_dict(saved)
        assert same(small, plain)


def test_what_is_written_over_single_rows_is_kept_too():
    small, plain = buffer(), buffer("full")
    for each in (small, plain):
        each.extend(batch(0))
    new = batch(7).reshape(-1)[:6]
    for each in (small, plain):
        each.ring.overwrite(np.array([3, 4, 9, 20, 21, 70]), new)
    assert same(small, plain)
