"""The choices of every group, ours: what each builds, and which options only some of them read.

An option says itself who reads it (`option(..., read_by=...)`), in the groups' dataclasses in this package: help,
completion and the refusal of an option of another choice follow from it. Nothing is imported for it, so that a mistake
in a command is answered before torch is loaded.
"""

from __future__ import annotations

from typing import NamedTuple

REGISTERED = "a registered one"  # stands for every part of a group that a user's package has registered


class Part(NamedTuple):
    """What is known of a choice: `package.module:object` of what it builds, and what it says of itself."""

    place: str = ""
    off_policy: bool = False  # of an algorithm: it learns from stored rows, whoever collected them
    draws: str = "rows"  # of a sampler: single stored "rows", parts of the new "batch", or stored "slices"
    keys: tuple[str, ...] = ()  # that it reads, and not every choice of its group: see `registry.part`


# What an option is read with is said in the order of these groups, and of the choices of each.
CHOICES: dict[str, dict[str, Part]] = {
    "env": dict.fromkeys(("gym", "atari", "mujoco", "envpool"), Part()),
    "policy": dict.fromkeys(("mlp", "cnn", "dict", "gru", "lstm", "auto", "random", "checkpoint"), Part()),
    "loss": {
        "ppo_clip": Part("rlcli.algorithms.ppo:ClipPPO"),
        "ppo_kl": Part("rlcli.algorithms.ppo:PenalisedPPO"),
        "a2c": Part("rlcli.algorithms.one_pass:A2C"),
        "reinforce": Part("rlcli.algorithms.one_pass:Reinforce"),
        "dqn": Part("rlcli.algorithms.dqn:DQN", off_policy=True),
        "sac": Part("rlcli.algorithms.sac:SAC", off_policy=True),
    },
    "value": {
        "gae": Part("rlcli.objectives.value:GAE"),
        "td0": Part("rlcli.objectives.value:TD0Estimator"),
        "td1": Part("rlcli.objectives.value:TD1Estimator"),
        "td_lambda": Part("rlcli.objectives.value:TDLambdaEstimator"),
        "vtrace": Part("rlcli.objectives.value:VTrace"),
    },
    "storage": {
        "none": Part(),
        "tensor": Part("rlcli.data.storages:LazyTensorStorage"),
        "memmap": Part("rlcli.data.storages.memmap:LazyMemmapStorage"),
        "compressed": Part("rlcli.data.storages.compressed:CompressedStorage"),
    },
    "sampler": {
        "minibatch": Part(draws="batch"),
        "random": Part("rlcli.data.samplers:RandomSampler"),
        "prioritized": Part("rlcli.data.samplers:PrioritizedSampler"),
        "slice": Part("rlcli.data.samplers:SliceSampler", draws="slices"),
        "prioritized_slice": Part("rlcli.data.samplers:PrioritizedSliceSampler", draws="slices"),
    },
    "collector": dict.fromkeys(("sync", "multi_sync", "multi_async", "async"), Part()),
    "memory": dict.fromkeys(("full", "compact", "exact", "delta"), Part()),
    "optim": dict.fromkeys(("adam", "adamw", "rmsprop", "sgd"), Part()),
    "logger": {"auto": Part(), "none": Part(), "tensorboard": Part("rlcli.report.events:EventsWriter")},
}

# who reads an option: group, or `verb` -> its choices
TRAIN, COLLECT = {"verb": ("train",)}, {"verb": ("collect",)}
NETWORKS = {"policy": ("mlp", "cnn", "dict", "gru", "lstm", "auto")}
RECURRENT = {"policy": ("gru", "lstm")}
ACTING = {"policy": (*NETWORKS["policy"], "checkpoint", REGISTERED)}
GRADIENTS = {"loss": ("ppo_clip", "ppo_kl", "a2c", "reinforce")}  # policy gradients, with values and an entropy bonus
BOOTSTRAPPED = {"loss": ("dqn", "sac")}  # that learn from stored rows towards values that target networks give
STORED = {"storage": ("tensor", "memmap", "compressed", REGISTERED)}
