"""What went wrong elsewhere with next observations and trajectories, from an env to a sample: one test each."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import torch
from face import refused
from tensordict import TensorDict

from rlcli.collectors import Collector
from rlcli.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer, split_trajectories
from rlcli.envs import GymEnv, TransformedEnv
from rlcli.envs.transforms import NextObservationDelta, NextStateReconstructor
from rlcli.errors import ArgumentError, NumericsError
from rlcli.keys import TRAJ_IDS


class Screen(gym.Env):
    """uint8 pictures that count the steps; episodes of seven."""

    observation_space = gym.spaces.Box(0, 255, (2, 2), np.uint8)
    action_space = gym.spaces.Discrete(2)
    started = 0

    def _seen(self):
        return np.full((2, 2), (self.started * 10 + self.t) % 256, np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.started = 0, self.started + 1
        return self._seen(), {}

    def step(self, action):
        self.t += 1
        return self._seen(), 1.0, self.t == 7, False, {}


class Jump(Screen):
    """Floats, a million apart at step 5."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def _seen(self):
        return np.full(2, 1e6 if self.t >= 5 else self.t, np.float32)


def sampled(batch, transform, *, slice_len=5, batch_size=100, **options):
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(200), sampler=SliceSampler(slice_len=slice_len, seed=0, **options),
        transform=transform, batch_size=batch_size,
    )  # fmt: skip
    rb.extend(batch)
    return rb.sample()


def collected(env, **options) -> TensorDict:
    return next(iter(Collector(env, frames_per_batch=60, total_frames=60, seed=0, **options)))


def test_uint8_observations_of_compact_are_read_again():
    """Elsewhere: an error about NaN in integers."""
    batch = collected(GymEnv(Screen()), compact_obs=True)
    refused(ArgumentError, "fill_value=0 next_obs=exact", lambda: sampled(batch, NextStateReconstructor()))
    sample = sampled(batch, NextStateReconstructor(fill_value=0))
    obs, after = sample["observation"][:, 0, 0], sample["next", "observation"][:, 0, 0]
    unknown = (sample["observation"] % 10)[:, 0, 0] == 6  # the last step of an episode
    unknown |= obs == batch["observation"][-1, 0, 0]
    assert after.dtype is torch.uint8
    assert torch.equal(after[~unknown], obs[~unknown] + 1) and not after[unknown].any()


def test_a_float16_difference_never_becomes_infinite():
    """Elsewhere: infinity above 65504, unseen."""
    refused(NumericsError, "float16", lambda: collected(TransformedEnv(GymEnv(Jump()), NextObservationDelta())))
    for dtype in (torch.bfloat16, torch.int8):
        batch = collected(TransformedEnv(GymEnv(Jump()), NextObservationDelta(delta_dtype=dtype)))
        after = NextObservationDelta()(batch)["next", "observation"]
        assert torch.isfinite(after).all() and after.max() > 9e5


def test_a_difference_of_pixels_is_refused():
    """Elsewhere: half floats of pixels, larger than the pixels."""
    refused(ArgumentError, "uint8 next_obs=exact", lambda: collected(GymEnv(Screen()), next_obs="delta"))


def test_jagged_is_jagged():
    """Elsewhere: `as_nested=torch.jagged` gives strided tensors."""
    batch = collected(GymEnv(Screen()))
    for asked in (True, torch.jagged):
        nested = split_trajectories(batch, as_nested=asked)
        assert all(nested[key].layout is torch.jagged for key in batch.keys(True, True))
    assert split_trajectories(batch, as_nested=torch.strided)["observation"].layout is torch.strided


def test_trajectory_ids_that_are_used_again_are_told_apart():
    """Elsewhere: a crash in `split_trajectories`, and slices over the border."""
    batch = collected(GymEnv(Screen()), compact_obs=True)
    batch[TRAJ_IDS] = batch[TRAJ_IDS] % 2
    nested = split_trajectories(batch, as_nested=True)
    assert [len(part) for part in nested["observation"].unbind()] == [7] * 8 + [4]
    assert nested[TRAJ_IDS].unbind()[2].unique().tolist() == [0]
    sample = sampled(batch, NextStateReconstructor(fill_value=0), slice_len=4)
    within = sample["observation"].reshape(-1, 4, 2, 2)[:, :, 0, 0].int()
    assert (within.diff(dim=1) == 1).all()


def test_the_last_row_of_a_slice_gets_its_own_successor():
    """Elsewhere: the first row of the next slice, or NaN although the successor is stored."""
    batch = collected(GymEnv(Screen()), compact_obs=True)
    sample = sampled(batch, NextStateReconstructor(fill_value=0), slice_len=3, batch_size=300)
    last = sample[2::3]
    inside = (last["observation"] % 10)[:, 0, 0] < 6
    inside &= last["observation"][:, 0, 0] != batch["observation"][-1, 0, 0]
    assert inside.sum() > 20
    assert torch.equal(last["next", "observation"][inside], last["observation"][inside] + 1)
    assert not last["next", "observation"][~inside].any()
