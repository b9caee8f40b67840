"""What went wrong elsewhere with advantages of flat batches: one test each."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from rlcli.objectives.value import GAE

STEPS = 20_000
ROOM = 1 << 29  # bytes; one padded column would be STEPS * STEPS * 4


def advantages() -> tuple[torch.Tensor, torch.Tensor]:
    """Of 20,000 trajectories of one step and one of 20,000, values being observations; and where they end."""
    done = torch.ones(2 * STEPS, 1, dtype=torch.bool)
    done[STEPS:-1] = False
    values = torch.linspace(-1, 1, 2 * STEPS)[:, None]
    following = {"observation": -values, "reward": torch.ones(2 * STEPS, 1), "done": done, "terminated": done.clone()}
    batch = TensorDict({"observation": values, "next": following}, batch_size=[2 * STEPS])
    critic = TensorDictModule(nn.Identity(), in_keys=["observation"], out_keys=["state_value"])
    return GAE(gamma=0.9, lmbda=0.8, value_network=critic)(batch)["advantage"].flatten(), done.flatten()


def test_one_long_trajectory_beside_many_short_ones_is_not_padded_to_its_length():
    """Elsewhere: 25.6 GB were asked for."""
    got, done = advantages()
    value, ends = torch.linspace(-1, 1, 2 * STEPS).tolist(), done.tolist()
    carry, want = 0.0, [0.0] * (2 * STEPS)
    for t in reversed(range(2 * STEPS)):
        delta = 1.0 - value[t] - 0.9 * value[t] * (not ends[t])
        want[t] = carry = delta + 0.72 * carry * (not ends[t])
    assert torch.allclose(got, torch.tensor(want), atol=1e-4)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM,) * 2)
            code = 0 if torch.equal(advantages()[0], got) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
