"""A policy as a function of tensors and given noise: stages write parameters, a family draws an action from them.

The same for those who act with it (`collectors.actors`) and those who train it (`objectives`, `learning`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tensordict.nn import ProbabilisticTensorDictModule
from torch import Tensor

from rlcli.keys import ACTION, Key, as_tuple, unravel
from rlcli.modules.distributions.family import Family, Params
from rlcli.modules.distributions.lookup import family_of
from rlcli.modules.stages import Stage, take_apart


class Actor(NamedTuple):
    """Map columns `{key: Tensor [*B, ...]}` to parameters, of which a family draws by given noise."""

    family: Family
    stages: tuple[Stage, ...]
    param_keys: list[Key]  # of the family's parameters, as the stages write them
    action_key: Key = ACTION
    log_prob_key: Key | None = None
    chosen_key: Key | None = None  # the value of the greedy action
    one_hot: bool = False  # whether the greedy action is given so

    @classmethod
    def of(cls, net: Any) -> Actor | None:
        """Return the function of a module on tensordicts; None where a part is unknown or changed."""
        if (parts := take_apart(net)) is None or parts[1] is None:
            return None
        stages, head, tries = parts
        if isinstance(head, ProbabilisticTensorDictModule):
            if (family := family_of(head)) is None:
                return None
            log_prob = unravel(head.log_prob_key) if head.return_log_prob else None
            keys = {as_tuple(name)[-1]: unravel(key) for name, key in zip(head.dist_keys, head.in_keys, strict=True)}
            params = [keys[name] for name in family.param_names]
            return cls(family, stages, params, unravel(head.out_keys[0]), log_prob)
        from rlcli.modules.values import EGreedyFamily  # of no other policy

        masked, outs = head.action_mask_key is not None, [unravel(key) for key in head.out_keys]
        family = EGreedyFamily()
        if tries is not None:
            if tries.action_mask_key != head.action_mask_key or unravel(tries.action_key) != outs[0]:
                return None
            family = EGreedyFamily(lambda: float(tries.eps), tries.n, masked=masked)
        return cls(family, stages, [head.action_value_key], outs[0], chosen_key=outs[2],
                   one_hot=head.action_space == "one_hot")  # fmt: skip

    def parameters(self, columns: Mapping[Key, Tensor]) -> tuple[Params, dict[Key, Tensor]]:
        """Return the family's parameters, and the columns with all that the stages write."""
        values = dict(columns)
        for stage in self.stages:
            stage.run(values)
        return tuple(values[key] for key in self.param_keys), values
