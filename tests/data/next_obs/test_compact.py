"""Next observations of `compact`, read off the rows below: against `full`, row by row."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from face import refused
from tensordict import TensorDict

from rlcli.collectors import Collector
from rlcli.data.next_obs.modes import with_next
from rlcli.envs import GymEnv, SerialEnv
from rlcli.errors import ArgumentError, MissingKeyError
from rlcli.keys import DONE, TRAJ_IDS
from rlcli.specs.base import fill_for


class Pixels(gym.Env):
    """Integer pictures beside floats; episodes of five steps."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Dict(
            {"image": gym.spaces.Box(0, 255, (2, 2), np.uint8), "place": gym.spaces.Box(-1e6, 1e6, (3,), np.float32)}
        )
        self.action_space = gym.spaces.Discrete(2)

    def _see(self):
        return {"image": np.full((2, 2), self.t + 10, np.uint8), "place": np.full(3, self.t + 0.5, np.float32)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._see(), {}

    def step(self, action):
        self.t += 1
        return self._see(), 0.0, self.t == 5, False, {}


KEYS = ["image", "place"]


def batches(mode: str, lanes: int | None, **options):
    env = GymEnv(Pixels()) if lanes is None else SerialEnv(lanes, lambda: GymEnv(Pixels()))
    collector = Collector(env, frames_per_batch=7 * (lanes or 1), next_obs=mode, seed=0, **options)
    return [collector.rollout() for _ in range(3)]


@pytest.mark.parametrize("lanes", [None, 2])
@pytest.mark.parametrize("fresh", [False, True], ids=["goes on", "reset at each batch"])
def test_every_row_is_the_true_successor_or_the_fill_value(lanes, fresh):
    compact, full = (batches(mode, lanes, reset_at_each_iter=fresh) for mode in ("compact", "full"))
    for i, (small, whole) in enumerate(zip(compact, full, strict=True)):
        assert ("next", "image") not in small.keys(True, True)
        got = with_next(small, KEYS, after=compact[i + 1] if i < 2 else None, fill_value=0)
        unknown = whole.get(DONE).squeeze(-1).clone()
        unknown[..., -1] |= fresh or i == 2
        for key in KEYS:
            assert torch.equal(got["next", key][~unknown], whole["next", key][~unknown])
            assert bool((got["next", key][unknown] == 0).all())
        assert unknown.any() and ("next", "image") not in small.keys(True, True)


def test_floats_are_nan_without_a_fill_value_and_integers_ask_for_one():
    batch = batches("compact", 2)[0]
    got = with_next(batch, ["place"])["next", "place"]
    assert torch.equal(got.isnan().all(-1), batch.get(DONE).squeeze(-1) | (torch.arange(7) == 6))
    refused(ArgumentError, "uint8 memory.fill_value=0", lambda: with_next(batch, KEYS))


@pytest.mark.parametrize("value", [-1, 256, 0.5])
def test_a_fill_value_that_the_dtype_cannot_hold_is_refused(value):
    refused(ArgumentError, "255", lambda: fill_for("image", torch.uint8, value))


def test_without_ids_nothing_is_read_across_batches():
    first, second, _ = batches("compact", 2)
    got = with_next(first.exclude(TRAJ_IDS), ["place"], after=second.exclude(TRAJ_IDS))
    assert bool(got["next", "place"][:, -1].isnan().all())


def test_ends_are_told_by_flags_or_by_ids_and_neither_is_a_sentence():
    batch = TensorDict(
        {
            "x": torch.arange(4.0),
            "next": {"done": torch.tensor([0, 1, 0, 0], dtype=torch.bool)[:, None]},
            "collector": {"traj_ids": torch.tensor([0, 0, 1, 1])},
        },
        [4],
    )
    want = torch.tensor([1.0, -1.0, 3.0, -1.0])
    for given in (batch, batch.exclude(DONE), batch.exclude(TRAJ_IDS)):
        assert torch.equal(with_next(given, ["x"], fill_value=-1)["next", "x"], want)
    refused(MissingKeyError, "next.done", lambda: with_next(batch.exclude(DONE, TRAJ_IDS), ["x"]))
