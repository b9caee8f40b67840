"""From what a policy names (a distribution class, a probabilistic module) to the family that computes it.

By exact class only: a subclass may override anything, and then the collector runs it as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential

from rlcli.keys import Key, as_tuple
from rlcli.modules.distributions.family import Family

Drawing: TypeAlias = ProbabilisticTensorDictModule | ProbabilisticTensorDictSequential


def family_of(source: Callable[..., Any] | Drawing, kwargs: Mapping[str, Any] | None = None) -> Family | None:
    """The family of a distribution class or probabilistic module, or None.

    Parameters
    ----------
    source : callable, ProbabilisticTensorDictModule or ProbabilisticTensorDictSequential
        What makes a distribution, or a module (for a sequence: its last probabilistic stage).
    kwargs : mapping, optional
        The constant arguments given to the class (`low`, `high`, `nvec`); taken from the module otherwise.

    Returns
    -------
    Family or None
        None when it is not one of our classes exactly, or the module feeds it other parameters (`probs`), draws
        several samples at once, or gives it constants that only the class takes (`scale`), or that may learn (a
        `TensorDictParams`).
    """
    if not isinstance(source, Drawing):
        build = vars(source).get("family_for") if isinstance(source, type) else None
        build = build or _of_torch(source)
        if build is None or isinstance(kwargs, TensorDictBase):
            return None
        try:
            return build(**(kwargs or {}))
        except TypeError:  # an argument, or a dtype, of the class alone; or of nobody, and then the class says so
            return None
    stage = source if isinstance(source, ProbabilisticTensorDictModule) else _last_stage(source)
    if stage is None or type(stage) is not ProbabilisticTensorDictModule or stage.num_samples is not None:
        return None
    family = family_of(stage.distribution_class, stage.distribution_kwargs)
    if family is None or sorted(as_tuple(key)[-1] for key in stage.dist_keys) != sorted(family.param_names):
        return None
    return family


def param_keys(source: Drawing) -> list[Key]:
    """The tensordict keys of the parameters, in the order of `family.param_names`."""
    stage = source if isinstance(source, ProbabilisticTensorDictModule) else _last_stage(source)
    family = family_of(source)
    assert stage is not None and family is not None
    keys = {as_tuple(name)[-1]: key for name, key in zip(stage.dist_keys, stage.in_keys, strict=True)}
    return [keys[name] for name in family.param_names]


def _of_torch(source: Any) -> Callable[..., Family] | None:
    """Recognise those of torch's; its OneHotCategorical is none, since its samples are floats."""
    if source is torch.distributions.Categorical:
        from rlcli.modules.distributions.discrete import CATEGORICAL

        return lambda validate_args=None: CATEGORICAL
    if source is torch.distributions.Normal:  # with a log-probability per dim
        from rlcli.modules.distributions.continuous import NormalFamily

        return lambda validate_args=None: NormalFamily(event_dims=0)
    return None


def _last_stage(source: Any) -> ProbabilisticTensorDictModule | None:
    makers = [m for m in source.module.children() if isinstance(m, ProbabilisticTensorDictModule)]
    return makers[-1] if makers else None
