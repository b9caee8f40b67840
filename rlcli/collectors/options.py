"""The options of a collector: `Stepping`, which a worker needs, and `Delivery`, which stays with its parent.

What contradicts itself or something else is refused here, before anything is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from rlcli.data.next_obs.modes import MODES
from rlcli.errors import ArgumentError, in_words
from rlcli.keys import DONE, POLICY_VERSION, TRAJ_IDS, Key, show, unravel
from rlcli.modules.exploration import RandomPolicy
from rlcli.specs.base import Device

if TYPE_CHECKING:
    from rlcli.collectors.trajectories import CompleteTrajectories


def whole(name: str, value: Any) -> int:
    """Return the number of an option that counts something; a float may stand for it, as 1e6 does."""
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ArgumentError(f"{name} must be a whole number", why=f"got {value!r}")
    return int(value)


def counted(name: str, value: Any) -> int:
    """Return the number of an option that counts something: whole, and large enough."""
    number = whole(name, value)
    if name == "total_frames" and (number == 0 or number < -1):
        raise ArgumentError(
            "total_frames must be at least 1", why=f"got {number}", fix="Use -1 to collect without end."
        )
    if (least := _LEAST.get(name)) is not None and number < least:
        raise ArgumentError(f"{name} must be at least {least}", why=f"got {number}")
    return number


_LEAST = {
    "frames_per_batch": 1,
    "recurrent_state_stride": 1,
    "init_random_frames": 0,
    "seed": 0,
    "num_workers": 1,
    "num_threads": 1,
    "max_lag": 0,
}


def function(name: str, value: Any) -> Any:
    """Return what is to be called, or None."""
    if value is not None and not callable(value):
        raise ArgumentError(f"{name} must be a function", why=f"got {value!r}", fix="Leave it out, or give one.")
    return value


def _interaction(value: Any) -> InteractionType | None:
    """Return an exploration type, by itself or by its name."""
    if value is None or isinstance(value, InteractionType):
        return value
    names = [kind.name.lower() for kind in InteractionType]
    if not isinstance(value, str) or value.lower() not in names:
        raise ArgumentError(
            "exploration_type must be an ExplorationType", why=f"got {value!r}", fix=f"Or one of {', '.join(names)}."
        )
    return InteractionType[value.upper()]


class CountedOption:
    """An attribute that is such an option, and may be set anew between two batches."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else vars(instance)[self._name]

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self._name] = counted(self._name, value)


@dataclass(frozen=True, kw_only=True)
class Stepping:
    """All that it takes to step envs under a policy; each option is described at `Collector`."""

    create_env_fn: Any
    create_env_kwargs: dict[str, Any] | None = None
    policy: Any = None
    policy_factory: Callable[[], Any] | None = None
    frames_per_batch: int = 200
    total_frames: int = -1
    device: Device = None
    devices: Any = None
    env_device: Device = None
    policy_device: Device = None
    no_cuda_sync: bool = False
    next_obs: str | None = None
    compact_obs: bool = False
    delta_dtype: torch.dtype = torch.float16
    on_overflow: str = "raise"
    keep_keys: Sequence[Key] | None = None
    max_frames_per_traj: int | None = None
    init_random_frames: int | None = 0
    reset_at_each_iter: bool = False
    reset_when_done: bool = True
    set_truncated: bool = False
    exploration_type: InteractionType | None = InteractionType.RANDOM
    reuse_batch: bool = False
    track_traj_ids: bool = True
    track_policy_version: bool | None = None
    update_at_each_batch: bool = False
    weights_swap: str = "rollout"
    auto_register_policy_transforms: bool = True
    recurrent_state_stride: int = 1
    seed: int | None = None
    episode_seeds: bool = False
    first_lane: int = 0
    all_lanes: int | None = None
    traj_pool: Any = None

    def __post_init__(self) -> None:
        must = ("frames_per_batch", "total_frames", "recurrent_state_stride")
        for name in (*must, "init_random_frames", "max_frames_per_traj", "seed"):
            if getattr(self, name) is not None or name in must:
                object.__setattr__(self, name, counted(name, getattr(self, name)))
        if (asked := self.keep_keys) is not None:
            keys = tuple(asked) if isinstance(asked, Iterable) and not isinstance(asked, str) else None
            if keys is None or not all(isinstance(key, str | tuple) for key in keys):
                raise ArgumentError(
                    "keep_keys must be a list of keys", why=f"got {asked!r}", fix='Use ["observation", "action"].'
                )
            object.__setattr__(self, "keep_keys", keys)
        object.__setattr__(self, "exploration_type", _interaction(self.exploration_type))
        function("policy_factory", self.policy_factory)
        if self.policy is not None and self.policy_factory is not None:
            raise ArgumentError("policy and policy_factory are two ways to give one policy", fix="Give one of them.")
        self.next_obs_mode()

    def next_obs_mode(self, delta: bool = False) -> str:
        """Return how next observations are kept; `delta`: whether the env brings a `NextObservationDelta`."""
        if delta:
            asked = "compact" if self.compact_obs else self.next_obs
            if asked not in (None, "delta"):
                raise ArgumentError(
                    f"the env has a NextObservationDelta, and next_obs='{asked}' keeps next observations another way",
                    fix="Leave out one of them.",
                )
            return "delta"
        if self.compact_obs and self.next_obs not in (None, "compact"):
            raise ArgumentError(f"compact_obs=True and next_obs='{self.next_obs}' contradict each other")
        mode = self.next_obs or ("compact" if self.compact_obs else "full")
        if mode not in MODES:
            raise ArgumentError(f"unknown next_obs '{mode}'", fix=f"Use one of {', '.join(MODES)}.")
        return mode

    @property
    def tracks_version(self) -> bool:
        """Say whether rows say which version of the policy acted: by default where that is asked for by its key."""
        if self.track_policy_version is None:
            return POLICY_VERSION in map(unravel, self.keep_keys or ())
        return self.track_policy_version

    def make_policy(self) -> Any:
        """Return the policy that was given in one way or the other; None for random actions."""
        policy = self.policy if self.policy_factory is None else self.policy_factory()
        return None if type(policy) is RandomPolicy and policy.action_spec is None else policy

    @property
    def random_mask_key(self) -> Key | None:
        """Of the action mask that random actions without a policy keep to."""
        return self.policy.action_mask_key if type(self.policy) is RandomPolicy else None

    def check_lanes(self, n: int) -> None:
        """Raise unless lanes `first_lane .. first_lane + n - 1` are some of `all_lanes`."""
        first, total = self.first_lane, self.all_lanes
        numbers = (first, total or 0)
        whole = all(isinstance(number, int | np.integer) and not isinstance(number, bool) for number in numbers)
        if not whole or first < 0 or (n if total is None else total) < first + n:
            raise ArgumentError(
                "first_lane and all_lanes do not say which envs of a run this collector steps",
                why=f"its {n} envs begin at {first!r}, and all_lanes is {total!r}",
                fix=f"Give whole numbers: first_lane from 0 on, all_lanes at least first_lane + {n}.",
            )

    def process_seed(self, seed: int) -> int:
        """Of what is drawn for all lanes of a process at once: the run's seed where they begin with the first lane."""
        if not self.first_lane:
            return seed
        return int(np.random.SeedSequence((seed, self.first_lane)).generate_state(1, np.uint64)[0])

    def pickled(self) -> bytes:
        """Return the options as another process can take them: `pickle.loads` gives a `Stepping` of the same.

        What no module holds (lambdas, functions of `__main__`) goes by value; tensors in shared memory stay shared,
        but for those of modules.
        """
        from rlcli.collectors.sharing import dumps

        try:
            return dumps(self)
        except Exception:  # whatever a user's `__reduce__` raises
            for field in fields(self):
                sent(field.name, getattr(self, field.name))
            raise


def sent(name: str, value: Any) -> bytes:
    """Return an option as another process can take it: `pickle.loads` gives the like."""
    from rlcli.collectors.sharing import dumps

    try:
        return dumps(value)
    except Exception as error:  # whatever a user's `__reduce__` raises
        raise ArgumentError(
            f"{name} cannot be sent to another process", why=f"it is a {type(value).__name__}: {in_words(error, 200)}",
            fix=_SENDABLE.get(name, "Give one that pickle.dumps takes."),
        ) from error  # fmt: skip


_SENDABLE = {
    "create_env_fn": "Give a function that makes the env from what it is called with, or what can be pickled: "
    "partial(GymEnv, 'CartPole-v1').",
    "policy": "Give policy_factory=, a function that makes the policy.",
    "policy_factory": "Give a function that makes all that the policy needs.",
    "traj_pool": "Leave it out: each process counts its own trajectories.",
}


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """Says what becomes of the batches, in the process that asked for them; each option is described at `Collector`."""

    storing_device: Device = None
    split_trajs: bool = False
    trajs_per_batch: int | None = None
    traj_format: str | None = None
    deliver_leftovers: bool = False
    postproc: Callable[[TensorDictBase], TensorDictBase | None] | None = None
    pre_collect_hook: Callable[[], Any] | None = None
    post_collect_hook: Callable[[TensorDictBase], Any] | None = None
    replay_buffer: Any = None
    extend_buffer: bool = True
    weight_updater: Any = None

    def __post_init__(self) -> None:
        if self.trajs_per_batch is not None:
            object.__setattr__(self, "trajs_per_batch", whole("trajs_per_batch", self.trajs_per_batch))
        for name in ("postproc", "pre_collect_hook", "post_collect_hook"):
            function(name, getattr(self, name))
        buffer, used = self.replay_buffer, "extend" if self.extend_buffer else "add"
        if buffer is not None and (type(buffer) in (list, set) or not callable(getattr(buffer, used, None))):
            raise ArgumentError(
                f"replay_buffer must be a replay buffer, with {used}", why=f"got a {type(buffer).__name__}",
                fix="Use ReplayBuffer(...), or leave it out to get the batches.",
            )  # fmt: skip

    def storage_dims(self) -> list[int]:
        """Dimensions of the storage of the buffer, or of each member of an ensemble; 1 where there is none."""
        members = getattr(self.replay_buffer, "buffers", (self.replay_buffer,))
        return [getattr(getattr(member, "storage", None), "ndim", 1) for member in members]

    def trajectories(self, stepping: Stepping, groups: Sequence[range] | None = None) -> CompleteTrajectories | None:
        """Return what cuts the batches that are stepped so into whole trajectories; None where they are not.

        `groups`: lanes whose trajectories are delivered together; all of them by default.
        """
        if self.split_trajs:
            self._check_split(stepping)
        if self.trajs_per_batch is None:
            for name, asked in (
                ("traj_format", self.traj_format is not None),
                ("deliver_leftovers", self.deliver_leftovers),
            ):
                if asked:
                    raise ArgumentError(f"{name} has no meaning without trajs_per_batch")
            return None
        if not stepping.track_traj_ids:
            raise ArgumentError(
                "trajs_per_batch needs track_traj_ids=True", why="a reset from outside shows in the ids"
            )
        kept = None if stepping.keep_keys is None else [*map(unravel, stepping.keep_keys)]
        missing = [show(key) for key in (DONE, TRAJ_IDS) if kept is not None and key not in kept]
        if missing:
            raise ArgumentError(f"trajs_per_batch needs {' and '.join(missing)} among keep_keys")
        if stepping.set_truncated and not stepping.reset_at_each_iter:
            raise ArgumentError(
                "set_truncated=True ends every trajectory with its batch, and trajs_per_batch asks for whole ones",
                fix="Give one of them, or reset_at_each_iter=True as well.",
            )
        if self.replay_buffer is not None and self.traj_format == "padded":
            raise ArgumentError("a replay buffer takes rows, not padding", fix="Leave out traj_format='padded'.")
        if (dims := max(self.storage_dims())) > 1:
            raise ArgumentError(
                f"trajs_per_batch writes trajectories of any length, and the storage has ndim={dims}",
                fix="Use a storage with ndim=1.",
            )
        from rlcli.collectors.trajectories import CompleteTrajectories

        layout = self.traj_format or ("padded" if self.replay_buffer is None else "cat")
        return CompleteTrajectories(self.trajs_per_batch, layout, self.deliver_leftovers, groups)

    def _check_split(self, stepping: Stepping) -> None:
        if self.trajs_per_batch is not None:
            raise ArgumentError("split_trajs and trajs_per_batch both cut trajectories", fix="Give one of them.")
        if not stepping.track_traj_ids:
            raise ArgumentError("split_trajs=True needs track_traj_ids=True")
        if not self.extend_buffer:
            raise ArgumentError(
                "extend_buffer=False adds steps, and split_trajs=True makes padded trajectories",
                fix="Give one of them.",
            )
        if self.replay_buffer is not None:
            raise ArgumentError("a replay buffer takes rows, not padding", fix="Leave out split_trajs=True.")


def divided(options: Mapping[str, Any]) -> tuple[Stepping, Delivery]:
    """Both parts of a collector's options, by name; other names are left out."""

    def of(part: type) -> dict[str, Any]:
        return {field.name: options[field.name] for field in fields(part) if field.name in options}

    return Stepping(**of(Stepping)), Delivery(**of(Delivery))
