"""An env that only knows TensorDicts as a `VecEnv`: stepped as it is, its outputs copied into rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from rlcli.arguments import refuse
from rlcli.envs import EnvBase, TransformedEnv
from rlcli.envs.base import next_of, own_methods, root_of
from rlcli.envs.late_columns import LateColumns
from rlcli.envs.serial import BatchedEnv, transforms_within
from rlcli.envs.spaces import action_format, spec_bounds
from rlcli.errors import EnvError
from rlcli.keys import ACTION, END_FLAGS, NEXT, RESET, REWARD, Key, as_tuple, show, under_next, unravel
from rlcli.specs import Unbounded
from rlcli.specs.base import as_field
from rlcli.specs.field import Field
from rlcli.transforms import RunningNorm
from rlcli.vec_envs.bounds import Bounds
from rlcli.vec_envs.episodes import broken, env_raised, place_of
from rlcli.vec_envs.observations import check_name
from rlcli.vec_envs.vec_env import NONE, Outcome, VecEnv


class TensorDictVecEnv(VecEnv):
    """Step an `EnvBase` of batch size `()` or `(N,)` through `step` and `reset`, as `EnvBase.rollout` does."""

    on_tensordicts = True

    def __init__(self, env: EnvBase, *, keeps_rewards: bool = True) -> None:
        self.keeps_rewards, dims = keeps_rewards, len(env.batch_size)
        transformed = isinstance(env, TransformedEnv) and not own_methods(env)
        base = env.base_env if transformed else env  # type: ignore[attr-defined]
        below = getattr(base, "vec_env", None) if transformed and not own_methods(base) else None
        self.below = below  # seeded one by one
        refuse(
            dims > 1, "a collector steps envs of batch size () or (N,)",
            why=f"{type(env).__name__} has {tuple(env.batch_size)}",
            fix="Put the single envs together in one SerialEnv.",
        )  # fmt: skip
        specs = [*env.full_observation_spec.items(True, True), *env.full_state_spec.items(True, True)]
        for key, _ in specs:
            check_name(as_tuple(key)[0])
        super().__init__(
            env.batch_size.numel() if env.batch_size else 1,
            name=type(env).__name__ if self.below is None else self.below.name,
            schema={unravel(key): Field(tuple(s.shape[dims:]), as_field(s).dtype) for key, s in specs},
            actions=action_format(env.action_spec, dims),
        )
        self.env, self._base = env, base
        self.bounds = Bounds(spec_bounds(env.full_observation_spec.items(True, True), dims), env.out_of_bounds)
        self.rewards: list[float] | None = [] if transformed else None
        # whose state nobody else saves, and whose scale stands still while a batch is collected
        self._within = dict(transforms_within(base))
        parts = (part for _, t in transforms_within(env) for part in t.modules())
        self._norms = [part for part in parts if isinstance(part, RunningNorm)]
        self._refreshed = 0  # steps that the scales know of
        if isinstance(base, BatchedEnv) and not own_methods(base) and base.bounds is not None:
            self.bounds, self.checks_bounds = base.bounds, True
        if below is not None:
            self.resets_running_lanes, self.step_timeout = below.resets_running_lanes, below.step_timeout
            self.bounds, self.checks_bounds = below.bounds, True
        self.run_seed = base.seeded_with
        self._env_seed: int | None = None  # until the env was given it
        self._acting: Any = None  # its `written` is all that it wrote in the last step, None where only actions
        self.late: LateColumns = LateColumns(self.n, self._refuse)
        self.held: set[Key] = set()  # what resets write and steps do not: it stays at the root
        # until the first step, what only the first reset has shown, and states, which steps need not write
        self._states = {unravel(key) for key in env.full_state_spec.keys(True, True)}
        self._undecided = set(self._states)
        self._flags: dict[str, torch.Tensor] = {}  # of the root
        self._shown: TensorDictBase | None = None  # by the first reset, until an episode begins with it

    def moved(self) -> Any:
        return super().moved(), self.below and self.below.moved()

    def act_by(self, actor: Any) -> None:
        self._acting = actor

    def carry(self, states: Sequence[Key]) -> None:
        self.states = [key for key in states if key in self.schema]

    def _refuse(self, what: str, why: str, fix: str) -> EnvError:
        return EnvError(f"the env's {what}", where=place_of(self, None), why=why, fix=fix or None)

    def seed(self, run_seed, *, every_episode=False, first_lane=0, total=None) -> None:
        """Seed all lanes at once, as `EnvBase.set_seed` does, where episodes cannot have seeds of their own."""
        self.run_seed, self.first_lane, self._total = run_seed, first_lane, total or self.n
        if self.below is None:
            self._env_seed = self._first_seed()
        else:
            self.below.seed(run_seed, every_episode=every_episode, first_lane=first_lane, total=total)

    def state_dict(self) -> dict[str, Any]:
        within = {name: transform.state_dict() for name, transform in self._within.items()}
        book = {"clock": self.clock[0], "started": list(self.started), "episodes": list(self.episodes)}
        return book | {"transforms": {name: state for name, state in within.items() if state}}

    def load_state_dict(self, state, *, replay):
        """Begin new episodes in all lanes, with a new seed: no such env can be brought back."""
        self.reopen(int(state["clock"]), state["started"], state["episodes"])
        for name, saved in state.get("transforms", {}).items():
            self._within[name].load_state_dict(saved)
        self._refreshed = self.clock[0]
        if self.run_seed is not None:
            self._env_seed = self.seed_of(0, max(self.episodes) + 1)
        return list(range(self.n))

    def _first_seed(self) -> int | None:
        return self.seed_of(0, 0) if self.first_lane else self.run_seed

    def seed_used(self, lane: int, episode: int) -> int | None:
        return self._first_seed() if self.below is None else self.below.seed_used(lane, episode)

    def _tensor(self, row: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(row)
        return tensor if self.env.batch_size else tensor[0]

    def _lanes_of(self, value: torch.Tensor) -> torch.Tensor:
        return value if self.env.batch_size else value[None]

    def _root(self, row: dict[Key, np.ndarray]) -> TensorDict:
        """Return the root of a step, in memory of its own."""
        td = TensorDict({}, batch_size=self.env.batch_size)
        for key, array in row.items():
            td.set(key, self._tensor(array).clone())
        return td.update(self.flags())

    def _write(self, row: dict[Key, np.ndarray], td, lanes: Sequence[int]) -> None:
        for key, array in row.items():
            value = td.get(key, None)
            if value is None:
                raise EnvError(
                    f"the env did not write '{show(key)}'", where=self.name, why="its spec promises it",
                    fix="Write it at every step and reset, or take it out of the specs.",
                )  # fmt: skip
            target = self._tensor(array)
            if value.shape != target.shape or value.dtype is not target.dtype:
                raise EnvError(
                    f"the env's {show(key)} differs from its spec", where=self.name,
                    why=f"expected {tuple(target.shape)} {target.dtype}, got {tuple(value.shape)} {value.dtype}",
                )  # fmt: skip
            got = value.detach().cpu().numpy()
            array[list(lanes)] = got.reshape(array.shape)[list(lanes)]

    def flags(self) -> dict[str, torch.Tensor]:
        """Return copies of the root's end flags."""
        return {name: flag.clone() for name, flag in self._flags.items()}

    def look(self) -> bool:
        """Reset for the first time; return True if that shows other keys, shapes or dtypes than specs say."""
        self._shown = td = self._first_reset()
        dims = len(self.env.batch_size)
        declared = self.schema
        leaves = {unravel(key): value for key, value in td.exclude(*END_FLAGS, NEXT, RESET, ACTION).items(True, True)}
        shown = {key: as_field(Unbounded(tuple(x.shape[dims:]), x.dtype)) for key, x in leaves.items()}
        self.schema = {key: shown.get(key, kind) for key, kind in declared.items()} | shown
        for key in self.schema:
            if self.schema[key] != declared.get(key):
                self.bounds.intervals.pop(key, None)
        self._undecided = (self.schema.keys() - declared.keys()) | self._states
        return self.schema != declared

    # ---- resets --------------------------------------------------------------------------------------------------
    def restart(self, row, lanes) -> None:
        if len(lanes) < self.n and self._flags and self._env_seed is None:
            self._reset_some(row, lanes)
        else:
            shown, self._shown = self._shown, None
            self._begin(row, lanes, self._first_reset() if shown is None or self._env_seed is not None else shown)

    def _first_reset(self) -> TensorDictBase:
        if self._env_seed is not None:
            self._call("set_seed", self._env_seed)
            self._env_seed = None
        return self._call("reset")

    def _reset_some(self, row: dict[Key, np.ndarray], lanes: Sequence[int]) -> None:
        root = self._root(row)
        mask = torch.zeros(self.n, dtype=torch.bool)
        mask[list(lanes)] = True
        root.set(RESET, mask.reshape(*self.env.batch_size, 1))
        self._begin(row, lanes, self._call("reset", self._placed(root)))

    def _begin(self, row: dict[Key, np.ndarray], lanes: Sequence[int], shown: TensorDictBase) -> None:
        self._write(row, shown, lanes)
        self._flags = {name: shown.get(name).clone().cpu() for name in END_FLAGS}
        self.begin_episodes(lanes)

    def _placed(self, td: TensorDict) -> TensorDict:
        return td if self.env.device is None else td.to(self.env.device)

    def _call(self, name: str, *arguments) -> Any:
        """Return what the env's method returned, `next` of `step`; name env, step and seed in what it raises."""
        lane, self.during = None if self.env.batch_size else 0, name
        each_step = [norm.refresh_each_step for norm in self._norms]
        for norm in self._norms:
            norm.refresh_each_step = False
        try:
            out = getattr(self.env, name)(*arguments)
            if name == "set_seed":
                return out
            return next_of(self.env, out) if name == "step" else root_of(self.env, out)
        except EnvError as error:
            error.where = error.where or place_of(self, lane)
            raise
        except BaseException as error:  # SystemExit too
            raise env_raised(self, error, lane, name) from error
        finally:
            for norm, before in zip(self._norms, each_step, strict=True):
                norm.refresh_each_step = before

    def take_outcome(self) -> Outcome:
        if self.clock[0] != self._refreshed:  # the batch is over: resets alone do not change a scale
            self._refreshed = self.clock[0]
            for norm in self._norms:
                if not norm.frozen:
                    norm.refresh()
        return super().take_outcome()

    # ---- steps ---------------------------------------------------------------------------------------------------
    def bind(self, rows) -> tuple[Callable, Callable]:
        def step(t: int, actions) -> Sequence[int]:
            now = self.clock[0] = self.clock[0] + 1
            root = {key: arrays[t] for key, arrays in rows.items()}
            following = self._call("step", self._acted(root, rows, t, actions))
            self._check_states(following, rows, t)
            if self._undecided:
                left = self._undecided.difference(self.states)
                self.held = {key for key in left if following.get(key, None) is None}
                self._undecided = set()
            for key in self.held:
                rows[key][t + 1][...] = rows[key][t]
            after = {key: arrays[t + 1] for key, arrays in rows.items() if key not in self.held}
            self._write(after, following, range(self.n))
            reward = following.get("reward", None)
            rewards = self._each("reward", reward)
            if self.rewards is not None:
                self.rewards, rewards = rewards, self._each("reward", self.env.own_reward)  # type: ignore[attr-defined]
            self.outcome.rewards += rewards
            terminated = self._each("terminated", following.get("terminated"))
            truncated = self._each("truncated", following.get("truncated"))
            done: Sequence[int] = NONE
            for lane in range(self.n):
                cut = truncated[lane] or now >= self.deadlines[lane]
                if terminated[lane] or cut:
                    self.outcome.ends.append((t, lane, terminated[lane], cut))
                    if info := getattr(self._base, "infos", {}).get((0, lane)):
                        self.outcome.infos[t, lane] = info
                    done = [*done, lane]
            self._keep(t, following)
            return done

        def reset(t: int, lanes: Sequence[int]) -> None:
            over = list(lanes)
            self._lanes_of(self._flags["done"])[over] = True  # an episode may have been cut from outside
            self._lanes_of(self._flags["truncated"])[over] |= ~self._lanes_of(self._flags["terminated"])[over]
            self._reset_some({key: arrays[t + 1] for key, arrays in rows.items()}, lanes)

        return step, reset

    def _acted(self, root: dict[Key, np.ndarray], rows, t: int, actions) -> TensorDict:
        """Return the argument of the env's `step`: the root, and all that was written by what acts."""
        td = self._root(root)
        written = None if self._acting is None else self._acting.written
        if written is None:
            td.set(ACTION, self._stored(actions))
        else:
            td = written.clone(False).update(td)
        for key in self.states:
            td.set(under_next(key), self._tensor(rows[key][t + 1]).clone())
        return self._placed(td)

    def _check_states(self, following, rows, t: int) -> None:
        for key in self.states:
            got = following.get(key, None)
            if got is not None and not torch.equal(got.cpu(), self._tensor(rows[key][t + 1])):
                raise EnvError(
                    f"the policy writes next.{show(key)}, which the env writes too", where=self.name,
                    why="one of the two would be lost", fix="Give the policy's state a name of its own.",
                )  # fmt: skip

    def _keep(self, t: int, following: TensorDictBase) -> None:
        """Keep what a step wrote and no reset does, in columns of its own; the root's flags, if they say something."""
        for name in END_FLAGS:  # a reset may say that an episode is over before it began
            self.late.mark(t, name, self._lanes_of(self._flags[name]))
        self._flags = {name: following.get(name).clone().cpu() for name in END_FLAGS}
        beside = following.exclude(*(self.schema.keys() - self.held), *END_FLAGS, "reward").cpu()
        late: dict[Key, torch.Tensor] = {
            under_next(key): self._lanes_of(value) for key, value in beside.items(True, True)
        }
        reward = following.get("reward")
        if self.keeps_rewards and reward.dtype is not torch.float32:
            late[REWARD] = self._lanes_of(reward).cpu()
        self.late.write(t, late)

    def _each(self, name: str, value: torch.Tensor | None) -> list:
        """Return one number a lane, of what the env wrote beside observations."""
        if value is None or value.numel() != self.n:
            got = "nothing" if value is None else f"shape {tuple(value.shape)}"
            raise broken(
                self, f"the env's {name} is not one number a step", lane=None if self.env.batch_size else 0,
                expected=f"shape {(*self.env.batch_size, 1)}", got=got,
                fix=f"Write one {name} an env, and what else there is under keys of its own.",
            )  # fmt: skip
        return value.reshape(-1).tolist()

    def _stored(self, actions) -> torch.Tensor:
        shape, dtype = self.actions.stored
        stored = np.empty((self.n, *shape), dtype)
        self.actions.store(np.asarray(actions), stored)
        spec = self.env.action_spec
        return torch.from_numpy(stored).reshape(spec.shape).to(spec.dtype)

    def close(self) -> None:
        self.env.close()
