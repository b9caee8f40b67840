"""Bookkeeping transforms and frame stacks give upstream's columns, bit for bit, root and next."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlcli import transforms as ours

pytest.importorskip("torchrl")
sys.path.insert(0, str(Path(__file__).parents[1] / "transforms"))

from scripted import run_columns, write_script
from torchrl.collectors import Collector
from torchrl.data import Binary, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase, SerialEnv, TransformedEnv
from torchrl.envs import transforms as theirs

T = 8


class OneLane(EnvBase):
    """One lane of a script as an upstream env."""

    def __init__(self, script, lane):
        super().__init__(batch_size=[])
        self.script, self.lane, self.t = script, lane, -1
        obs = torch.from_numpy(script.first[lane])
        self.observation_spec = Composite(observation=Unbounded(obs.shape, dtype=obs.dtype))
        self.action_spec = Binary(1, dtype=torch.int8)
        self.reward_spec = Unbounded((1,))
        self.full_done_spec = Composite(
            {flag: Categorical(2, (1,), dtype=torch.bool) for flag in ("done", "terminated", "truncated")}
        )

    def _value(self, name):
        return torch.from_numpy(getattr(self.script, name)[self.t, self.lane].copy())

    def _reset(self, tensordict):
        first = torch.from_numpy(self.script.first[self.lane].copy())
        return TensorDict({"observation": first if self.t < 0 else self._value("restart")})

    def _step(self, tensordict):
        self.t += 1
        terminated, truncated = self._value("terminated"), self._value("truncated")
        return TensorDict(
            {
                "observation": self._value("successor"),
                "reward": self._value("reward"),
                "terminated": terminated,
                "truncated": truncated,
                "done": terminated | truncated,
            }
        )

    def _set_seed(self, seed):
        pass


def upstream_batches(script, transform):
    makers = [lambda lane=lane: OneLane(script, lane) for lane in range(script.lanes)]
    env = TransformedEnv(SerialEnv(script.lanes, makers), transform)
    collector = Collector(env, frames_per_batch=script.lanes * T, total_frames=script.lanes * script.steps)
    batches = [batch.clone() for batch in collector]
    collector.shutdown()
    return batches


CASES = {
    "init": (lambda p: p.InitTracker(), ["is_init"], {}),
    "count": (lambda p: p.StepCounter(), ["step_count"], {}),
    "count to 3": (lambda p: p.StepCounter(max_steps=3), ["step_count"], {}),
    "reward sum": (lambda p: p.RewardSum(), ["episode_reward"], {}),
    "reward sum by name": (lambda p: p.RewardSum(in_keys=["reward"], out_keys=["total"]), ["total"], {}),
    "cat vectors": (lambda p: p.CatFrames(3, -1, in_keys=["observation"]), [], {}),
    "cat padded": (lambda p: p.CatFrames(3, -1, in_keys=["observation"], padding="constant"), [], {}),
    "cat images": (
        lambda p: p.CatFrames(4, -3, in_keys=["observation"]),
        [],
        {"shape": (3, 5, 6), "dtype": np.uint8},
    ),
    "reward scaling": (lambda p: p.RewardScaling(0.3, 0.7), [], {}),
    "reward standardised": (lambda p: p.RewardScaling(0.3, 0.7, standard_normal=True), [], {}),
    "reward clipping": (lambda p: p.RewardClipping(-0.5, 0.5), [], {}),
    "reward sign": (lambda p: p.SignTransform(in_keys=["reward"]), [], {}),
    "double to float": (lambda p: p.DoubleToFloat(in_keys=["observation"]), [], {"dtype": np.float64}),
    "images": (
        lambda p: p.ToTensorImage(in_keys=["observation"]),
        [],
        {"shape": (5, 6, 3), "dtype": np.uint8},
    ),
    "all bookkeeping": (
        lambda p: p.Compose(
            p.InitTracker(),
            p.StepCounter(max_steps=5),
            p.RewardSum(),
            p.CatFrames(4, -1, in_keys=["observation"]),
        ),
        ["is_init", "step_count", "episode_reward"],
        {},
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(3)
def test_columns_equal_upstreams(name):
    make, live, world = CASES[name]
    script = write_script(batch=T, **world)
    expected = upstream_batches(script, make(theirs))
    for inside in (live, ()):
        got = run_columns(script, make(ours), T, live=inside)
        for cols, td in zip(got, expected, strict=True):
            assert set(cols) <= set(td.keys(True, True))
            for key, col in cols.items():
                value = td.get(key).numpy()
                assert value.dtype == col.dtype, key
                np.testing.assert_array_equal(col, value, err_msg=str(key))
