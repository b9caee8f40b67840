"""`Collector`: steps envs under a policy in this process and yields batches.

Here is what happens batch by batch.  Which options exclude each other is in `options`, what they are turned into in
`wiring`, what happens step by step in `loop`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import nn

from rlcli import arguments
from rlcli.collectors.base import BaseCollector, called
from rlcli.collectors.devices import NOT_COPIED, column_memory, own_copy, place, synchronize
from rlcli.collectors.options import CollectorOptions, next_steps, steps_of
from rlcli.collectors.schema import RowSchema
from rlcli.collectors.weights import ActingModels
from rlcli.collectors.wiring import array_path, make_env, refuse_random_now, wire, with_transforms
from rlcli.envs import EnvBase, TransformedEnv
from rlcli.errors import ArgumentError, in_words
from rlcli.keys import DONE, POLICY_VERSION, REWARD, TRUNCATED
from rlcli.processes.watchdog import watching
from rlcli.vec_envs.bounds import Bounds
from rlcli.weight_update.publisher import POLICY, Publisher

if TYPE_CHECKING:
    from rlcli.collectors.faces import Face
    from rlcli.collectors.finish import Delivered, Filled
    from rlcli.collectors.rollout import Rollout
    from rlcli.processes.group import WorkerGroup
    from rlcli.weight_update.receiver import ModelsReceiver

P = ParamSpec("P")
Taking: TypeAlias = Callable[Concatenate[Any, P], None]


def _taking(options: Taking[P]) -> Callable[[Callable[..., None]], Taking[P]]:
    """Give a constructor the signature of those options, and its name to what python refuses of them."""
    options.__qualname__ = "Collector.__init__"
    return functools.wraps(options, assigned=(), updated=())


class Collector(BaseCollector):
    """Collects `frames_per_batch` frames at a time.

    Parameters
    ----------
    create_env_fn : EnvBase, callable or str
        An env, what makes one, or the name of one that gymnasium makes.
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
        Batch -> batch, before it is delivered; None where it changed the batch in place.
    replay_buffer : optional
        Batches are written there and None is yielded, for trajectories where some are whole; `extend_buffer=False`
        writes step by step with `add`.
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
        Whether `("collector", "traj_ids")` and `("collector", "policy_version")` are in the batch; of the version, None
        stands for whether `keep_keys` names it.
    update_at_each_batch : bool
        Take over the policy's weights before every batch, where the collector works on a copy.  In the background they
        are read in the middle of whatever the trainer does then: publish them instead.
    weight_updater : WeightUpdaterBase, or what makes one, optional
        Whom `update_policy_weights_` asks to bring weights to what acts.
    weights_swap : {"rollout", "step"}
        Where weights that are published while a batch is collected begin to act: with the next batch, or the next step.
    no_cuda_sync : bool
        Leave out explicit waits between devices.
    pre_collect_hook, post_collect_hook : callable, optional
        Called before each batch, and with each batch; what they raise stops collection and reaches the caller.
    filter_warnings_subprocess, trust_policy, use_buffers : bool, optional
        Accepted so that options can be handed from one collector to another, and without effect: there is no other
        process whose warnings could be hidden, policies are called as they are, and every batch is one preallocated
        buffer.
    seed : int, optional
        Of envs and exploration; drawn from torch's global stream by default.  Random actions, and the noise of policies
        that are taken apart, are functions of seed, lane and step; other policies draw from one stream, seeded with it.
    episode_seeds : bool
        Seed every episode on its own, not only the first of each lane.
    first_lane, all_lanes : int, optional
        Where the collector's envs are the lanes `first_lane ..` of a run of `all_lanes`: they get the seeds and noise
        that they would have in one collector of them all.
    auto_register_policy_transforms : bool
        Add what a recurrent policy needs of its env where it is missing.  Row t holds the state that step t began with
        and, under `next`, the one it wrote (never in `compact`; in `exact` once, gathered when read).  `keep_keys` that
        name the state only store it at the root alone.
    recurrent_state_stride : int
        A recurrent state is kept in every so many rows of an episode, in its first one and in the first ones of a
        batch, and not under `next`; all other rows read NaN. Slices of a replay buffer begin at any row all the same:
        the state there is computed from the last kept one.

    Attributes
    ----------
    env : EnvBase
        What is stepped, with the transforms that options and policy asked for.
    frames_per_batch, total_frames, init_random_frames
        As above; each may be changed between two batches.

    Raises
    ------
    ArgumentError
        Options that do not fit together.
    EnvError, NumericsError
        While collecting: a broken step contract, a policy output that is not finite.
    """

    fast = True
    env: EnvBase

    @_taking(CollectorOptions.__init__)
    def __init__(self, *given: Any, **options: Any) -> None:
        s = CollectorOptions(*given, **options)
        super().__init__(s)
        self._options = dataclasses.replace(s, replay_buffer=None)  # an attribute holds it, and may let go of it
        self.frames_per_batch, self.total_frames = s.frames_per_batch, s.total_frames
        self.init_random_frames = s.init_random_frames or 0
        self.reset_at_each_iter, self.set_truncated = s.reset_at_each_iter, s.set_truncated
        # [N, T, 1] of the last batch, where transforms or `set_truncated` change what the env gave
        self._raw_reward: np.ndarray | None = None
        self._raw_done: np.ndarray | None = None
        self.update_at_each_batch = s.update_at_each_batch
        self._models = ActingModels(s.weights_swap)
        self._weights = Publisher(self._models)
        self._trained = self._acting = policy = s.make_policy()  # what acts may become a copy of what was given

        with contextlib.ExitStack() as undo:
            env = s.create_env_fn
            if not isinstance(env, EnvBase) or s.create_env_kwargs:
                env = make_env(env, s.create_env_kwargs)
                undo.callback(env.close)  # if anything fails, nobody else can close what was made here
            self.env, self.delta, self.next_obs = with_transforms(env, policy, s)
            self.batched = bool(self.env.batch_size)
            self.placement = place(s, self.env.device, policy)
            self.seed = drawn_seed() if s.seed is None else s.seed
            self._path = array_path(self.env)
            self.vec_env = self._path[0]
            if s.first_lane or s.all_lanes is not None:
                s.check_lanes(self.vec_env.n)
            self._check: Callable[[], object] | None = None
            self._looked = False  # at what the env shows
            self._made: Rollout | None = None
            self._connect()
            if s.seed is not None or self.vec_env.run_seed is None:
                self.vec_env.seed(self.seed, every_episode=s.episode_seeds, first_lane=s.first_lane, total=s.all_lanes)
            undo.pop_all()

    def _connect(self) -> None:
        """Put together the parts that are stepped, from what the env is known to show."""
        self._wired = wired = wire(
            self.env, self._path, self._acting, self.placement, self._options,
            mode=self.next_obs, delta=self.delta, random_frames=self.init_random_frames,
        )  # fmt: skip
        self._models.connect(POLICY, self._trained, wired.own)
        self._acting, self.policy = wired.own, wired.policy
        self.is_copy = wired.own is not self._trained
        if self._made is not None:
            self._made.connect(wired)

    @property
    def _engine(self) -> Rollout:
        """Return what takes the steps: its memory is made with the first batch."""
        if self._made is None:
            from rlcli.collectors.rollout import Rollout, TorchStream

            seed = self._options.process_seed(self.seed)
            stream = TorchStream(seed, self.placement.policy, shared=lambda: self.background.mine)
            adopting = self._models.adopting if self.weights_swap == "step" else None
            self._made = Rollout(
                self._wired, self._options, seed=self.seed, stream=stream, legs=self._leg, adopting=adopting,
                empty=column_memory(self.placement),
            )  # fmt: skip
        return self._made

    # ---- iteration ---------------------------------------------------------------------------------------------
    @property
    def frames_in_batch(self) -> int:
        return steps_of(self.frames_per_batch, self.vec_env.n) * self.vec_env.n

    def steps_left(self) -> int:
        return next_steps(self.frames_per_batch, self.total_frames, self.vec_env.n, self.frames)

    def rollout(self, steps: int | None = None) -> TensorDictBase:
        """Collect one raw batch; `deliver` makes of it what a consumer is to get.

        Parameters
        ----------
        steps : int, optional
            Steps per env; those of a full batch by default.
        """
        usual = steps_of(self.frames_per_batch, self.vec_env.n)
        return self._stepped(usual if steps is None else arguments.count("steps", steps, None), False).raw

    def _collect(self, steps: int, timed: bool) -> Delivered:
        if getattr(self.rollout, "__func__", None) is Collector.rollout:
            return self._stepped(steps, timed)
        from rlcli.collectors.finish import Delivered

        batch = self.rollout(steps)  # of a subclass, which may have made another batch of ours
        raw = {REWARD: self._raw_reward, DONE: self._raw_done}
        reward, done = (_array(batch.get(key, None)) if x is None else x for key, x in raw.items())
        return Delivered(batch, reward, done)

    def _stepped(self, steps: int, timed: bool) -> Delivered:
        filled = self.fill(steps, timed=timed, moves=self.delta is None)
        batch = filled.assembled(batched=self.batched, delta=self.delta)
        if (storing := self.placement.storing) is not None and self.placement.storing_is_elsewhere:
            batch = filled.moved(batch, storing, non_blocking=self.placement.non_blocking)
            if not self.placement.non_blocking:
                synchronize(storing)
        elif storing is not None:
            batch = batch.to(storing)  # only says so
        return filled.delivered(batch)

    def fill(self, steps: int, *, random_steps: int | None = None, timed: bool = False, moves: bool = False) -> Filled:
        """Take so many steps of each env; what they left, to be `assembled` to a batch.

        Parameters
        ----------
        random_steps : int, optional
            How many of them, the first, take random actions; by default those that `init_random_frames` asks for.
        moves : bool
            Whether it is then `moved`: columns that its device holds already need not be in host memory, too.
        """
        self._before_batch()
        if self.pre_collect_hook is not None:
            called("pre_collect_hook", self.pre_collect_hook)
            self._refuse_closed()
        if self.reset_at_each_iter:
            self._begin_episodes()
        if steps < 1:
            raise ArgumentError("a batch has at least one step", why=f"got {steps}")
        left = max(0, self.init_random_frames - self.frames) if random_steps is None else random_steps * self.vec_env.n
        self.look(left)
        if left and not self._options.init_random_frames:
            refuse_random_now(self.env, self.vec_env, self._wired.actor)
        self._models.begin()
        try:
            filled = self._engine.collect(steps, min(steps, steps_of(left, self.vec_env.n)), timed, moves)
        finally:
            self._models.end()
        columns, self._raw_reward = filled.columns, filled.raw_reward
        done = self._flag_last_step(filled)
        if POLICY_VERSION in columns:
            columns[POLICY_VERSION][:] = self._models.versions(*columns[POLICY_VERSION].shape)
        self.frames += math.prod(filled.shape)
        return dataclasses.replace(filled, done=done)

    def interrupt_by(self, check: Callable[[], object]) -> None:
        self._check = check
        self.vec_env.interrupt_by(check)  # one of its workers may hang in a step

    def _leg(self, first: int, last: int) -> Iterable[int]:
        """Return the steps to take; raise between two of them what `interrupt_by` was given raises."""
        return range(first, last) if self._check is None else self._checked(self._check, range(first, last))

    @staticmethod
    def _checked(check: Callable[[], object], steps: range) -> Iterator[int]:
        for t in steps:
            check()
            yield t

    def look(self, random_frames: int) -> None:
        """Before the first batch: an env of the user's may show other than its specs say."""
        if not self._looked:
            with self._engine.drawing(random_frames):
                differs = self.vec_env.look()
            if differs:
                self._connect()
        self._looked = True

    def _flag_last_step(self, filled: Filled) -> np.ndarray | None:
        """Apply `set_truncated`; return the ends as the env gave them."""
        columns, done = filled.columns, filled.columns.get(DONE)
        if not self.set_truncated:
            return done
        self._raw_done = None if done is None else done.copy()
        for key in (TRUNCATED, DONE):
            filled.there.pop(key, None)
            if key in columns:
                columns[key][:, -1] = True
        return self._raw_done

    # ---- what there is to know -----------------------------------------------------------------------------------
    @property
    def schema(self) -> RowSchema:
        return self._wired.schema if self._made is None else self._made.schema

    def rows(self, lanes: int = 1, steps: int = 1) -> RowSchema:
        return self.schema.rows(self.env, lanes, steps)

    @property
    def processes(self) -> WorkerGroup | None:
        return getattr(self._innermost(), "group", None)

    @property
    def restarts(self) -> list[tuple[int, int]]:
        return list(getattr(self._innermost(), "restarts", ()))

    def _innermost(self) -> Any:
        """Return the `VecEnv` of the env within all transforms; None where it has none."""
        env = self.env
        while isinstance(env, TransformedEnv):
            env = env.base_env
        return getattr(env, "vec_env", None)

    @property
    def envs(self) -> int:
        return self.vec_env.n

    @property
    def bounds(self) -> Bounds:
        """Bounds of the observations, with what was outside of them."""
        return self.vec_env.bounds

    def out_of_bounds(self) -> list[tuple[str, str, int]]:
        return self.vec_env.bounds.news()

    def faces(self) -> list[Face]:
        """Say which parts run on columns and which on TensorDicts, and why: env, transforms, policy, noise.

        An env of tensordicts is looked at before the first batch: what it shows then may change how its policy runs.
        """
        from rlcli.collectors.faces import faces_of

        return faces_of(self.env, self._wired)

    def figures(self) -> dict[str, Any]:
        """Return figures for a closing report.

        `out_of_bounds`: of each observation key that left its declared bounds how often, and the worst value; with
        `next_obs="delta"`, `delta`: what rounding differences cost; `env_workers`: where processes that step envs were
        replaced, how often each was, and how many frames that has lost.
        """
        figures: dict[str, Any] = {"out_of_bounds": self.vec_env.bounds.figures()}
        if any(times for times, _ in self.restarts):
            figures["env_workers"] = [{"restarts": times, "lost_frames": lost} for times, lost in self.restarts]
        return figures if self.delta is None else figures | {"delta": self.delta.figures()}

    # ---- episodes ----------------------------------------------------------------------------------------------
    @property
    def episodes(self) -> list[int]:
        return list(self.vec_env.episodes)

    def limit_episodes(self, steps: int) -> bool:
        """Truncate the episodes that begin from now on after so many steps; False where envs cannot be cut short."""
        if self.vec_env.resets_running_lanes:
            self._engine.limit = steps
            self.vec_env.limit_frames(steps)
        return self.vec_env.resets_running_lanes

    def remember_episodes(self, longest: int) -> bool:
        """Keep the actions of open episodes, so that `load_state_dict` can replay them.

        Parameters
        ----------
        longest : int
            Steps of the longest episode that is remembered; 0 remembers none.

        Returns
        -------
        bool
            False where replaying gives another episode, and nothing is remembered.
        """
        if "background" in vars(self):
            self.background.refuse()
        if not longest:
            return False
        self._begin_episodes()
        with watching(self.vec_env):
            replayable = self.vec_env.is_replayable()
        if not replayable:
            return False
        self.vec_env.history_limit = longest
        return True

    # ---- in the background -------------------------------------------------------------------------------------
    def start(self) -> None:
        """Collect in a thread, writing to the replay buffer, until `async_shutdown` or the end of `with`.

        From here on the policy that acts is a copy with tensors of its own, where it was not one before: what trains
        the given module in place is not seen until `update_policy_weights_` publishes it, one whole version at a time.
        `collector.policy` is that copy; what its modules keep beside tensors (counters, caches) is the copy's own too,
        while functions see what they close over.  A policy that is no module, or cannot be copied (a warning says so),
        goes on acting itself.  So does what an env, a transform or a hook works with: give it a copy of the trained
        model and register both, `register_model(name, module, used)`; what is registered without `used`, or not at
        all, is read while it is trained.
        """
        super().start()

    def _part(self) -> None:
        if isinstance(self._acting, nn.Module) and not self.is_copy:
            given = self._acting
            try:
                self.policy, self._acting = own_copy((self.policy, given))
            except NOT_COPIED as error:
                warnings.warn(
                    f"the policy acts on the very tensors that are trained: it cannot be copied ({in_words(error)})",
                    stacklevel=4,
                )
            else:
                self.is_copy = True
                self._wired.actor.act_with(self.policy)
                self._models.connect(POLICY, given, self._acting)
        self._models.apart = True

    # ---- weights, seeds, end -----------------------------------------------------------------------------------
    @property
    def weights_swap(self) -> str:
        """Where weights that are published while a batch is collected begin to act: "rollout" or "step"."""
        return self._models.swap

    def register_model(self, name: str, module: nn.Module, used: nn.Module | str | None = None) -> None:
        """Keep a further model in step: `update_policy_weights_` copies `module`'s weights into `used` as well.

        Parameters
        ----------
        name : str
            Of the model; registering it again replaces it.
        module : nn.Module
            What is trained.
        used : nn.Module or str, optional
            The copy that an env, a transform or a hook works with, or its place from here on, "env.reward_model";
            without one, they use `module` itself, nothing needs copying, and in the background they read it while it
            is trained.
        """
        self._weights.register(name, module, self.model(used) if isinstance(used, str) else used)

    def model(self, path: str) -> nn.Module:
        """Return the module that acts: the "policy", a registered model's, or another from here on, "env.reward".

        Where the policy is no module, there is nothing to keep in step: an empty one.

        Raises
        ------
        ArgumentError
            There is nothing, or no module.
        """
        if path in self._models.used:
            value = self._models.used[path]
            return value if isinstance(value, nn.Module) else nn.Module()
        try:
            value = operator.attrgetter(path)(self)
        except AttributeError as error:
            value, why = None, in_words(error)
        else:
            why = f"it is a {type(value).__name__}"
        if not isinstance(value, nn.Module):
            raise ArgumentError(
                f"no model is at '{path}'", why=why, fix="Give its place from the collector on: 'env.reward_model'."
            )
        return value

    def follow(self, receiver: ModelsReceiver) -> None:
        """Take weights over from another process, where those of a publication would be."""
        self._models.follow(receiver)

    def _begin_episodes(self) -> None:
        if self._made is not None:
            self._made.begun = False

    def _seed(self, seed: int, episode_seeds: bool) -> None:
        self._engine.reseed(seed)
        s = self._options
        self.vec_env.seed(seed, every_episode=episode_seeds, first_lane=s.first_lane, total=s.all_lanes)

    # ---- checkpoints -------------------------------------------------------------------------------------------
    def _state(self) -> dict[str, Any]:
        return {"engine": self._engine.state_dict()}

    def load_state_dict(self, state: dict[str, Any], *, replay: bool = True) -> list[int]:
        """Continue where `state_dict` was taken; call `set_seed` with the run's seed first.

        Returns
        -------
        list of int
            The lanes whose env could not be brought back exactly: each begins a new episode, under a new id.
        """
        self.background.refuse()
        if "lanes" in state["engine"]:  # before all other resets: the first one decides what is loaded into
            self.look(0)
        self.frames = int(state["frames"])
        self._weights.restart_at(int(state["policy_version"]))
        if self.trajectories is not None:
            self.trajectories.load_state_dict(state["trajectories"], self.placement.storing)
        return self._engine.load_state_dict(state["engine"], replay=replay)

    def begin_anew(self, frames: int, taken: Iterable[int] = (), episodes: Iterable[int] = ()) -> None:
        """Go on as if `frames` were collected, with new episodes in all lanes; what was open is given up.

        Parameters
        ----------
        taken : iterable of int
            Ids that no new trajectory may get, beside those that this collector has given.
        episodes : iterable of int, one a lane
            Numbers up to which no new episode may be counted: its seed follows from its number.
        """
        self.background.refuse()
        self.frames = frames
        self._begin_episodes()
        for lane, number in enumerate(episodes):
            self.vec_env.episodes[lane] = max(self.vec_env.episodes[lane], number)
        ids = self._engine.ids
        ids.restart_at(max([ids.next_id - 1, *taken]) + 1)

    def _close(self) -> None:
        super()._close()
        if not self.env.is_closed:
            self.env.close()


def drawn_seed() -> int:
    """Return a seed from torch's global stream, so that `torch.manual_seed` covers collectors too."""
    return int(torch.randint(0, 2**62, ()))


def _array(column: torch.Tensor | None) -> np.ndarray | None:
    return None if column is None else column.detach().cpu().numpy().reshape(-1, *column.shape[-2:])


DataCollector = SyncDataCollector = Collector  # older spellings
