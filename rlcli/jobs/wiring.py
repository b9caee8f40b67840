"""What a kind of training run adds to the parts that every one has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlcli.collectors import Collector
from rlcli.jobs.given_rows import Given
from rlcli.keys import Key
from rlcli.objectives.value.estimator import ValueEstimator
from rlcli.report.reporter import Reporter
from rlcli.training.evaluation import PeriodicEvaluation
from rlcli.training.off_policy_update import OffPolicyUpdate
from rlcli.training.saver import Saver, Stateful
from rlcli.training.update import Update


class Loop(Protocol):
    """A training loop.

    Attributes
    ----------
    evaluation : PeriodicEvaluation or None
    given : int
        Rows that its buffer began with.
    """

    evaluation: PeriodicEvaluation | None
    given: int

    def run(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class Wiring:
    """Parts of one kind of run.

    Attributes
    ----------
    collector : Collector
    update : Update or OffPolicyUpdate
    read : sequence of keys
        What the loss reads.
    loop : callable
        (reporter, saver, evaluation) -> the loop.
    more : dict
        Further parts that a checkpoint holds, by name; each has `load_state_dict`.
    warm : callable
        Loads what would otherwise be loaded inside the first batch.
    begin : callable
        What a new run does with its loop before its first frame: the rows that its buffer begins with.
    estimator : ValueEstimator, optional
        Off-policy losses need none.
    """

    collector: Collector
    update: Update | OffPolicyUpdate
    read: Sequence[Key]
    loop: Callable[[Reporter, Saver, PeriodicEvaluation | None], Loop]
    more: dict[str, Stateful] = field(default_factory=dict)
    warm: Callable[[], object] = lambda: None
    begin: Callable[[Any], Given | None] = lambda loop: None
    estimator: ValueEstimator | None = None
