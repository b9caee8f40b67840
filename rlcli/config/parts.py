"""The parts that a run is made of, by name: the options that each reads, and what stands behind it.

A line here is all that the rest of the program has to know of a part of ours: the choices of its group, help,
completion and the refusal of options that nothing reads follow from it. Nothing is imported for it, so that a mistake
in a command is answered before torch is loaded; a test compares it with the parts themselves.
"""

from __future__ import annotations

from typing import NamedTuple

REGISTERED = "a registered one"  # stands for every part of a group that a user's package has registered


class Part(NamedTuple):
    """One choice of a group.

    `place`: `package.module:object` of what builds it; "" for a choice that no object of its own stands behind.
    `uses`: the keys that it reads, among those that not every choice of its group does.
    `off_policy`: of an algorithm: it learns from stored rows, whoever collected them.
    `draws`: of a sampler: "batch" (parts of the batch that was just collected), "rows" (single stored rows) or "slices"
    (of stored trajectories).
    """

    place: str = ""
    uses: tuple[str, ...] = ()
    off_policy: bool = False
    draws: str = "rows"


def _keys(group: str, names: str) -> tuple[str, ...]:
    return tuple(f"{group}.{name}" for name in names.split())


_LAYERS = _keys("policy", "hidden activation orthogonal distribution")
_GRADIENT = _keys("policy", "shared init_std state_dependent_std")  # of the actor of a policy gradient
GREEDY = _keys("policy", "dueling eps_init eps_end eps_frames")  # of one that chooses by value
_ACTS = ("policy.exploration", "collector.init_random_frames")
_MASK = "policy.action_mask_key"
_NET = Part(uses=(*_LAYERS, *_GRADIENT, *GREEDY, *_ACTS, _MASK))
_RECURRENT = Part(
    uses=(
        *_NET.uses,
        *_keys("policy", "recurrent_size recurrent_layers recurrent_backend"),
        *_keys("memory", "recurrent_state_stride recurrent_recompute"),
    )
)

_ESTIMATES = _keys(
    "value",
    "kind lmbda average average_over shifted shifted_budget normaliser rho_thresh c_thresh two_calls num_chunks "
    "value_chunk_size compute_dtype backend",
)
POLICY_GRADIENT = (*_GRADIENT, *_ESTIMATES, "loss.entropy_coeff", "loss.critic_coeff", "optim.epochs")
BOOTSTRAPPED = (*_keys("loss", "distance n_steps tau target_every"), "optim.updates_per_frame")
_KEPT = (*_keys("storage", "max_size ndim codes"), "memory.frame_stack")
_SINGLE = _keys("env", "workers per_worker caller_steps start_method")
_WORKERS = _keys("collector", "num_workers start_method")
_LAG = ("weights.swap", "weights.max_lag", "weights.on_lag")

# Group -> its choices. What an option is read with is said in the order of these groups, and of the choices of each.
CHOICES: dict[str, dict[str, Part]] = {
    "env": {
        "gym": Part(uses=_SINGLE),
        "atari": Part(
            uses=(*_SINGLE, *_keys("env.atari", "noop_max frame_skip screen_size grayscale terminal_on_life_loss "
                                   "clip_reward fire_reset sticky_actions")),
        ),
        "mujoco": Part(uses=_SINGLE),
        "envpool": Part(),
    },
    "policy": {
        "mlp": _NET,
        "cnn": _NET,
        "dict": _NET,
        "gru": _RECURRENT,
        "lstm": _RECURRENT,
        "auto": _NET,
        "random": Part(uses=(_MASK,)),
        "checkpoint": Part(uses=("policy.path", *_ACTS)),
        REGISTERED: Part(uses=(*_ACTS, _MASK)),
    },
    "loss": {
        "ppo_clip": Part(
            "rlcli.algorithms.ppo:ClipPPO",
            (*POLICY_GRADIENT, *_keys("loss", "clip_epsilon anneal_clip clip_value target_kl")),
        ),
        "ppo_kl": Part(
            "rlcli.algorithms.ppo:PenalisedPPO",
            (*POLICY_GRADIENT, *_keys("loss", "clip_value target_kl kl_target kl_coeff")),
        ),
        "a2c": Part("rlcli.algorithms.a2c:A2C", (*POLICY_GRADIENT, "loss.clip_value")),
        "reinforce": Part("rlcli.algorithms.reinforce:Reinforce", (*POLICY_GRADIENT, "loss.baseline")),
        "dqn": Part(
            "rlcli.algorithms.dqn:DQN",
            (*BOOTSTRAPPED, *GREEDY, *_keys("loss", "double start_state")),
            off_policy=True,
        ),
        "sac": Part(
            "rlcli.algorithms.sac:SAC",
            (*BOOTSTRAPPED, *_keys("loss", "alpha alpha_init target_entropy")),
            off_policy=True,
        ),
    },
    "value": {
        "gae": Part("rlcli.objectives.value:GAE", ("value.lmbda",)),
        "td0": Part("rlcli.objectives.value:TD0Estimator"),
        "td1": Part("rlcli.objectives.value:TD1Estimator"),
        "td_lambda": Part("rlcli.objectives.value:TDLambdaEstimator", ("value.lmbda",)),
        "vtrace": Part("rlcli.objectives.value:VTrace", ("value.rho_thresh", "value.c_thresh")),
    },
    "storage": {
        "none": Part(),
        "tensor": Part("rlcli.data.storages:LazyTensorStorage", _KEPT),
        "memmap": Part("rlcli.data.storages.memmap:LazyMemmapStorage", (*_KEPT, "storage.scratch_dir")),
        "compressed": Part("rlcli.data.storages.compressed:CompressedStorage", _KEPT),
        REGISTERED: Part(uses=_KEPT),
    },
    "sampler": {
        "minibatch": Part(uses=("sampler.slice_len",), draws="batch"),
        "random": Part("rlcli.data.samplers:RandomSampler"),
        "prioritized": Part("rlcli.data.samplers:PrioritizedSampler", ("sampler.alpha", "sampler.beta")),
        "slice": Part(
            "rlcli.data.samplers:SliceSampler",
            _keys("sampler", "slice_len num_slices strict_length span weighting burn_in"),
            draws="slices",
        ),
        "prioritized_slice": Part(
            "rlcli.data.samplers:PrioritizedSliceSampler",
            _keys("sampler", "slice_len num_slices strict_length alpha beta burn_in"),
            draws="slices",
        ),
    },
    "collector": {
        "sync": Part(),
        "multi_sync": Part(uses=(*_WORKERS, "collector.preemptive_threshold")),
        "multi_async": Part(uses=(*_WORKERS, *_LAG)),
        "async": Part(uses=(*(key for key in _WORKERS if key != "collector.num_workers"), *_LAG)),
    },
    "memory": {
        "full": Part(),
        "compact": Part(uses=("memory.fill_value",)),
        "exact": Part(uses=("memory.frame_stack",)),
        "delta": Part(uses=("memory.delta_dtype", "memory.on_overflow")),
    },
    "optim": {
        "adam": Part(uses=("optim.eps", "optim.betas")),
        "adamw": Part(uses=("optim.eps", "optim.betas")),
        "rmsprop": Part(uses=("optim.eps", "optim.momentum", "optim.alpha")),
        "sgd": Part(uses=("optim.momentum",)),
    },
    "logger": {"auto": Part(), "none": Part(), "tensorboard": Part("rlcli.report.metrics:EventsWriter")},
    "verb": {
        "train": Part(
            uses=(*_keys("run", "checkpoint_every checkpoint_minutes keep keep_best"),
                  *_keys("run", "eval_every eval_episodes eval_envs eval_max_steps"),
                  *_keys("policy", "init_from init_strict"),
                  "device.train_device", "weights.swap"),
        ),
        "collect": Part(uses=("memory.fill_value", "memory.compress")),
    },
}  # fmt: skip

# gymnasium's wrappers whose arguments are plain values; those that take functions, open windows, convert to
# another array library or reset by themselves are left out; so are those with statistics, which evaluations and resumed
# runs would begin anew (`env.normalize_observation`).
_GYMNASIUM = """
AddRenderObservation AddWhiteNoise ClipAction ClipReward DelayObservation DiscretizeAction
DiscretizeObservation DtypeObservation FilterObservation FlattenObservation FrameStackObservation
GrayscaleObservation MaxAndSkipObservation ObstructView RecordVideo
RepeatAction RescaleAction RescaleObservation ReshapeObservation ResizeObservation StickyAction
TimeAwareObservation TimeLimit
"""
_TRANSFORMS = """
InitTracker StepCounter RewardSum ToFloat DoubleToFloat ToTensorImage ChannelsFirst CatFrames RunningNorm RewardScaling
RewardClipping RewardNorm SignTransform
"""

# Kind of a part that is named in a list of names, or is an env's id -> ours
NAMED: dict[str, dict[str, Part]] = {
    "env": {},
    "wrapper": {
        **{name: Part(f"gymnasium.wrappers:{name}") for name in _GYMNASIUM.split()},
        "ActionMask": Part("rlcli.vec_envs.wrappers:ActionMask"),
        **{name: Part(f"rlcli.vec_envs.wrappers:{name}") for name in ("BoundAction", "LinearReward", "SelectEntries")},
    },
    "transform": {name: Part(f"rlcli.transforms:{name}") for name in _TRANSFORMS.split()},
}


def choices(group: str) -> tuple[str, ...]:
    """Return the choices of a group that are ours; `auto`, which leaves it to us, comes first."""
    return tuple(sorted((name for name in CHOICES[group] if name != REGISTERED), key=lambda name: name != "auto"))


def used_by(key: str) -> dict[str, tuple[str, ...]]:
    """Groups whose choices do not all read an option -> those that do. Empty: it is always read."""
    found = {group: tuple(name for name in known if key in known[name].uses) for group, known in CHOICES.items()}
    return {group: names for group, names in found.items() if names}
