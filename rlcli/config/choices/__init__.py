"""The choices of every group, a dataclass each: its options, and what stands behind it.

All that the rest of the program has to know of a choice of ours stands in its dataclass: help, completion and the
refusal of an option of another choice follow from it. Nothing is imported for it, so that a mistake in a command is
answered before torch is loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from rlcli.config.choices.collect import COLLECTORS, ENVS, POLICIES, RegisteredPolicyOptions
from rlcli.config.choices.loss import ALGORITHMS, ESTIMATORS, OPTIMIZERS
from rlcli.config.choices.rows import MEMORIES, SAMPLERS, STORAGES, TensorOptions
from rlcli.config.choices.run import LOGGERS
from rlcli.config.option import Options

REGISTERED = "a registered one"  # stands for every part of a group that a user's package has registered

# What an option is read with is said in the order of these groups, and of the choices of each.
CHOICES: dict[str, dict[str, type[Options]]] = {
    "env": ENVS,
    "policy": {**POLICIES, REGISTERED: RegisteredPolicyOptions},
    "loss": ALGORITHMS,
    "value": ESTIMATORS,
    "storage": {**STORAGES, REGISTERED: TensorOptions},
    "sampler": SAMPLERS,
    "collector": COLLECTORS,
    "memory": MEMORIES,
    "optim": OPTIMIZERS,
    "logger": LOGGERS,
}


@functools.cache
def readers(key: str) -> Mapping[str, tuple[str, ...]]:
    """Return the groups whose choices do not all have or read an option -> those that do. Empty: it is always read."""
    found: dict[str, tuple[str, ...]] = {}
    for group, choices in CHOICES.items():
        having = tuple(name for name, options in choices.items() if key in options.option_keys())
        if having and not (len(having) == len(choices) and key.startswith(f"{group}.")):
            found[group] = having
    return found
