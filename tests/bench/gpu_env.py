"""The part `env` of `python -m tests.bench gpu`: envs of tensors on the device, stepped by a segment of ours.

Beside it stand single steps of the same envs through arrays, and a plain loop on tensors, which keeps what a batch of
ours has: observations, their true successors, actions, log-probabilities, logits, rewards and flags.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.collectors import Collector
from rlcli.envs import NativeEnv
from rlcli.modules import ActorCritic, build_actor_critic
from rlcli.specs import Categorical, Composite, Unbounded
from rlcli.vec_envs.vector_backends import engine_of
from tests.bench import gpu_sides as hand
from tests.bench.gpu_part import AUTO, LOG_PROB_OFF, Part
from tests.envs.tensor_worlds import Pole

ARRAYS, LOOP = "rlcli, single steps through arrays", "by hand, tensors"
LIMIT = 500


def env(part: Part) -> None:
    """Collect from CartPole written in torch, which is stepped where the policy lies."""
    steps = part.pick(64, 2)
    for n in part.pick((1024, 4096), (3,)):
        case, seen = f"CartPole of torch x{n}", Composite({"observation": Unbounded((4,))})
        pair = build_actor_critic(seen, Categorical(2), generator=0, hidden=(64, 64), activation="tanh")
        pair = ActorCritic(*(module.to(part.device) for module in pair))
        sides = part.made(case, {
            AUTO: partial(_collector, pair, n, steps, part.device, True),
            ARRAYS: partial(_collector, pair, n, steps, part.device, False),
            LOOP: lambda pair=pair, n=n: Loop(pair, n, steps, part.device),
        })  # fmt: skip
        batches = {name: call() for name, call in sides.items()}
        if {AUTO, ARRAYS} <= batches.keys():
            differ = (batches[AUTO]["observation"] != batches[ARRAYS]["observation"]).any(-1).double().mean()
            part.same(f"{case}: share of rows that single steps do not show", float(differ), part.pick(0.05, 0.0))
        for name, batch in batches.items():
            rows = {key: batch[key] for key in ("observation", "action", "sample_log_prob")}
            part.same(f"{case}, {name}: log-probabilities", _off(pair, **rows), LOG_PROB_OFF[part.device.type])
        timed = part.fill(case, sides, n * steps, share=0.8 / len(part.pick((1024, 4096), (3,))))
        for side in timed.values():
            part.figure(side.name.partition(", ")[2], 1 / side.median, "frames/s")
        part.ratio(timed, ARRAYS, AUTO)
        part.ratio(timed, LOOP, AUTO)


def _collector(pair: ActorCritic, n: int, steps: int, device: torch.device, segments: bool) -> Callable[[], Any]:
    made = NativeEnv(engine_of(Pole(n, device, LIMIT)), categorical_action_encoding=True)
    where = {} if device.type == "cpu" else {"storing_device": device, "policy_device": device}
    options: dict[str, Any] = {"next_obs": "exact", "seed": 0, "track_traj_ids": False, **where}
    collector = Collector(made, pair.actor, frames_per_batch=n * steps, **options)
    if not segments:
        collector.vec_env.device = None  # as of an engine whose steps are arrays
    return collector.rollout


@torch.no_grad()
def _off(pair: ActorCritic, observation: Tensor, action: Tensor, sample_log_prob: Tensor) -> float:
    logits = hand.TwoHeads(pair)(observation)[0]
    log_p = logits.log_softmax(-1).gather(-1, action[..., None]).squeeze(-1)
    return float((log_p - sample_log_prob).abs().max())


class Loop:
    """Collect `[steps, N]` by plain torch; nothing is read on the host."""

    def __init__(self, pair: ActorCritic, n: int, steps: int, device: torch.device) -> None:
        heads, self.env, self.steps = hand.TwoHeads(pair), Pole(n, device, LIMIT), steps
        self.act = lambda seen: heads.head(heads.trunk(seen))
        self.lanes, self.age = torch.arange(n, device=device), torch.zeros(n, dtype=torch.int64, device=device)
        self.episodes = torch.zeros_like(self.age)
        self.seen = self.env.reset(torch.ones_like(self.age, dtype=torch.bool), self.lanes).clone()

    @torch.no_grad()
    def __call__(self) -> dict[str, Tensor] | TensorDictBase:
        rows: dict[str, list[Tensor]] = {}
        for _ in range(self.steps):
            logits = self.act(self.seen)
            noise = torch.empty_like(logits).exponential_()
            action = (logits - noise.log()).argmax(-1)
            following, reward, terminated, truncated = self.env.step(action)
            self.age += 1
            truncated = truncated | (self.age >= LIMIT)
            done = terminated | truncated
            self.episodes += done
            self.age.masked_fill_(done, 0)
            step = {
                "observation": self.seen, "action": action, "logits": logits, "next": following, "reward": reward,
                "terminated": terminated, "truncated": truncated, "done": done,
            }  # fmt: skip
            for key, x in step.items():
                rows.setdefault(key, []).append(x)
            first = self.env.reset(done, self.lanes + len(self.lanes) * self.episodes)
            self.seen = torch.where(done[:, None], first, following)
        found = {key: torch.stack(parts) for key, parts in rows.items()}
        log_p = found["logits"].log_softmax(-1)
        found["sample_log_prob"] = log_p.gather(-1, found["action"][..., None]).squeeze(-1)
        return found
