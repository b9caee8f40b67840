"""What `rlcli bench memory` stores: steps of random play, of a paddle by rule, and of a policy that was just trained.

No Atari policy comes with rlcli, and training one takes hours: Pong by rule has the long rallies of good play, and is
not learned. The trained policy is CartPole's, which is drawn from its states as an RGB picture.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from rlcli.collectors import Collector
from rlcli.config.schemas import CollectConfig, EnvConfig, PolicyConfig
from rlcli.data import full_next_obs
from rlcli.envs.build import build_env
from rlcli.errors import ResourceError
from rlcli.keys import Key

PART = 500
KEYS: list[Key] = ["observation", ("next", "observation"), "action", ("next", "reward"), ("next", "done"),
                   ("next", "terminated")]  # fmt: skip
_SIDE = 84
_UP, _DOWN = 2, 3  # of Pong's actions


def play(cfg: EnvConfig, frames: int, policy: nn.Module | None = None) -> Iterator[TensorDictBase]:
    """Batches of play, `exact`, flat in time; random without a policy."""
    env = build_env(cfg)
    collector = Collector(
        env, policy, frames_per_batch=PART, total_frames=frames, next_obs="exact", seed=0, keep_keys=KEYS
    )
    try:
        yield from collector  # type: ignore[misc]
    finally:
        collector.shutdown()


class Paddle(nn.Module):
    """Pong by rule: the right paddle follows the ball, from stacks uint8 `[..., k, 84, 84]`."""

    def forward(self, stacks: Tensor) -> Tensor:
        frame = stacks[..., -1, 14:77, :].to(torch.int16)  # the field, without score and walls
        seen = (frame - frame[..., :1, :1]).abs() > 20  # what is not background
        rows = torch.arange(seen.shape[-2], dtype=torch.float32)
        paddle, ball = (self._height(part, rows) for part in (seen[..., 73:77], seen[..., 12:72]))
        follow = torch.where(ball < paddle - 1, _UP, torch.where(ball > paddle + 1, _DOWN, 0))
        return torch.where(ball.isnan() | paddle.isnan(), 0, follow)

    @staticmethod
    def _height(seen: Tensor, rows: Tensor) -> Tensor:
        """The mean row of what is seen; NaN where nothing is."""
        count = seen.sum((-2, -1))
        return (seen.sum(-1) * rows).sum(-1) / count


def pong_by_rule(cfg: EnvConfig, frames: int) -> Iterator[TensorDictBase]:
    """`play` by `Paddle`."""
    return play(cfg, frames, TensorDictModule(Paddle(), ["observation"], ["action"]))


def trained_cartpole(frames: int) -> tuple[list[TensorDictBase], float]:
    """Pictures of CartPole as a trained policy plays it, and the policy's mean return; it is trained first."""
    from rlcli.jobs.collect_policy import policy_to_look_at

    with tempfile.TemporaryDirectory() as folder:
        rlcli("train", "recipe=ppo_exact", "console=off", "logger=none", f"run.dir={folder}/run")
        with open(f"{folder}/run/summary.json", encoding="utf-8") as file:
            mean_return = json.load(file)["evaluation"]["mean_return"]
        cfg = CollectConfig(env=EnvConfig(num=1), policy=PolicyConfig(kind="checkpoint", path=f"{folder}/run"))
        policy = policy_to_look_at(cfg, build_env(cfg.env))
    assert policy is not None
    return [_pictured(batch) for batch in play(cfg.env, frames, policy.actor)], mean_return


def _pictured(batch: TensorDictBase) -> TensorDictBase:
    rows = full_next_obs(batch).reshape(-1)
    rows["observation"] = drawn(rows["observation"])
    rows["next", "observation"] = drawn(rows["next", "observation"])
    return TensorDict(rows.to_dict(), rows.batch_size)


def drawn(states: Tensor) -> Tensor:
    """CartPole's states `[N, 4]` as pictures uint8 `[N, 84, 84, 3]`: white, a line, a cart, a pole of its length."""
    scale = _SIDE / 4.8  # pixels of a unit: the track is 4.8 wide
    x, angle = states[:, 0] * scale + _SIDE / 2, states[:, 2]
    across, down = torch.arange(_SIDE) + 0.5, torch.arange(_SIDE)[:, None] + 0.5
    out = torch.full((len(states), _SIDE, _SIDE, 3), 255, dtype=torch.uint8)
    out[:, 62] = 0
    cart = ((across - x[:, None, None]).abs() < 7) & ((down - 62).abs() < 4)
    along = (across - x[:, None, None]) * angle.sin()[:, None, None] - (down - 58) * angle.cos()[:, None, None]
    apart = (across - x[:, None, None]) * angle.cos()[:, None, None] + (down - 58) * angle.sin()[:, None, None]
    pole = (along > 0) & (along < scale) & (apart.abs() < 1.5)
    out[cart] = torch.tensor([40, 40, 40], dtype=torch.uint8)
    out[pole] = torch.tensor([202, 152, 101], dtype=torch.uint8)
    return out


def rlcli(*words: str) -> str:
    """What a command prints."""
    done = subprocess.run([sys.executable, "-m", "rlcli", *words], capture_output=True, text=True)
    if done.returncode:
        raise ResourceError(f"rlcli {' '.join(words)} exited {done.returncode}", why=done.stderr.strip()[-400:])
    return done.stdout
