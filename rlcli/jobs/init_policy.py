"""What a training run begins with: `policy.init_from`, another run's trained weights and normalisation statistics.

They are compared layer by layer, and copied before target networks are made of them. From then on they are the run's
own: its checkpoints hold them, and the other run, which stays as it is, is needed no more. Of rows that its buffer
begins with (`storage.init_from`) it is said here how many there were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlcli.config.problem import spell as typed
from rlcli.envs import EnvBase
from rlcli.envs.transformed import TransformedEnv, transforms_on
from rlcli.errors import ConfigError
from rlcli.jobs.statistics import adopt, learned_by_transforms
from rlcli.keys import spell
from rlcli.learning.update import StateBeside, Update
from rlcli.modules import ActorCritic, EGreedyModule
from rlcli.modules.actors import other_layers
from rlcli.objectives.value.estimator import ValueEstimator
from rlcli.runs.checkpoint import asked_for
from rlcli.transforms import RunningNorm, by_name


class InitRows(NamedTuple):
    """Rows that a run began with: the `path` they came from, the `rows` taken over, and how many there were (`of`)."""

    path: str
    rows: int
    of: int

    @property
    def left_out(self) -> str | None:
        """Say what a person should know of rows that found no room."""
        if self.rows == self.of:
            return None
        return f"{self.of - self.rows:,} older rows of {self.path} were left out: storage.max_size has no room for more"

    @property
    def line(self) -> str:
        """For the start of the run."""
        which = "all" if self.rows == self.of else "the newest"
        return f"the buffer begins with {which} {self.rows:,} of {self.of:,} rows of {self.path}"


class InitPolicy(NamedTuple):
    """Describe the policy that a run began with."""

    path: str
    state: dict[str, Any]
    frames: int  # of training behind it
    taken: int  # layers that were copied
    left_out: list[str]  # layers that were not, each with its two shapes

    @property
    def line(self) -> str:
        """Return a line for the start of the run."""
        left = f"; not used: {'; '.join(self.left_out)}" if self.left_out else ""
        return f"initialised {self.taken} tensors from {self.path}, trained for {self.frames:,} frames{left}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for a report."""
        return {"from": self.path, "frames": self.frames, "layers": self.taken, "left_out": self.left_out}

    def with_rest(self, update: Update, estimator: ValueEstimator | None) -> InitPolicy:
        """Copy what loss and value stage learn beside the networks, and let go of the checkpoint."""
        mine = {name: x for name, x in update.loss.named_parameters() if x.requires_grad}
        beside = StateBeside(update.loss, *update.loss.networks).state_dict()
        _copy({name: x for name, x in mine.items() if name in beside}, self.state.get("update", {}), "loss.")
        if estimator is not None:
            own = StateBeside(estimator, update.loss, *update.loss.networks).state_dict()
            _copy(own, self.state.get("loop", {}).get("estimator", {}))
        return self._replace(state={})


def init_policy(asked: str, env: EnvBase, policy: ActorCritic, *, strict: bool) -> InitPolicy:
    """Put weights and statistics of `policy.init_from` into a new run; exploration begins anew."""
    checkpoint = asked_for(asked)
    explores = {
        f"{name}.{entry}" for name, part in policy.named_modules() if isinstance(part, EGreedyModule)
        for entry in part.state_dict()
    }  # fmt: skip
    mine, theirs = (
        {name: x for name, x in state.items() if name not in explores}
        for state in (policy.state_dict(), checkpoint.state["policy"])
    )
    if policy.critic is None:
        theirs = {name: x for name, x in theirs.items() if not name.startswith("critic.")}
    other = other_layers(mine, theirs)
    saved = learned_by_transforms(checkpoint.state) if "collector" in checkpoint.state else {}
    scales = dict(_other_scales(env, saved))
    left_out = [*other.values(), *scales.values()]
    if left_out and strict:
        raise ConfigError(
            "the run cannot begin with these weights", where=f"policy.init_from={typed(asked)}",
            why="; ".join(left_out),
            fix="Use the same network, or add policy.init_strict=false, which copies what fits.",
        )  # fmt: skip
    fitting = {name: x for name, x in theirs.items() if name not in other}
    if not any(isinstance(x, Tensor) for x in fitting.values()):
        raise ConfigError(
            "nothing of these weights fits the run", where=f"policy.init_from={typed(asked)}", why="; ".join(left_out),
            fix="Choose a run with the same kind of network, or leave out policy.init_from.",
        )  # fmt: skip
    policy.load_state_dict(fitting, strict=False)
    adopt(env, {name: state for name, state in saved.items() if name not in scales}, learn_on=True)
    return InitPolicy(str(checkpoint.path), checkpoint.state, checkpoint.manifest["number"], len(fitting), left_out)


def _other_scales(env: EnvBase, saved: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Compare normalisations that are only there, only here, or of another shape: name -> what to say."""
    base = env.base_env if isinstance(env, TransformedEnv) else env
    mine = {name: part for name, part in by_name(transforms_on(env)).items() if isinstance(part, RunningNorm)}
    for name in saved:
        if name.startswith(RunningNorm.__name__) and name not in mine:
            yield name, "observations are normalised there and not here (env.normalize_observation=true)"
    for name, part in mine.items():
        if name not in saved:
            yield name, "observations are normalised here and not there (env.normalize_observation=false)"
            continue
        for key in part.in_keys:
            there = saved[name]["_extra_state"].get(f"{spell(key)}/mean")
            here = tuple(base.observation_spec[key].shape[1:])
            if there is None or (tuple(there.shape) and tuple(there.shape) != here):
                shape = "missing" if there is None else tuple(there.shape)
                yield name, f"the normalisation of {spell(key)} is {shape} there and {here} here"


def _copy(mine: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = "") -> None:
    """Write what both hold in one shape into `mine`."""
    with torch.no_grad():
        for name, x in mine.items():
            other = theirs.get(f"{prefix}{name}")
            if isinstance(x, Tensor) and isinstance(other, Tensor) and x.shape == other.shape:
                x.copy_(other)
