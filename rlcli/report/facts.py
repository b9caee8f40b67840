"""What the reporter is told once, before the first batch: the run's name and what of it to watch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rlcli.keys import OBSERVATION, Key


@dataclass(frozen=True)
class Facts:
    """What is known of a run before it starts.

    Attributes
    ----------
    title : str
        The recipe's name, or the verb.
    obs_keys : sequence of keys
        The observations of the batch, for the ledger.
    next_obs : str
        "full", "compact", "exact" or "delta".
    settings : mapping
        What the run was asked for, by key (`"env.id"`).
    """

    title: str
    env: str
    total_frames: int
    seed: int | None = None
    obs_keys: Sequence[Key] = (OBSERVATION,)
    next_obs: str = ""
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Watched:
    """The learner's memory: shown in the ledger."""

    modules: Mapping[str, torch.nn.Module]
    optimizer: torch.optim.Optimizer | Mapping | None = None
    device: torch.device | str = "cpu"


@dataclass(frozen=True)
class Expected:
    """What the plan said of the process.

    Attributes
    ----------
    total : int
        Bytes at its peak.
    imported : int
        Of them after the imports, before anything was made.
    values : int or None
        What the value stage holds for a moment; None where there is none, or where it could not be counted.
    """

    total: int
    imported: int
    values: int | None = None
