"""`Collector`: steps envs under a policy in this process and yields batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType
from torch import nn

from rlcli.collectors.assemble import MODES, assemble
from rlcli.collectors.base import BaseCollector
from rlcli.collectors.devices import place
from rlcli.collectors.engine import Engine, Seconds
from rlcli.collectors.frames import check_frames, next_steps, steps_of
from rlcli.collectors.keep import ALWAYS, keeper
from rlcli.collectors.policies import copy_weights, on_device, on_tensordicts, own_device
from rlcli.collectors.programs import Program, RandomProgram, lower
from rlcli.collectors.recurrent_wiring import missing_transforms
from rlcli.collectors.tensordict_lanes import array_face
from rlcli.collectors.trajectory_ids import _TrajectoryPool
from rlcli.data.next_obs import move
from rlcli.data.split_trajectories import split_trajectories
from rlcli.envs import EnvBase, TransformedEnv
from rlcli.errors import ArgumentError
from rlcli.keys import DONE, POLICY_VERSION, REWARD, TRUNCATED, Key, under_next, unravel
from rlcli.transforms import StepCounter, Transform, choose_faces

EnvMaker = EnvBase | Callable[[], EnvBase]


class Collector(BaseCollector):
    """Collects `frames_per_batch` frames at a time.

    Parameters
    ----------
    create_env_fn : EnvBase or callable
        An env, or what makes one.
    policy : nn.Module, TensorDictModule or callable, optional
        None means random actions.
    frames_per_batch : int
        Frames a batch, rounded up to whole steps of all envs.
    total_frames : int
        Frames until iteration ends, exact to one step of all envs; -1 never ends.
    device, env_device, policy_device, storing_device : torch device, optional
        Where stages run; `device` sets the other three.
    next_obs : {"full", "compact", "exact"}, optional
        How `("next", *observation)` is kept: stored; not stored; or as a lazy tensor over the stored observations and
        the few successors that are not among them (no value is lost).  `compact_obs=True` is `"compact"`.
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
        Deliver complete trajectories only, so many at a time.
    reuse_batch : bool
        Overwrite the previous batch's memory with the next: fast, and dangerous for whoever still reads it.
    track_traj_ids, track_policy_version : bool
        Whether `("collector", "traj_ids")` and `("collector", "policy_version")` are in the batch.
    update_at_each_batch : bool
        Take over the policy's weights before every batch, where the collector works on a copy.
    no_cuda_sync : bool
        Leave out explicit waits between devices.
    pre_collect_hook, post_collect_hook : callable, optional
        Called before each batch, and with each batch; what they raise stops collection and reaches the caller.
    auto_register_policy_transforms : bool
        Add what a recurrent policy needs of its env where it is missing.

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
        frames_per_batch: int = 200,
        total_frames: int = -1,
        device=None,
        env_device=None,
        policy_device=None,
        storing_device=None,
        next_obs: str | None = None,
        compact_obs: bool = False,
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
        reuse_batch: bool = False,
        track_traj_ids: bool = True,
        track_policy_version: bool = False,
        update_at_each_batch: bool = False,
        no_cuda_sync: bool = False,
        pre_collect_hook: Callable[[], Any] | None = None,
        post_collect_hook: Callable[[TensorDictBase], Any] | None = None,
        auto_register_policy_transforms: bool = True,
        create_env_kwargs: dict[str, Any] | None = None,
        seed: int | None = None,
        episode_seeds: bool = False,
        traj_pool: _TrajectoryPool | None = None,
    ) -> None:
        check_frames(frames_per_batch, total_frames)
        if split_trajs and not track_traj_ids:
            raise ArgumentError("split_trajs=True needs track_traj_ids=True")
        if split_trajs and trajs_per_batch is not None:
            raise ArgumentError("split_trajs and trajs_per_batch both cut trajectories", fix="Give one of them.")
        if trajs_per_batch is not None and keep_keys is not None and DONE not in map(unravel, keep_keys):
            raise ArgumentError("trajs_per_batch needs ('next', 'done') among keep_keys")
        if next_obs is not None and compact_obs and next_obs != "compact":
            raise ArgumentError(f"compact_obs=True and next_obs='{next_obs}' contradict each other")
        self.next_obs = next_obs or ("compact" if compact_obs else "full")
        if self.next_obs not in MODES:
            raise ArgumentError(f"unknown next_obs '{self.next_obs}'", fix=f"Use one of {', '.join(MODES)}.")
        super().__init__(
            postproc=postproc, replay_buffer=replay_buffer, extend_buffer=extend_buffer,
            trajs_per_batch=trajs_per_batch, pre_collect_hook=pre_collect_hook, post_collect_hook=post_collect_hook,
        )  # fmt: skip
        self.frames_per_batch, self.total_frames = frames_per_batch, total_frames
        self.raw_done: np.ndarray | None = None  # [N, T, 1] of the last batch, where set_truncated changes it
        self.init_random_frames = init_random_frames or 0
        self.reset_at_each_iter, self.split_trajs, self.set_truncated = reset_at_each_iter, split_trajs, set_truncated
        self.track_policy_version, self.policy_version = track_policy_version, 0
        self.update_at_each_batch = update_at_each_batch
        self._models: dict[str, tuple[nn.Module, nn.Module]] = {}

        env = create_env_fn if isinstance(create_env_fn, EnvBase) else create_env_fn(**(create_env_kwargs or {}))
        self.env = _wire_up(env, policy, max_frames_per_traj, auto_register_policy_transforms)
        base, transforms = _layers(self.env)
        self.batched = bool(self.env.batch_size)
        self.lanes = array_face(base)
        self.lanes.limit_frames(max_frames_per_traj)
        self.placement = place(
            device=device, env_device=env_device, policy_device=policy_device, storing_device=storing_device,
            env_own=self.env.device, policy_own=own_device(policy), no_cuda_sync=no_cuda_sync,
        )  # fmt: skip
        self._given = self._trained = (
            policy  # what update_policy_weights_ copies from, where the collector works on a copy
        )
        schema = dict(self.lanes.schema)
        for transform in transforms:
            schema |= transform.plan({**schema, REWARD: ((1,), np.dtype(np.float32))})
        random = RandomProgram(self.lanes.actions)
        if policy is None:
            self.policy, self.is_copy = None, False
            program: Program = random
        else:
            policy = self._trained = on_tensordicts(policy, list(schema))
            self.policy, self.is_copy = on_device(policy, self.placement.policy)
            program = lower(
                self.policy, self.lanes.actions, schema, self.env.batch_size, self.placement, exploration_type
            )  # fmt: skip
            random = RandomProgram(self.lanes.actions, program.log_prob_key)
        env_schema = {**self.lanes.schema, REWARD: ((1,), np.dtype(np.float32))}
        faces = choose_faces(transforms, env_schema, program.reads)
        known = [*schema, *map(under_next, schema), *program.live, *program.once, *random.once, *ALWAYS, POLICY_VERSION]
        self._keep = keeper(keep_keys, list(schema), known)
        self.rng = np.random.Generator(np.random.PCG64(_drawn_seed() if seed is None else seed))
        self.ids = traj_pool or _TrajectoryPool()
        self.engine = Engine(
            self.lanes, transforms, faces, program, random, stored=self._keep, keep_finals=self.next_obs != "compact",
            track_ids=track_traj_ids, ids=self.ids, rng=self.rng, reuse=reuse_batch,
            reset_when_done=reset_when_done,
        )  # fmt: skip
        if seed is not None or not self.lanes.seeded:
            self.lanes.seed(_drawn_seed() if seed is None else seed, every_episode=episode_seeds)

    # ---- iteration ---------------------------------------------------------------------------------------------
    @property
    def frames_in_batch(self) -> int:
        """Frames of a full batch after rounding to whole steps of all envs."""
        return steps_of(self.frames_per_batch, self.lanes.n) * self.lanes.n

    def _batches(self) -> Iterator[TensorDictBase]:
        while steps := self.steps_left():
            yield self.rollout(steps)

    def steps_left(self) -> int:
        """Steps per env of the next batch; 0 when `total_frames` are collected."""
        return next_steps(self.frames_per_batch, self.total_frames, self.lanes.n, self.frames)

    def rollout(self, steps: int | None = None, *, timed: bool = False) -> TensorDictBase:
        """Collect one batch.

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
        columns, finals = self.engine.collect(steps, min(steps, steps_of(left, self.lanes.n)), timed)
        self.raw_done = None
        if self.set_truncated:
            self.raw_done = columns[DONE].copy() if DONE in columns else None
            for key in (TRUNCATED, DONE):
                if key in columns:
                    columns[key][:, -1] = True
        if self.track_policy_version:
            taken = next(iter(columns.values())).shape[1]
            columns[POLICY_VERSION] = np.full((self.lanes.n, taken), self.policy_version, np.int64)
        batch = assemble(
            columns, batched=self.batched, stored=self._keep, mode=self.next_obs,
            observations=self.engine.observations, added=list(self.engine.faces.columns),
            carrier=self.engine.carrier, finals=finals,
        )  # fmt: skip
        self.frames += batch.numel()
        if self.placement.storing is not None and self.placement.storing.type != "cpu":
            batch = move(batch, self.placement.storing, non_blocking=self.placement.non_blocking)
            self.placement.sync_storage()
        return split_trajectories(batch) if self.split_trajs else batch

    @property
    def last_seconds(self) -> Seconds | None:
        """Env and policy seconds of the last batch, if it was timed."""
        return self.engine.seconds

    @property
    def raw_reward(self) -> np.ndarray | None:
        """The last batch's rewards `[N, T, 1]` as the env gave them; None where no transform changes rewards."""
        return self.engine.raw_reward

    # ---- weights, seeds, end -----------------------------------------------------------------------------------
    def update_policy_weights_(self, policy: nn.Module | None = None) -> None:
        """Take over new weights; nothing is copied where the collector uses the very policy that is trained."""
        source = self._trained if policy is None or policy is self._given else policy
        self.policy_version += 1
        for trained, used in self._models.values():
            copy_weights(trained, used)
        if self.policy is None or source is self.policy or not isinstance(source, nn.Module):
            return
        copy_weights(source, self.policy)

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
        self._models[name] = (module, module if used is None else used)

    def set_seed(self, seed: int, *, episode_seeds: bool = False) -> int:
        """Seed env, exploration and ids' order; the first episode included.  Returns a seed for the next user."""
        self.rng.bit_generator.state = np.random.PCG64(seed).state
        self.lanes.seed(seed, every_episode=episode_seeds)
        self.engine.begun = False
        return seed + 1

    # ---- checkpoints -------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Between two batches, everything that decides the following ones (the policy's weights apart)."""
        return {"frames": self.frames, "policy_version": self.policy_version, "engine": self.engine.state_dict()}

    def load_state_dict(self, state: dict[str, Any], *, replay: bool = True) -> list[int]:
        """Continue where `state_dict` was taken; call `set_seed` with the run's seed first.

        Returns
        -------
        list of int
            The lanes whose env could not be brought back exactly: each begins a new episode, under a new id.
        """
        self.frames, self.policy_version = int(state["frames"]), int(state["policy_version"])
        return self.engine.load_state_dict(state["engine"], replay=replay)

    def shutdown(self) -> None:
        super().shutdown()
        if not self.env.is_closed:
            self.env.close()


def _drawn_seed() -> int:
    """A seed from torch's global stream, so that `torch.manual_seed` covers collectors too."""
    return int(torch.randint(0, 2**62, ()))


def _layers(env: EnvBase) -> tuple[EnvBase, list[Transform]]:
    return (env.base_env, env.transforms) if isinstance(env, TransformedEnv) else (env, [])


def _wire_up(env: EnvBase, policy: Any, max_frames_per_traj: int | None, auto: bool) -> EnvBase:
    """The env with the transforms that options and policy ask for."""
    extra: list[Transform] = []
    if max_frames_per_traj is not None:
        if max_frames_per_traj < 1:
            raise ArgumentError("max_frames_per_traj must be at least 1", why=f"got {max_frames_per_traj}")
        extra.append(StepCounter())
    if auto and policy is not None:
        extra += missing_transforms(env, policy)
    for transform in extra:
        env = TransformedEnv(env, transform)
    return env
