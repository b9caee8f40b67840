"""What a user's package may register: policies that keep no contract; after 10 calls `later` is what they write."""

from __future__ import annotations

import sys

import torch
from hostile_package import throw
from torch import nn

import rlcli
from rlcli.modules import build_actor_critic


class Late(nn.Module):
    def __init__(self, later) -> None:
        super().__init__()
        self.later, self.calls = later, 0

    def forward(self, observation):
        self.calls += 1
        good = torch.zeros(observation.shape[:-1], dtype=torch.int64)
        return good if self.calls < 10 else self.later(good)


LATER = {
    "raises_later": lambda good: throw(ValueError("the net is torn")),
    "exits_later": lambda good: sys.exit(0),
    "nothing_later": lambda good: None,
    "wide_later": lambda good: good.repeat(2),
    "lone_later": lambda good: good[:1],
    "float_later": lambda good: good + 0.5,
    "seven_later": lambda good: good + 7,
    "minus_later": lambda good: good - 1,
    "memory_later": lambda good: throw(MemoryError()),
    "torch_memory_later": lambda good: throw(RuntimeError("CUDA error: out of memory")),
}
for name, later in LATER.items():
    rlcli.register_policy(name)(lambda o, a, later=later: Late(later))

rlcli.register_policy("builds_nothing")(lambda o, a: None)
rlcli.register_policy("builder_breaks")(lambda o, a, **settings: 1 / 0)
rlcli.register_policy("builder_needs_memory")(lambda o, a: throw(MemoryError("of the builder")))
rlcli.register_policy("linear")(lambda o, a: nn.Linear(3, 2))
rlcli.register_policy("scripted")(lambda o, a: torch.jit.script(nn.Linear(3, 2)))


class Unsaved(Late):
    """Keeps its weights for itself."""

    def state_dict(self, *args, **options):
        raise RuntimeError("no state for you")


rlcli.register_policy("unsaved")(lambda o, a: Unsaved(lambda good: good))


@rlcli.register_policy("critic_needs_memory")
def critic_needs_memory(observation_spec, action_spec, at: int):
    """A good pair whose critic is refused memory at a call."""

    def count(module, arguments, out):
        module.calls = getattr(module, "calls", 0) + 1
        return throw(RuntimeError("DefaultCPUAllocator: can't allocate memory")) if module.calls >= at else out

    pair = build_actor_critic(observation_spec, action_spec, hidden=[8])
    next(part for part in pair.critic.modules() if isinstance(part, nn.Linear)).register_forward_hook(count)
    return tuple(pair)


@rlcli.register_policy("nan_later")
def nan_later(observation_spec, action_spec):
    """Draws from good logits nine times, and then from NaN."""

    def logits(module, arguments, out):
        module.calls = getattr(module, "calls", 0) + 1
        return out if module.calls < 10 else out * torch.nan

    pair = build_actor_critic(observation_spec, action_spec, hidden=[8])
    pair.actor.register_forward_hook(lambda module, arguments, out: logits(module, arguments, None) or out)
    pair.actor.module[0].module.register_forward_hook(logits)
    return tuple(pair)


@rlcli.register_policy("poisoned")
def poisoned(observation_spec, action_spec, part: str = "actor", state_dependent: bool = False):
    """A good pair with one NaN: in the actor's first weight, in its deviation, or in the critic."""
    pair = build_actor_critic(observation_spec, action_spec, hidden=[8], state_dependent_std=state_dependent)
    named = dict((pair.critic if part == "critic" else pair.actor).named_parameters())
    chosen = [p for name, p in named.items() if part != "deviation" or "std" in name] or list(named.values())
    with torch.no_grad():
        (chosen[-1] if part == "deviation" else chosen[0]).view(-1)[-1] = torch.nan
    return tuple(pair)
