"""Log-probability and entropy of stored actions under an actor, from raw tensors where it allows that."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
from torch import Tensor

from rlcli.errors import ArgumentError, RlcliError, in_words
from rlcli.keys import ACTION_LOG_PROB, SAMPLE_LOG_PROB, Key, show, unravel
from rlcli.modules.distributions import Family, family_of, param_keys
from rlcli.modules.distributions.family import Params
from rlcli.modules.stages import Stage, take_apart
from rlcli.objectives.lowered import Columns


class Density:
    """The action distribution of an actor, as a function of columns.

    Where the actor is a plain sequence whose distribution belongs to a family
    (`rlcli.modules.distributions`), the parameter net is called on tensors and the family's formulas are
    used; otherwise `actor.get_dist(td)`.

    Attributes
    ----------
    family : Family or None
        None: the general way.
    stages : tuple of Stage
        The parameter net; empty the general way.
    """

    def __init__(self, actor: ProbabilisticTensorDictSequential, mc_samples: int = 1) -> None:
        if not hasattr(actor, "get_dist"):
            raise ArgumentError(
                "the actor has no action distribution",
                why=f"{type(actor).__name__} has no get_dist",
                fix="Use ProbabilisticActor, or a ProbabilisticTensorDictSequential",
            )
        self.actor, self.mc_samples = actor, mc_samples
        self.in_keys: list[Key] = [unravel(k) for k in actor.in_keys]
        parts = take_apart(actor)
        head = None if parts is None else parts.head
        self.family: Family | None = None if head is None else family_of(head)
        self.stages: tuple[Stage, ...] = ()
        if parts is not None and head is not None and self.family is not None:
            self.stages, self.param_keys = parts.stages, param_keys(head)

    def parameters(self, columns: Columns) -> tuple[Params, dict[Key, Tensor]]:
        """The distribution's parameters, and columns with everything the net writes (family only)."""
        values = dict(columns)
        for stage in self.stages:
            stage.run(values)
        return tuple(values[k] for k in self.param_keys), values

    def __call__(
        self, columns: Columns, action: Tensor, batch_dims: int = 1, entropy: bool = True
    ) -> tuple[Tensor, Tensor | None, dict[Key, Tensor]]:
        """Log-probability and entropy (None unless asked for) `[*B]`, and columns with the net's outputs.

        Raises
        ------
        ArgumentError
            The actor cannot be evaluated on these columns, or cannot have taken these actions.
        """
        try:
            return self._evaluate(columns, action, batch_dims, entropy)
        except (torch.OutOfMemoryError, RlcliError):
            raise
        except (RuntimeError, ValueError, IndexError) as error:
            read = {**{key: columns[key] for key in self.in_keys if key in columns}, "action": action}
            raise ArgumentError(
                "the actor cannot be evaluated on the batch",
                where=", ".join(f"{show(k)} {tuple(x.shape)} {x.dtype}" for k, x in read.items()),
                why=in_words(error),
                fix="Compare with the shapes, dtypes and actions that it was made for.",
            ) from error

    def _evaluate(
        self, columns: Columns, action: Tensor, batch_dims: int, entropy: bool
    ) -> tuple[Tensor, Tensor | None, dict[Key, Tensor]]:
        size = action.shape[:batch_dims]
        if self.family is not None:
            params, values = self.parameters(columns)
            if entropy:
                found = self.family.log_prob_and_entropy(params, action)
                return one_a_row(found[0], size, self.family), one_a_row(found[1], size, self.family), values
            return one_a_row(self.family.log_prob(params, action), size, self.family), None, values
        inputs = {k: columns[k] for k in self.in_keys}
        td = TensorDict(inputs, batch_size=size)  # type: ignore[arg-type]
        dist = self.actor.get_dist(td)
        written = {unravel(k): x for k, x in td.items(True, True)}  # type: ignore[arg-type]
        log_prob = one_a_row(dist.log_prob(action), size, dist)
        return log_prob, one_a_row(self._entropy(dist), size, dist) if entropy else None, {**columns, **written}

    def _entropy(self, dist: torch.distributions.Distribution) -> Tensor:
        try:
            return dist.entropy()
        except NotImplementedError:  # no closed form: minus the mean log-probability of a few samples
            shape = torch.Size([self.mc_samples])
            sample = dist.rsample(shape) if dist.has_rsample else dist.sample(shape)
            return -dist.log_prob(sample).mean(0)


def one_a_row(x: Tensor, size: torch.Size, of: Any) -> Tensor:
    """A log-probability or entropy `[*B]`, or `[*B, 1]` of an action of one dim, as `[*B]`: it would broadcast."""
    if x.shape == size:
        return x
    if x.shape != (*size, 1):
        raise ArgumentError(
            "the log-probability of an action is not one number a row",
            why=f"that of {type(of).__name__} is {tuple(x.shape)} in a batch {tuple(size)}",
            fix="Use IndependentNormal, or wrap the distribution in torch.distributions.Independent(..., 1).",
        )
    return x.squeeze(-1)


def also_called(key: Key) -> tuple[Key, ...]:
    """The other name under which a batch may hold the log-probability that is looked for under `key`."""
    names = (SAMPLE_LOG_PROB, ACTION_LOG_PROB)
    return tuple(name for name in names if name != key) if key in names else ()


def log_prob_key(actor: ProbabilisticTensorDictSequential) -> Key:
    """Under which key the actor stores the log-probability of its actions."""
    for module in reversed(list(actor.modules())):
        if isinstance(module, ProbabilisticTensorDictModule) and module.return_log_prob:
            return unravel(module.log_prob_key)
    return SAMPLE_LOG_PROB
