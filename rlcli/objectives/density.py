"""Log-probability and entropy of stored actions under an actor, from raw tensors where it allows that."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
from torch import Tensor

from rlcli.errors import ArgumentError
from rlcli.keys import SAMPLE_LOG_PROB, Key, unravel
from rlcli.modules.distributions import Family, family_of, param_keys
from rlcli.objectives.lowered import Columns, Stage, hooked, stages_of


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
        self.family: Family | None = None
        self.stages: tuple[Stage, ...] = ()
        lowered = _parameter_stages(actor)
        if lowered is not None:
            self.family, self.stages = family_of(actor), tuple(lowered)
            self.param_keys = param_keys(actor)

    def parameters(self, columns: Columns) -> dict[Key, Tensor]:
        """Columns with everything the parameter net writes (family only)."""
        values = dict(columns)
        for stage in self.stages:
            stage.run(values)
        return values

    def __call__(
        self, columns: Columns, action: Tensor, batch_dims: int = 1, entropy: bool = True
    ) -> tuple[Tensor, Tensor | None, dict[Key, Tensor]]:
        """Log-probability and entropy (None unless asked for) `[*B]`, and columns with the net's outputs."""
        if self.family is not None:
            values = self.parameters(columns)
            params = tuple(values[k] for k in self.param_keys)
            if entropy:
                return *self.family.log_prob_and_entropy(params, action), values
            return self.family.log_prob(params, action), None, values
        inputs = {k: columns[k] for k in self.in_keys}
        td = TensorDict(inputs, batch_size=action.shape[:batch_dims])  # type: ignore[arg-type]
        dist = self.actor.get_dist(td)
        written = {unravel(k): x for k, x in td.items(True, True)}  # type: ignore[arg-type]
        return dist.log_prob(action), self._entropy(dist) if entropy else None, {**columns, **written}

    def _entropy(self, dist: torch.distributions.Distribution) -> Tensor:
        try:
            return dist.entropy()
        except NotImplementedError:  # no closed form: minus the mean log-probability of a few samples
            shape = torch.Size([self.mc_samples])
            sample = dist.rsample(shape) if dist.has_rsample else dist.sample(shape)
            return -dist.log_prob(sample).mean(0)


def log_prob_key(actor: ProbabilisticTensorDictSequential) -> Key:
    """Under which key the actor stores the log-probability of its actions."""
    for module in reversed(list(actor.modules())):
        if isinstance(module, ProbabilisticTensorDictModule) and module.return_log_prob:
            return unravel(module.log_prob_key)
    return SAMPLE_LOG_PROB


def _parameter_stages(actor: ProbabilisticTensorDictSequential) -> list[Stage] | None:
    kind = type(actor)
    plain = isinstance(actor, ProbabilisticTensorDictSequential) and not hooked(actor)
    if not plain or kind.get_dist is not ProbabilisticTensorDictSequential.get_dist:
        return None
    *nets, head = actor.module
    if not isinstance(head, ProbabilisticTensorDictModule) or family_of(actor) is None:
        return None
    stages: list[Stage] = []
    for net in nets:
        inner = stages_of(net)
        if inner is None:
            return None
        stages += inner
    return stages
