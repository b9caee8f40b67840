"""Gives an env keys that only the policy writes, such as a recurrent state: at resets they take a default.

The policy writes the state of the next step under `next`; a step without one (random actions) keeps what was there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rlcli.errors import ArgumentError
from rlcli.keys import Key, show, under_next
from rlcli.specs import Composite, TensorSpec
from rlcli.specs.dtypes import dtype_name, holds
from rlcli.transforms.base import RowOp, Transform


class TensorDictPrimer(Transform):
    """Write `default_value` to the keys of `primers` at resets; between resets the policy writes them.

    The policy writes `("next", key)` while it acts in the state before.  Where it writes none, the value stays.

    Parameters
    ----------
    primers : mapping of key to spec, or Composite
        Specs of one env.
    default_value : float, default 0
    **named : TensorSpec
        More primers, by name.
    """

    def __init__(
        self,
        primers: Mapping[Key, TensorSpec] | Composite | None = None,
        default_value: float = 0.0,
        **named: TensorSpec,
    ) -> None:
        entries = dict(primers.items(True, True) if isinstance(primers, Composite) else primers or {})
        self_specs = Composite({**entries, **named})
        super().__init__(out_keys=self_specs.keys(True, True))
        self.primers = self_specs
        for key, spec in self_specs.items(True, True):
            if not holds(spec.dtype, default_value):
                raise ArgumentError(
                    f"{dtype_name(spec.dtype)} does not hold the default of {show(key)}", where="TensorDictPrimer",
                    why=f"it is {default_value!r}",
                )  # fmt: skip
        self.default_value = default_value

    def transform_observation_spec(self, spec):
        primers = self.primers.expand(*spec.shape) if spec.shape else self.primers.clone()
        for key, leaf in primers.items(True, True):
            self._added(spec, key, leaf, "primers")
        return spec

    def _step(self, tensordict, next_tensordict):
        for key in self.out_keys:
            if next_tensordict.get(key, None) is None:
                written = tensordict.get(under_next(key), None)
                next_tensordict.set(key, self._need(tensordict, key) if written is None else written)
        return next_tensordict

    def _reset(self, tensordict, reset_tensordict):
        for key, spec in self.primers.items(True, True):
            shape = (*reset_tensordict.batch_size, *spec.shape)
            value = torch.full(shape, self.default_value, dtype=spec.dtype, device=reset_tensordict.device)
            reset_tensordict.set(key, value)
        return reset_tensordict

    def reads(self, schema):
        return []

    def bind(self, rows, n):
        columns, value = [rows[key] for key in self.out_keys], self.default_value

        def reset(t, lanes):
            for column in columns:
                column[t][lanes] = value

        return RowOp(reset=reset)


def recurrent_parts(policy: Any) -> list[Any]:
    """Return the modules of a policy that have a state which goes from step to step."""
    if not isinstance(policy, nn.Module):
        return []
    return [part for part in policy.modules() if hasattr(part, "make_tensordict_primer")]


def state_keys(policy: Any) -> list[Key]:
    return [key for part in recurrent_parts(policy) for key in part.make_tensordict_primer().out_keys]
