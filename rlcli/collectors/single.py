"""`Collector`: steps envs under a policy in this process and yields batches.

Here is what happens batch by batch.  Which options exclude each other is in `options`, what they are turned into in
`wiring`, what happens step by step in `loop`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType
from torch import nn

from rlcli.collectors.assemble import assemble
from rlcli.collectors.base import BaseCollector
from rlcli.collectors.devices import one_device, place
from rlcli.collectors.engine import Engine, Seconds
from rlcli.collectors.frames import check_frames, next_steps, steps_of
from rlcli.collectors.options import check_split, next_obs_mode, whole_trajectories
from rlcli.collectors.policies import own_device
from rlcli.collectors.trajectory_ids import _TrajectoryPool
from rlcli.collectors.weights import Source
from rlcli.collectors.wiring import EnvMaker, delta_of, make_env, wire, with_delta, with_transforms
from rlcli.data.next_obs import move
from rlcli.errors import ArgumentError
from rlcli.keys import DONE, POLICY_VERSION, TRUNCATED, Key
from rlcli.modules.exploration import RandomPolicy


class Collector(BaseCollector):
    """Collects `frames_per_batch` frames at a time.

    Parameters
    ----------
    create_env_fn : EnvBase or callable
        An env, or what makes one.
    policy : nn.Module, TensorDictModule or callable, optional
        A callable takes the tensordict of a step and writes `action` to it; a module may also read observations, by the
        names of its arguments.  What it writes beside is stored; what the env showed is stored as it was, even where
        the policy overwrites it.  None means random actions.
    policy_factory : callable, optional
        Instead of `policy`: called once, it returns one.
    frames_per_batch : int
        Frames a batch, rounded up to whole steps of all envs.
    total_frames : int
        Frames until iteration ends, exact to one step of all envs; -1 never ends.
    device, env_device, policy_device, storing_device : torch device, optional
        Where stages run; `device` sets the other three.
    devices : sequence of torch devices, optional
        The same as `device`, as a list that names one device: several are for workers, and this collector has none.
    next_obs : {"full", "compact", "exact", "delta"}, optional
        How `("next", *observation)` is kept: stored; not stored; as a lazy tensor over the stored observations and the
        few successors that are not among them (no value is lost); or as a difference of low precision (see
        `NextObservationDelta`, which an env may bring with it).  `compact_obs=True` is `"compact"`.
    delta_dtype : torch dtype
        Of the differences of `next_obs="delta"`: float16, bfloat16 or int8.
    on_overflow : {"raise", "keep"}
        A row whose difference that dtype cannot hold: an error, or its next observation is kept as it is.
    keep_keys : sequence of keys, optional
        Store only these; an observation brings its next value, in the way that `next_obs` says.
    max_frames_per_traj : int, optional
        Truncate episodes after so many steps; adds a `StepCounter`.
    init_random_frames : int
        The first so many frames take random actions.
    reset_at_each_iter : bool
        Begin new episodes with every batch.
    reset_when_done : bool
        False ends a batch early, after the first step in which an env finished; that env is reset when the next batch
        begins.
    split_trajs : bool
        Deliver padded trajectories with a mask (discouraged).
    set_truncated : bool
        Flag the last step of every batch truncated.
    exploration_type : ExplorationType
        RANDOM draws from the policy's distribution, MODE and DETERMINISTIC take its mode.
    postproc : callable, optional
        Batch -> batch, before it is delivered.
    replay_buffer : optional
        Batches are written there and None is yielded; `extend_buffer=False` writes step by step with `add`.
    trajs_per_batch : int, optional
        Deliver complete trajectories only, so many at a time.  `frames_per_batch` then says how often it is looked for
        them.
    traj_format : {"padded", "cat"}, optional
        Their layout: `[trajs_per_batch, longest]` with a mask `("collector", "mask")` (the default), or end to end,
        `[frames]`, as a buffer always gets them.
    deliver_leftovers : bool
        Deliver trajectories that `total_frames` or a reset from outside cuts short too, their last step flagged
        truncated and done; the last delivery may be smaller.  Otherwise `trajectories` counts them
        (`leftover_frames`, `dropped_frames`).
    reuse_batch : bool
        Overwrite the previous batch's memory with the next: fast, and dangerous for whoever still reads it.
    track_traj_ids, track_policy_version : bool
        Whether `("collector", "traj_ids")` and `("collector", "policy_version")` are in the batch.
    update_at_each_batch : bool
        Take over the policy's weights before every batch, where the collector works on a copy.
    no_cuda_sync : bool
        Leave out explicit waits between devices.
    filter_warnings_subprocess : bool
        Hide the warnings of worker processes.  Accepted so that options can be handed from one collector to another:
        this one works in the process it was made in, whose warnings it never filters, whatever is said here.
    pre_collect_hook, post_collect_hook : callable, optional
        Called before each batch, and with each batch; what they raise stops collection and reaches the caller.
    trust_policy, use_buffers : bool, optional
        Accepted so that options can be handed from one collector to another: policies are called as they are, and every
        batch is one preallocated buffer.
    auto_register_policy_transforms : bool
        Add what a recurrent policy needs of its env where it is missing.  Row t holds the state that step t began with
        and, under `next`, the one it wrote (never in `compact`; in `exact` once, gathered when read).  `keep_keys` that
        name the state only store it at the root alone.

    Raises
    ------
    ArgumentError
        Options that do not fit together.
    EnvError, NumericsError
        While collecting: a broken step contract, a policy output that is not finite.
    """

    def __init__(
        self,
        create_env_fn: EnvMaker,
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | None = None,
        frames_per_batch: int = 200,
        total_frames: int = -1,
        device=None,
        env_device=None,
        policy_device=None,
        storing_device=None,
        devices=None,
        next_obs: str | None = None,
        compact_obs: bool = False,
        delta_dtype: torch.dtype = torch.float16,
        on_overflow: str = "raise",
        keep_keys: Sequence[Key] | None = None,
        max_frames_per_traj: int | None = None,
        init_random_frames: int | None = 0,
        reset_at_each_iter: bool = False,
        reset_when_done: bool = True,
        split_trajs: bool = False,
        set_truncated: bool = False,
        exploration_type: InteractionType | None = InteractionType.RANDOM,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        replay_buffer: Any = None,
        extend_buffer: bool = True,
        trajs_per_batch: int | None = None,
        traj_format: str | None = None,
        deliver_leftovers: bool = False,
        reuse_batch: bool = False,
        track_traj_ids: bool = True,
        track_policy_version: bool = False,
        update_at_each_batch: bool = False,
        no_cuda_sync: bool = False,
        filter_warnings_subprocess: bool = True,
        pre_collect_hook: Callable[[], Any] | None = None,
        post_collect_hook: Callable[[TensorDictBase], Any] | None = None,
        trust_policy: bool | None = None,
        use_buffers: bool | None = None,
        auto_register_policy_transforms: bool = True,
        create_env_kwargs: dict[str, Any] | None = None,
        seed: int | None = None,
        episode_seeds: bool = False,
        traj_pool: _TrajectoryPool | None = None,
    ) -> None:
        policy = _made(policy, policy_factory)
        check_frames(frames_per_batch, total_frames)
        check_split(split_trajs, trajs_per_batch, track_traj_ids, extend_buffer)
        next_obs_mode(next_obs, compact_obs)
        super().__init__(
            postproc=postproc, replay_buffer=replay_buffer, extend_buffer=extend_buffer, split_trajs=split_trajs,
            trajectories=whole_trajectories(
                trajs_per_batch, layout=traj_format, deliver_leftovers=deliver_leftovers, keep_keys=keep_keys,
                track_traj_ids=track_traj_ids, cut_by_batch=set_truncated and not reset_at_each_iter,
                replay_buffer=replay_buffer,
            ),
            pre_collect_hook=pre_collect_hook, post_collect_hook=post_collect_hook,
        )  # fmt: skip
        self.frames_per_batch, self.total_frames = frames_per_batch, total_frames
        self.init_random_frames = init_random_frames or 0
        self.reset_at_each_iter, self.set_truncated = reset_at_each_iter, set_truncated
        self.track_policy_version, self.policy_version = track_policy_version, 0
        self.update_at_each_batch = update_at_each_batch
        self.raw_done: np.ndarray | None = None  # [N, T, 1] of the last batch, where set_truncated changes it

        with contextlib.ExitStack() as undo:
            env = make_env(create_env_fn, create_env_kwargs)
            if env is not create_env_fn:  # if anything fails, nobody else can close what was made here
                undo.callback(env.close)
            self.env = with_transforms(env, policy, max_frames_per_traj, auto_register_policy_transforms)
            self.next_obs = next_obs_mode(next_obs, compact_obs, delta_of(self.env) is not None)
            self.env, self.delta = with_delta(self.env, self.next_obs, delta_dtype, on_overflow)
            self.batched = bool(self.env.batch_size)
            self.placement = place(
                device=one_device(device, devices), env_device=env_device, policy_device=policy_device,
                storing_device=storing_device, env_own=self.env.device, policy_own=own_device(policy),
                no_cuda_sync=no_cuda_sync,
            )  # fmt: skip
            wired = wire(
                self.env, policy, self.placement, exploration_type=exploration_type, keep_keys=keep_keys,
                max_frames_per_traj=max_frames_per_traj,
            )  # fmt: skip
            self.lanes, self._stored, self._weights = wired.lanes, wired.stored, wired.weights
            self.policy, self.is_copy = wired.policy, wired.is_copy
            self.rng = np.random.Generator(np.random.PCG64(_drawn_seed() if seed is None else seed))
            self.ids = traj_pool or _TrajectoryPool()
            self.engine = Engine(
                wired.lanes, wired.transforms, wired.faces, wired.program, wired.random, stored=wired.stored,
                keep_finals=self.next_obs != "compact", track_ids=track_traj_ids, ids=self.ids, rng=self.rng,
                reuse=reuse_batch, reset_when_done=reset_when_done,
                max_frames=max_frames_per_traj,
            )  # fmt: skip
            if seed is not None or not self.lanes.seeded:
                self.lanes.seed(_drawn_seed() if seed is None else seed, every_episode=episode_seeds)
            undo.pop_all()

    # ---- iteration ---------------------------------------------------------------------------------------------
    @property
    def frames_in_batch(self) -> int:
        """Frames of a full batch after rounding to whole steps of all envs."""
        return steps_of(self.frames_per_batch, self.lanes.n) * self.lanes.n

    def __len__(self) -> int:
        """Batches of the whole run.

        Raises
        ------
        TypeError
            It has no end, or delivers trajectories, whose number nobody knows.
        """
        if self.total_frames < 0 or self.trajectories is not None:
            raise TypeError("a collector without total_frames, or with trajs_per_batch, has no length")
        return -(-self.total_frames // self.frames_in_batch)

    def __bool__(self) -> bool:
        return True

    def _batches(self) -> Iterator[TensorDictBase]:
        while steps := self.steps_left():
            yield self.rollout(steps)

    def steps_left(self) -> int:
        """Steps per env of the next batch; 0 when `total_frames` are collected."""
        return next_steps(self.frames_per_batch, self.total_frames, self.lanes.n, self.frames)

    def _is_over(self) -> bool:
        return not self.steps_left()

    def _finish(self) -> None:
        super()._finish()
        if self.trajectories is not None and self.trajectories.deliver_leftovers:
            self.engine.begun = False  # what was open is delivered: should collecting go on, it goes on with new ones

    def rollout(self, steps: int | None = None, *, timed: bool = False) -> TensorDictBase:
        """Collect one raw batch; `pieces` makes of it what a consumer is to get.

        Parameters
        ----------
        steps : int, optional
            Steps per env; those of a full batch by default.
        timed : bool
            Measure env and policy time (`last_seconds`); costs a few percent, so not for every batch.
        """
        if self.update_at_each_batch:
            self.update_policy_weights_()
        if self.pre_collect_hook is not None:
            self.pre_collect_hook()
        if self.reset_at_each_iter:
            self.engine.begun = False
        steps = steps_of(self.frames_per_batch, self.lanes.n) if steps is None else steps
        if steps < 1:
            raise ArgumentError("a batch has at least one step", why=f"got {steps}")
        left = max(0, self.init_random_frames - self.frames)
        self.engine.program.in_background(self._thread is threading.current_thread())
        columns, finals = self.engine.collect(steps, min(steps, steps_of(left, self.lanes.n)), timed)
        self._flag_last_step(columns)
        if self.track_policy_version:
            taken = next(iter(columns.values())).shape[1]
            columns[POLICY_VERSION] = np.full((self.lanes.n, taken), self.policy_version, np.int64)
        batch = assemble(
            columns, batched=self.batched, stored=self._stored, mode=self.next_obs,
            observations=self.engine.observations, added=list(self.engine.faces.columns),
            carrier=self.engine.carrier, finals=finals, delta=self.delta,
        )  # fmt: skip
        self.frames += batch.numel()
        return self._stored_where_asked(batch)

    def _flag_last_step(self, columns: dict[Key, np.ndarray]) -> None:
        self.raw_done = None
        if self.set_truncated:
            self.raw_done = columns[DONE].copy() if DONE in columns else None
            for key in (TRUNCATED, DONE):
                if key in columns:
                    columns[key][:, -1] = True

    def _stored_where_asked(self, batch: TensorDictBase) -> TensorDictBase:
        storing = self.placement.storing
        if storing is not None and self.placement.storing_is_elsewhere:
            batch = move(batch, storing, non_blocking=self.placement.non_blocking)
            self.placement.sync_storage()
        return batch

    @property
    def last_seconds(self) -> Seconds | None:
        """Env and policy seconds of the last batch, if it was timed."""
        return self.engine.seconds

    @property
    def raw_reward(self) -> np.ndarray | None:
        """The last batch's rewards `[N, T, 1]` as the env gave them; None where no transform changes rewards."""
        return self.engine.raw_reward

    def figures(self) -> dict[str, Any]:
        """For a closing report: with `next_obs="delta"`, under `delta` what rounding differences cost."""
        return {} if self.delta is None else {"delta": self.delta.figures()}

    # ---- weights, seeds, end -----------------------------------------------------------------------------------
    def update_policy_weights_(self, policy: Source | None = None, *, model_id: str | None = None) -> None:
        """Take over new weights; nothing is copied where the collector uses the very tensors that are trained.

        Parameters
        ----------
        policy : nn.Module, TensorDict or mapping, optional
            A module, `TensorDict.from_module` of one, or a `state_dict`; by default the policy that the collector was
            made with.
        model_id : str, optional
            Update this registered model alone; by default the policy, and all registered models with it.
        """
        self._weights.update(policy, model_id)
        self.policy_version += model_id in (None, "policy")

    def register_model(self, name: str, module: nn.Module, used: nn.Module | None = None) -> None:
        """Keep a further model in step: `update_policy_weights_` copies `module`'s weights into `used` as well.

        Parameters
        ----------
        name : str
            Of the model; registering it again replaces it.
        module, used : nn.Module
            What is trained, and the copy that an env, a transform or a hook works with; without one, they use
            `module` itself and nothing needs copying.
        """
        self._weights.register(name, module, used)

    def reset(self) -> None:
        """Begin the next batch with new episodes in all lanes."""
        self.engine.begun = False

    def set_seed(self, seed: int, *, episode_seeds: bool = False) -> int:
        """Seed env, exploration and ids' order; the first episode included.  Returns a seed for the next user."""
        self.rng.bit_generator.state = np.random.PCG64(seed).state
        self.lanes.seed(seed, every_episode=episode_seeds)
        self.engine.begun = False
        return seed + 1

    # ---- checkpoints -------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Between two batches, everything that decides the following ones (the policy's weights apart)."""
        state = {"frames": self.frames, "policy_version": self.policy_version, "engine": self.engine.state_dict()}
        return state if self.trajectories is None else state | {"trajectories": self.trajectories.state_dict()}

    def load_state_dict(self, state: dict[str, Any], *, replay: bool = True) -> list[int]:
        """Continue where `state_dict` was taken; call `set_seed` with the run's seed first.

        Returns
        -------
        list of int
            The lanes whose env could not be brought back exactly: each begins a new episode, under a new id.
        """
        self.frames, self.policy_version = int(state["frames"]), int(state["policy_version"])
        if self.trajectories is not None:
            self.trajectories.load_state_dict(state["trajectories"], self.placement.storing)
        return self.engine.load_state_dict(state["engine"], replay=replay)

    def begin_anew(self, frames: int, taken: Iterable[int] = ()) -> None:
        """Go on as if `frames` were collected, with new episodes in all lanes; what was open is given up.

        Parameters
        ----------
        taken : iterable of int
            Ids that no new trajectory may get, beside those that this collector has given.
        """
        self.frames = frames
        self.engine.begun = False
        self.ids.restart_at(max([self.ids.next_id - 1, *taken]) + 1)

    def shutdown(self) -> None:
        super().shutdown()
        if not self.env.is_closed:
            self.env.close()


def _made(policy: Any, factory: Callable[[], Any] | None) -> Any:
    """The policy that was given in one way or the other; None for random actions."""
    if factory is not None:
        if policy is not None:
            raise ArgumentError("policy and policy_factory are two ways to give one policy", fix="Give one of them.")
        policy = factory()
    return None if type(policy) is RandomPolicy and policy.action_spec is None else policy


def _drawn_seed() -> int:
    """A seed from torch's global stream, so that `torch.manual_seed` covers collectors too."""
    return int(torch.randint(0, 2**62, ()))
