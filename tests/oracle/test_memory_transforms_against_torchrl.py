"""Next observations, n-step returns and trajectories against upstream, where the two mean the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlcli.data import split_trajectories
from rlcli.envs.transforms import MultiStepTransform, NextObservationDelta, NextStateReconstructor

pytest.importorskip("torchrl", reason="the oracle is not installed")

from torchrl.collectors.utils import split_trajectories as upstream_split
from torchrl.data.postprocs import MultiStep
from torchrl.envs.transforms import NextObservationDelta as UpstreamDelta
from torchrl.envs.transforms import NextStateReconstructor as UpstreamReconstructor

GAMMA = 0.9


def lanes(count: int, steps: int, seed: int) -> TensorDict:
    """Random episodes, ends and ids as a collector writes them, next observations in full."""
    random = np.random.default_rng(seed)
    done = torch.from_numpy(random.random((count, steps, 1)) < 0.2)
    ids = torch.zeros(count, steps, dtype=torch.int64)
    ids[:, 1:] = done[:, :-1, 0].cumsum(-1)
    return TensorDict(
        {
            "observation": torch.from_numpy(random.normal(size=(count, steps, 3))),
            "next": {
                "observation": torch.from_numpy(random.normal(size=(count, steps, 3))),
                "reward": torch.from_numpy(random.normal(size=(count, steps, 1))),
                "done": done, "terminated": done.clone(), "truncated": torch.zeros_like(done),
            },
            "collector": {"traj_ids": ids + 100 * torch.arange(count)[:, None]},
        },
        batch_size=[count, steps], names=[None, "time"],
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_differences_are_written_and_read_alike(dtype):
    batch = lanes(2, 50, 0)
    coded = NextObservationDelta(delta_dtype=dtype).compress(batch)
    theirs = UpstreamDelta(["observation"], delta_dtype=dtype)
    stepped = theirs._step(batch.exclude("next"), batch["next"].clone())
    assert torch.equal(stepped["delta", "observation"], coded["next", "delta", "observation"])
    ours, upstream = NextObservationDelta(["observation"])(coded.clone()), theirs(coded.clone())
    assert torch.equal(ours["next", "observation"], upstream["next", "observation"])
    assert set(ours.keys(True, True)) == set(upstream.keys(True, True))
    options = {"drop_delta": False, "restore_dtype": torch.float64}
    ours, upstream = (t(["observation"], **options)(coded.clone()) for t in (NextObservationDelta, UpstreamDelta))
    assert set(ours.keys(True, True)) == set(upstream.keys(True, True))
    following = ours["next", "observation"]
    assert following.dtype == upstream["next", "observation"].dtype == torch.float64
    assert torch.equal(following, upstream["next", "observation"])


@pytest.mark.parametrize("options", [{}, {"traj_key": None}, {"done_key": None}, {"fill_value": 7.0}])
def test_successors_within_a_sample_are_found_alike(options):
    flat = lanes(3, 40, 1).reshape(-1).exclude(("next", "observation"))
    ours = NextStateReconstructor(source="sample", **options)(flat.clone())["next", "observation"]
    theirs = UpstreamReconstructor(**options)(flat.clone())["next", "observation"]
    assert torch.equal(ours.nan_to_num(-1e9), theirs.nan_to_num(-1e9))


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_n_steps_of_a_batch_add_up_alike(n):
    batch = lanes(3, 30, 2)
    ours = MultiStepTransform(n, GAMMA)(batch.clone())
    theirs = MultiStep(gamma=GAMMA, n_steps=n)(batch.clone())
    assert torch.allclose(ours["next", "reward"], theirs["next", "reward"], rtol=1e-6, atol=1e-6)
    assert torch.equal(ours["next", "observation"], theirs["next", "observation"])
    assert torch.equal(ours["steps_to_next_obs"], theirs["steps_to_next_obs"].to(torch.int64).reshape(3, 30, 1))


@pytest.mark.filterwarnings("ignore")
def test_padded_trajectories_are_alike():
    batch = lanes(2, 30, 3)
    ours, theirs = split_trajectories(batch), upstream_split(batch)
    order = [tuple(x) for x in theirs["collector", "traj_ids"][:, :1].tolist()]
    assert order == [tuple(x) for x in ours["collector", "traj_ids"][:, :1].tolist()]
    mask = theirs["collector", "mask"]
    assert torch.equal(ours["mask"], mask)
    for key in batch.keys(True, True):
        assert torch.equal(ours[key][mask], theirs[key][mask]), key
