"""The options of a collector; what contradicts itself or something else is refused here, before anything is built."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType
from torch import nn

from rlcli import arguments, modules
from rlcli.arguments import refuse
from rlcli.data.next_obs.modes import MODES
from rlcli.errors import ArgumentError
from rlcli.keys import DONE, POLICY_VERSION, TRAJ_IDS, Key, show, unravel
from rlcli.specs.base import Device

if TYPE_CHECKING:
    from rlcli.collectors.trajectories import CompleteTrajectories


def counted(name: str, value: Any, least: int | None = None) -> int:
    """Return the number of an option that counts something: whole, and large enough."""
    option = FIELDS.get(name)
    if least is None and option is not None:
        least = option.metadata.get("least")
    number = arguments.count(name, value, least)
    endless = name == "total_frames" and (number == 0 or number < -1)
    refuse(endless, "total_frames must be at least 1", why=f"got {number}", fix="Use -1 to collect without end.")
    return number


COUNTED = "frames_per_batch", "total_frames", "init_random_frames"  # may be set anew between two batches
HOOKS = "pre_collect_hook", "post_collect_hook"
CALLED = "postproc", *HOOKS  # likewise
WORKER, EACH, PARENT = "worker", "each", "parent"  # scopes: all workers alike, a list has one for each, none


def _option(default: Any = MISSING, scope: str = WORKER, **about: Any) -> Any:
    """Return the field of an option: whose it is among workers, its least number, whether it is `fixed`."""
    return field(default=default, metadata={"scope": scope, **about})


@dataclass(frozen=True)
class CollectorOptions:
    """Hold all options of a collector; each is described at `Collector`."""

    create_env_fn: Any = _option(scope=EACH)
    policy: Any = _option(None)
    _: KW_ONLY
    create_env_kwargs: dict[str, Any] | None = _option(None, EACH)
    policy_factory: Callable[[], Any] | None = _option(None, EACH)
    frames_per_batch: int = _option(200, EACH, least=1)
    total_frames: int = _option(-1)
    device: Device = _option(None, EACH)
    devices: Any = _option(None, EACH)
    env_device: Device = _option(None, EACH)
    policy_device: Device = _option(None, EACH)
    storing_device: Device = _option(None, PARENT)
    no_cuda_sync: bool = _option(False, fixed=True)
    next_obs: str | None = _option(None)
    compact_obs: bool = _option(False, fixed=True)
    delta_dtype: torch.dtype = _option(torch.float16, fixed=True)
    on_overflow: str = _option("raise", fixed=True)
    keep_keys: Sequence[Key] | None = _option(None, fixed=True)
    max_frames_per_traj: int | None = _option(None, fixed=True, least=1)
    init_random_frames: int | None = _option(0, least=0)
    reset_at_each_iter: bool = _option(False)
    reset_when_done: bool = _option(True, fixed=True)
    set_truncated: bool = _option(False)
    exploration_type: InteractionType | None = _option(InteractionType.RANDOM, fixed=True)
    reuse_batch: bool = _option(False, PARENT, fixed=True)
    track_traj_ids: bool = _option(True, fixed=True)
    track_policy_version: bool | None = _option(None, fixed=True)
    update_at_each_batch: bool = _option(False, PARENT)
    weights_swap: str = _option("rollout")
    auto_register_policy_transforms: bool = _option(True)
    recurrent_state_stride: int = _option(1, least=1)
    seed: int | None = _option(None, PARENT, least=0)
    episode_seeds: bool = _option(False, fixed=True)
    first_lane: int = _option(0, PARENT, least=0)
    all_lanes: int | None = _option(None, PARENT, least=1)
    traj_pool: Any = _option(None, PARENT)
    split_trajs: bool = _option(False, PARENT)
    trajs_per_batch: int | None = _option(None, PARENT, fixed=True)
    traj_format: str | None = _option(None, PARENT, fixed=True)
    deliver_leftovers: bool = _option(False, PARENT, fixed=True)
    postproc: Callable[[TensorDictBase], TensorDictBase | None] | None = _option(None, PARENT)
    pre_collect_hook: Callable[[], Any] | None = _option(None, PARENT)
    post_collect_hook: Callable[[TensorDictBase], Any] | None = _option(None, PARENT)
    replay_buffer: Any = _option(None, PARENT)
    extend_buffer: bool = _option(True, PARENT)
    weight_updater: Any = _option(None, PARENT)
    filter_warnings_subprocess: bool | None = _option(True, PARENT)  # this and what follows without effect
    trust_policy: bool | None = _option(None, PARENT)
    use_buffers: bool | None = _option(None, PARENT)

    def __post_init__(self) -> None:
        must = ("frames_per_batch", "total_frames", "recurrent_state_stride", "first_lane")
        for name in (*must, "init_random_frames", "max_frames_per_traj", "seed", "all_lanes"):
            if getattr(self, name) is not None or name in must:
                object.__setattr__(self, name, counted(name, getattr(self, name)))
        if (asked := self.keep_keys) is not None:
            keys = tuple(asked) if isinstance(asked, Iterable) and not isinstance(asked, str) else None
            refuse(keys is None or not all(isinstance(key, str | tuple) for key in keys),
                   "keep_keys must be a list of keys", why=f"got {asked!r}",
                   fix='Use ["observation", "action"].')  # fmt: skip
            object.__setattr__(self, "keep_keys", keys)
        if (kind := self.exploration_type) is not None and not isinstance(kind, InteractionType):
            names = {each.name.lower(): each for each in InteractionType}
            refuse(str(kind).lower() not in names, "exploration_type must be an ExplorationType", why=f"got {kind!r}",
                   fix=f"Or one of {', '.join(names)}.")  # fmt: skip
            object.__setattr__(self, "exploration_type", names[str(kind).lower()])
        arguments.callable_("policy_factory", self.policy_factory)
        refuse(self.policy is not None and self.policy_factory is not None,
               "policy and policy_factory are two ways to give one policy", fix="Give one of them.")  # fmt: skip
        refuse(self.device is not None and self.devices is not None,
               "device and devices are two names for one thing", fix="Give one of them.")  # fmt: skip
        if self.trajs_per_batch is not None:
            object.__setattr__(self, "trajs_per_batch", arguments.count("trajs_per_batch", self.trajs_per_batch, None))
        for name in CALLED:
            arguments.callable_(name, getattr(self, name))
        buffer, used = self.replay_buffer, "extend" if self.extend_buffer else "add"
        refuse(buffer is not None and (type(buffer) in (list, set) or not callable(getattr(buffer, used, None))),
               f"replay_buffer must be a replay buffer, with {used}", why=f"got a {type(buffer).__name__}",
               fix="Use ReplayBuffer(...), or leave it out to get the batches.")  # fmt: skip
        if self.track_policy_version is None:  # by default where it is asked for by its key
            object.__setattr__(self, "track_policy_version", POLICY_VERSION in map(unravel, self.keep_keys or ()))
        if self.split_trajs:
            self._check_split()
        if self.trajs_per_batch is None:
            alone = [name for name in ("traj_format", "deliver_leftovers") if getattr(self, name) not in (None, False)]
            refuse(alone, f"only trajs_per_batch gives {' and '.join(alone)} a meaning", fix="Leave it out.")
        self.next_obs_mode()

    def next_obs_mode(self, delta: bool = False) -> str:
        """Return how next observations are kept; `delta`: whether the env brings a `NextObservationDelta`."""
        if delta:
            asked = "compact" if self.compact_obs else self.next_obs
            refuse(asked not in (None, "delta"),
                   f"the env has a NextObservationDelta, and next_obs='{asked}' keeps next observations another way",
                   fix="Leave out one of them.")  # fmt: skip
            return "delta"
        if self.compact_obs and self.next_obs not in (None, "compact"):
            raise ArgumentError(f"compact_obs=True and next_obs='{self.next_obs}' contradict each other")
        mode = self.next_obs or ("compact" if self.compact_obs else "full")
        refuse(mode not in MODES, f"unknown next_obs '{mode}'", fix=f"Use one of {', '.join(MODES)}.")
        return mode

    def make_policy(self) -> Any:
        policy = self.policy if self.policy_factory is None else self.policy_factory()
        if isinstance(policy, nn.Module) or type(policy) is not modules.RandomPolicy:
            return policy
        return None if policy.action_spec is None else policy

    @property
    def random_mask_key(self) -> Key | None:
        """Return the key of the action mask that random actions without a policy keep to."""
        return self.policy.action_mask_key if type(self.policy) is modules.RandomPolicy else None

    def check_lanes(self, n: int) -> None:
        """Raise unless lanes `first_lane .. first_lane + n - 1` are some of `all_lanes`."""
        first, total = self.first_lane, self.all_lanes
        refuse((n if total is None else total) < first + n,
               "first_lane and all_lanes do not say which envs of a run this collector steps",
               why=f"its {n} envs begin at {first}, and all_lanes is {total}",
               fix=f"Give an all_lanes of at least first_lane + {n}.")  # fmt: skip

    def process_seed(self, seed: int) -> int:
        """Return the seed of what is drawn for all envs of a process; the run's in the first process."""
        if not self.first_lane:
            return seed
        return int(np.random.SeedSequence((seed, self.first_lane)).generate_state(1, np.uint64)[0])

    def storage_dims(self) -> list[int]:
        """Return the dimensions of the storage of the buffer, or of each member of an ensemble; else 1."""
        members = getattr(self.replay_buffer, "buffers", (self.replay_buffer,))
        return [getattr(getattr(member, "storage", None), "ndim", 1) for member in members]

    def trajectories(self, groups: Sequence[range] | None = None) -> CompleteTrajectories:
        """Return what cuts batches into whole trajectories, `trajs_per_batch` at a time, by groups of envs."""
        assert self.trajs_per_batch is not None
        refuse(not self.track_traj_ids, "trajs_per_batch needs track_traj_ids=True",
               why="a reset from outside shows in the ids")  # fmt: skip
        kept = None if self.keep_keys is None else [*map(unravel, self.keep_keys)]
        missing = [show(key) for key in (DONE, TRAJ_IDS) if kept is not None and key not in kept]
        refuse(missing, f"trajs_per_batch needs {' and '.join(missing)} among keep_keys")
        refuse(self.set_truncated and not self.reset_at_each_iter,
               "set_truncated=True ends every trajectory with its batch, and trajs_per_batch asks for whole ones",
               fix="Give one of them, or reset_at_each_iter=True as well.")  # fmt: skip
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

    def _check_split(self) -> None:
        if self.trajs_per_batch is not None:
            raise ArgumentError("split_trajs and trajs_per_batch both cut trajectories", fix="Give one of them.")
        refuse(not self.track_traj_ids, "split_trajs=True needs track_traj_ids=True")
        refuse(not self.extend_buffer,
               "extend_buffer=False adds steps, and split_trajs=True makes padded trajectories",
               fix="Give one of them.")  # fmt: skip
        if self.replay_buffer is not None:
            raise ArgumentError("a replay buffer takes rows, not padding", fix="Leave out split_trajs=True.")


FIELDS = {field.name: field for field in fields(CollectorOptions)}


def in_scope(scope: str) -> list[str]:
    return [name for name, field in FIELDS.items() if field.metadata["scope"] == scope]


# ---- the steps that a number of frames takes ------------------------------------------------------------------------
AHEAD = 2  # batches that an asynchronous worker has been asked for and that were not delivered: it never waits


def steps_of(frames: int, lanes: int) -> int:
    """Return the steps per env for a number of frames, rounded up to whole steps of all `lanes` envs."""
    return -(-frames // lanes)


def next_steps(frames_per_batch: int, total_frames: int, lanes: int, done: int) -> int:
    """Return the steps of the next batch after `done` frames; 0 when the run is over."""
    usual = steps_of(frames_per_batch, lanes)
    return usual if total_frames < 0 else min(usual, steps_of(max(0, total_frames - done), lanes))


def cut(shares: Sequence[int], lanes: Sequence[int], frames: int) -> int:
    """Return the fewest steps with which shares of a batch, cut to it, hold so many frames."""

    def frames_of(steps: int) -> int:
        return sum(min(share, steps) * n for share, n in zip(shares, lanes, strict=True))

    return bisect.bisect_left(range(max(shares)), frames, key=frames_of)
