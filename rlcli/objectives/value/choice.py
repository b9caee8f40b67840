"""Estimators by name, made from a loss's own networks."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase

from rlcli.errors import ArgumentError
from rlcli.objectives.value.estimator import ValueEstimator
from rlcli.objectives.value.gae import GAE
from rlcli.objectives.value.td import TD0Estimator, TD1Estimator, TDLambdaEstimator
from rlcli.objectives.value.vtrace import VTrace


class ValueEstimators(Enum):
    """The estimators, as losses are told which to use."""

    TD0 = "td0"
    TD1 = "td1"
    TDLambda = "td_lambda"
    GAE = "gae"
    VTrace = "vtrace"


def make_estimator(
    kind: ValueEstimators | str,
    value_network: TensorDictModuleBase | None,
    actor_network: ProbabilisticTensorDictSequential | None,
    options: Mapping[str, Any],
) -> ValueEstimator:
    """An estimator of a kind.

    Parameters
    ----------
    kind : ValueEstimators or str
        "gae", "td0", "td1", "td_lambda" or "vtrace".
    value_network : TensorDictModule, optional
        None: every value is 0, so that targets are sums of rewards (`zero_values`).
    actor_network : ProbabilisticTensorDictSequential, optional
        V-trace alone reads it.
    options : dict
        Of the estimator; `gamma` is 0.99 and `lmbda` 0.95 where they are not given.

    Raises
    ------
    ArgumentError
        There is no such kind.
    """
    try:
        kind = ValueEstimators(kind)
    except ValueError as error:
        names = ", ".join(x.value for x in ValueEstimators)
        raise ArgumentError(f"unknown value estimator {kind!r}", fix=f"Choose one of {names}") from error
    given = {"gamma": 0.99, "value_network": value_network, "zero_values": value_network is None, **options}
    if kind in (ValueEstimators.GAE, ValueEstimators.TDLambda):
        given = {"lmbda": 0.95, **given}
        return GAE(**given) if kind is ValueEstimators.GAE else TDLambdaEstimator(**given)
    given.pop("lmbda", None)
    if kind is ValueEstimators.VTrace:
        if actor_network is None:
            raise ArgumentError("V-trace needs the actor", why="it weighs steps by how likely it is to repeat them")
        return VTrace(actor_network=actor_network, **given)
    return TD0Estimator(**given) if kind is ValueEstimators.TD0 else TD1Estimator(**given)
