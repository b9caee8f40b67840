"""Envs in worker processes: the parent writes actions into shared memory, workers the rest.

The lanes are dealt out in shards (`shard.py`); the caller may step the first of them itself, straight into the batch's
rows. Nothing of a step is pickled, but for rewards that the shared array cannot hold as they are, and an order is a
number in shared memory (`rlcli.processes.line`). The episode book is kept on both sides, by the same code;
at a reset, this one decides. So all that is stepped, refused and saved is what one process would give; only lanes after
one that raised have gone one step further.

Where a reset is sure to follow the end of an episode (`resets_follow`), a shard calls it within the order to step, and
keeps what came of it until it is asked for: a step that ends episodes costs no second order.

A worker that is lost may be replaced. Where its lanes stood is lost with it: the step that it did not answer is
truncated, with no reward and with the observation before it as the one after it, and new episodes begin.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from rlcli import arguments
from rlcli.errors import ArgumentError, EnvError
from rlcli.keys import Key
from rlcli.processes.channel import packed
from rlcli.processes.group import WorkerGroup
from rlcli.processes.line import may_spin
from rlcli.processes.region import Region
from rlcli.processes.replacing import Lost, Owner
from rlcli.processes.watchdog import ENDED_BY, say
from rlcli.processes.worker import Worker
from rlcli.vec_envs import shard
from rlcli.vec_envs.episodes import broken, named, place_of
from rlcli.vec_envs.replay import ReplayableVecEnv
from rlcli.vec_envs.vec_env import NONE
from rlcli.vec_envs.workers import shared_out

_TRIES = {"is_replayable": "a trial run", "load_state_dict": "a replay"}  # of episodes, by many steps each
_OF_LANES = ("started", "episodes", "fingerprints")  # of a saved state: one entry a lane


class ParallelVecEnv(ReplayableVecEnv, Owner):
    """Step gymnasium envs in worker processes, perhaps some in this one; see `ParallelEnv`."""

    own: shard.Shard | None = None
    fix = "Fix the cause; env.mode=serial shows it in one process."
    _tried: Any = None  # shared, one number a worker: how far it has come in a try or a replay

    def __init__(
        self, recipes: Sequence[bytes], *, workers: int | None = None, per_worker: int | str | None = None,
        caller_steps: bool | None = None, step_timeout: float | None = None, on_worker_error: str = "raise",
        start_method: str = "forkserver", categorical: bool = False, narrow: bool = False,
        out_of_bounds: str = "count", first: gym.Env | None = None,
    ) -> None:  # fmt: skip
        arguments.seconds("step_timeout", step_timeout)
        self.n, self.name, self.clock = len(recipes), "env", [0]  # until the envs say more
        # env indices of each process; the caller's (`own`) come first
        self.parts, caller_steps = shared_out(self.n, workers, per_worker, caller_steps, on_worker_error)
        self._beside = int(caller_steps)  # parts that are no worker's
        self._apart = self.parts[0].stop if caller_steps else 0  # lanes that are no worker's
        forms = {"categorical": categorical, "narrow": narrow, "out_of_bounds": out_of_bounds}
        self._built = [(recipes[part.start : part.stop], part.start, forms) for part in self.parts]
        workers = len(self.parts) - self._beside
        # of each worker: how often it was replaced, and how many steps that lost
        self.restarts = [(0, 0)] * workers
        self._fallen: set[int] = set()  # workers whose lanes are in no episode, since they are new
        self.step_timeout = None  # until all is made
        start = partial(Worker, shard.TARGET, start_method=start_method, preload=[shard.TARGET.partition(":")[0]])
        self.group = WorkerGroup(start, workers, owner=self, on_error=on_worker_error)
        try:
            answers = self._build(first)
            observation_space, action_space = self.spaces = answers[0]["spaces"]
            super().__init__(
                self.n, name=self.name, observation_space=observation_space, action_space=action_space,
                categorical=categorical, narrow=narrow, out_of_bounds=out_of_bounds,
                limits=[n for each in answers for n in each["limits"]],
            )  # fmt: skip
            self.heavy = sorted({name for each in answers for name in each.get("heavy", ())})
            self._region = Region(shard.memory_of(self.n, workers, self.schema, self.actions))
            self.group.set_up("share", ParallelVecEnv._share)
        except BaseException:
            self.close()
            raise
        arrays = self._region.arrays
        if self.own is not None:
            self.own.vec_env.leaves, self.own.vec_env.tried = self.leaves, self.tried
            self.own.attach(arrays)
        self._shared = {key: arrays["row", key][self._apart :] for key in self.schema}
        self._actions, self._rewards, self._flags = arrays["actions"], arrays["rewards"], arrays["flags"]
        self._chosen, self._book, self._seeds = arrays["chosen"], arrays["book"], arrays["seeds"]
        self._firsts = {key: arrays["first", key] for key in self.schema}
        self._tried = arrays["tried"]
        for place, leaf in enumerate(self.leaves):
            self.bounds.rounded[leaf.key] += list(arrays["rounded"][:, place])
        self._none = bytes(self.n)  # the flags of a step in which nothing ends
        self._limit: int | None = None  # as the shards know it
        self.step_timeout = step_timeout
        if self.group.goes_on:  # rows that were shown are kept from a torn write
            self._last = {key: shared.copy() for key, shared in self._shared.items()}
        else:
            self._region.forget_fd()  # no new worker is to have the memory too

    def _build(self, first: gym.Env | None) -> list[dict[str, Any]]:
        """Make the envs, here and in the workers; what they say of themselves."""

        def build(self: ParallelVecEnv, only: Sequence[int]) -> list[Any]:
            each = [self._built[self._beside + index] for index in only]
            self.group.send(shard.CALL, [packed(("build", one, {})) for one in each], only=only)
            if self._beside:
                self.own = shard.Shard(*self._built[0], first)
            return self.group.answers()

        answers = self.group.set_up("build", build)
        if self.own is not None:
            answers.insert(0, shard.described(self.own))
        self.name = answers[0]["name"]
        for part, other in zip(self.parts, answers, strict=True):
            if other["spaces"] != answers[0]["spaces"]:
                raise broken(
                    self, "the envs differ in their spaces", lane=part.start, expected=answers[0]["text"],
                    got=other["text"], place=named(self, part.start),
                )  # fmt: skip
        return answers

    def _share(self, only: Sequence[int]) -> list[Any]:
        """Put some workers' shards on the region of memory."""
        cells, workers = self._region.arrays["cells"], len(self.group)
        spins = may_spin(1 + workers)
        for index in only:
            cells[index] = 0
        calls = [packed(("share", (self.n, workers, index, spins), {})) for index in only]
        self.group.send(shard.CALL, calls, only=only, attachments=[self._region.fd])
        self.group.open_lines(cells, only, spins)
        return self.group.answers()

    # ---- the shards ----------------------------------------------------------------------------------------------
    def refusal(self, lost: Lost) -> Exception:
        if not self.group.is_open:
            return ArgumentError("the env is closed", where=f"env {self.name}", fix="Make a new one.")
        place = self._place_of(lost.index)
        if lost.late is not None:
            return EnvError(
                f"no answer for {lost.late:g} s", where=place,
                why=f"{self.during} has not returned in its worker process",
                fix="Fix the env, or allow more time: env.step_timeout=...",
            )  # fmt: skip
        killed = "SIGKILL" in lost.how
        return EnvError(
            f"a worker process {lost.how}", where=place,
            why="its envs were lost" + ("; the machine may be out of memory" if killed else ""),
            fix=("Use a smaller env.num or env.workers, or debug" if killed else "Debug")
            + " the env in one process: env.mode=serial env.workers=null.",
        )  # fmt: skip

    def _each(self, name: str, given: Callable[..., dict[str, Any]] = lambda *_: {}, *, kept: bool = False) -> list:
        """Call a method of each shard's envs, with the arguments of its place, and return the answers; see `set_up`."""
        mine: list[Any] = []

        def call(self: ParallelVecEnv, only: Sequence[int]) -> list[Any]:
            bodies = [packed((name, (), given(self, self._beside + index))) for index in only]
            self.group.send(shard.CALL, bodies, only=only)
            if self.own is not None:
                mine.append(getattr(self.own.vec_env, name)(**given(self, 0)))
            return self.group.answers()

        with self.doing(_TRIES.get(name, name)):
            answers = self.group.set_up(name, call, replaces=True) if kept else self.group.call(call, replaces=True)
        return mine + answers

    # ---- what the group asks of each worker ----------------------------------------------------------------------
    def place(self, index: int) -> str:
        return f"the worker of {self._place_of(index)}"

    def _place_of(self, index: int) -> str:
        return place_of(self, self.parts[self._beside + index])

    def progress(self, index: int, turn: int) -> object:
        return turn, None if self._tried is None else int(self._tried[index])

    def stands_still(self, index: int, seconds: float) -> None:
        if self._tried is not None:  # else the envs are being made
            why = f"{self.during} has not returned in its worker process"
            say(f"no answer for {seconds:.0f} s ({self._place_of(index)}): {why}; still waiting ({ENDED_BY})")

    def collected(self, index: int) -> int:
        return self.clock[0] * len(self.parts[index]) - self.restarts[index][1]

    def replaced(self, index: int, why: str) -> None:
        warnings.warn(f"{why}; restarted, its open episodes are dropped", stacklevel=2)
        self.restarts[index] = self.restarts[index][0] + 1, self.restarts[index][1]
        self._fallen.add(index)

    def moved(self) -> Any:
        return super().moved(), self.group.looks  # who waits for a worker looks after it

    def close(self) -> None:
        self.group.close()
        if hasattr(self, "_region"):
            self._region.forget_fd()
        if self.own is not None:
            self.own.vec_env.close()

    # ---- seeds and limits ----------------------------------------------------------------------------------------
    def seed(self, run_seed, *, every_episode=False, first_lane=0, total=None) -> None:
        super().seed(run_seed, every_episode=every_episode, first_lane=first_lane, total=total)
        alike = {"run_seed": run_seed, "every_episode": every_episode, "total": total or self.n}
        before = list(self.restarts)

        def given(self: ParallelVecEnv, place: int) -> dict[str, Any]:
            own = {**alike, "first_lane": first_lane + self.parts[place].start}
            new = self.group.goes_on and self.restarts[place][0] - before[place][0]  # workers since
            return own | {"before": new} if new else own

        self._each("seed", given, kept=True)

    def limit_frames(self, steps: int | None) -> None:
        super().limit_frames(steps)
        if steps != self._limit:
            self._each("limit_frames", lambda *_: {"steps": steps}, kept=True)
            self._limit = steps

    def keep_info(self, keys: Sequence[str]) -> None:
        super().keep_info(keys)
        self._each("keep_info", lambda *_: {"keys": keys}, kept=True)

    # ---- resets --------------------------------------------------------------------------------------------------
    def restart(self, row, lanes) -> None:
        own = self.own
        self._reset_into(row, lanes, lambda _, chosen: own.vec_env.restart(row, chosen), 0)  # type: ignore[union-attr]

    def _reset_into(self, row: dict[Key, np.ndarray], lanes: Sequence[int], reset: Callable, t: int) -> None:
        """Begin episodes; `reset(t, lanes)` is the caller's own lanes' way to do so."""
        own, book, chosen = self.own, self._book, [*lanes, *self._unready(lanes)]
        busy = [i for i, part in enumerate(self.parts[self._beside :]) if any(lane in part for lane in chosen)]
        try:
            self.group.settle()
            self.begin_episodes(chosen)
            self._chosen[:] = 0
            self._chosen[chosen] = 1
            book[:, 0], book[:, 1], book[:, 2] = self.episodes, self.clock[0], self.pending_seeds
            self.during = "reset"
            self.group.send(shard.RESET, only=busy)
            if own is not None and any(lane < self._apart for lane in chosen):
                own.reset(reset, t)
            self.group.answers()
            self._fallen.difference_update(busy)
            while new := self.group.replace_failed():
                busy = [index for index in new if index in busy]
                self.group.order(shard.RESET, only=busy)
                self._fallen.difference_update(i for i in busy if set(self.parts[i]) <= set(chosen))
            self.began(chosen)
        except Lost as lost:
            raise self.refusal(lost) from None
        finally:
            self.during = "step"
        elsewhere = [lane for lane in chosen if lane >= self._apart]
        for key, shared in self._shared.items() if elsewhere else ():
            row[key][elsewhere] = shown = shared[[lane - self._apart for lane in elsewhere]]
            if self.group.goes_on:
                self._last[key][elsewhere] = shown

    def _take_over(self, row: Sequence[tuple[np.ndarray, np.ndarray]], lanes: Sequence[int]) -> bool:
        """Say whether all of these envs were reset ahead, as they are to be now."""
        for lane in lanes:
            if not self._flags[lane] & shard.AHEAD or self._seeds[lane] != shard.numbered(self.next_seed(lane)):
                return False
        self.begin_episodes(lanes)
        self.began(lanes)
        if self.group.goes_on:
            row = [*row, *((self._last[key], first) for key, first in self._firsts.items())]
        for lane in lanes:
            self._flags[lane] = 0
            for shown, first in row:
                shown[lane] = first[lane]
        return True

    def _unready(self, lanes: Sequence[int]) -> list[int]:
        """List envs beside these that are in no episode, and whose worker begins some now."""
        parts = [self.parts[index] for index in self._fallen]
        return [lane for part in parts if any(i in part for i in lanes) for lane in part if lane not in lanes]

    def interrupt_by(self, check: Callable[[], object]) -> None:
        self.group.interrupt_by(check)

    # ---- the loop ------------------------------------------------------------------------------------------------
    def bind(self, rows) -> tuple[Callable, Callable]:
        columns = [(rows[key], shared) for key, shared in self._shared.items()]
        firsts = [(rows[key], first) for key, first in self._firsts.items()]
        clock, send, lanes, own = self.clock, self.actions.sender(), self, self.own
        group, apart = self.group, self._apart
        # the caller's lanes are the first: what their loop writes at `row[lane]` lies in the rows of all
        own_step: Any
        own_reset: Any
        own_step, own_reset = (None, None) if own is None else own.vec_env.bind(rows)

        def step(t: int, actions) -> Sequence[int]:
            clock[0] += 1
            lanes.history.append(send(actions))
            ahead = lanes.resets_follow and lanes.step_timeout is None  # steps and resets have that time each
            try:
                group.settle()
                lanes._actions[...] = actions
                group.send(shard.STEP_ON if ahead else shard.STEP, only=lanes._standing() if lanes._fallen else None)
                mine = own.step(own_step, t, actions[:apart], ahead) if own is not None else None
                others = group.answers()
            except Lost as lost:
                raise lanes.refusal(lost) from None
            if group.goes_on:
                others = lanes._without_fallen(others)
            for column, shared in columns:
                column[t + 1][apart:] = shared
            outcome = lanes.outcome
            if own is not None:
                others = [mine, *others]
            for part, answer in zip(lanes.parts, others, strict=True) if any(others) else ():
                if answer and (infos := answer.pop(shard.INFOS, None)):
                    outcome.infos |= {(t, part.start + lane): info for lane, info in infos.items()}
            if outcome.rewards or any(others):
                lanes._keep_apart(others)
            else:
                outcome.reward_rows.append(lanes._rewards.copy())
            if lanes._flags.tobytes() == lanes._none:
                return NONE
            done = np.flatnonzero(lanes._flags).tolist()
            for lane in done:
                flags = int(lanes._flags[lane])
                outcome.ends.append((t, lane, bool(flags & shard.TERMINATED), bool(flags & shard.CUT)))
            return done

        def reset(t: int, done: Sequence[int]) -> None:
            if not lanes._take_over([(column[t + 1], first) for column, first in firsts], done):
                lanes._reset_into({key: column[t + 1] for key, column in rows.items()}, done, own_reset, t)

        return step, reset

    def _standing(self) -> list[int]:
        """Return the workers whose lanes can be stepped."""
        return [index for index in range(len(self.parts)) if index not in self._fallen]

    def _without_fallen(self, others: list[Any]) -> list[Any]:
        """Replace failed workers after a step and truncate their envs; return the answers."""
        if self._fallen:
            given = dict(zip(self._standing(), others, strict=True))
            others = [given.get(index) for index in range(len(self.parts))]
        if self.group.failed:
            self.group.replace_failed()
        for index in self._fallen:
            part, (times, lost) = slice(self.parts[index].start, self.parts[index].stop), self.restarts[index]
            others[index], self._flags[part], self._rewards[part] = None, shard.CUT, 0.0
            for key, shared in self._shared.items():
                shared[part] = self._last[key][part]
            self.restarts[index] = times, lost + len(self.parts[index])
        for key, shared in self._shared.items():
            self._last[key][...] = shared
        return others

    def _keep_apart(self, others: Sequence[dict[int, Any] | None]) -> None:
        """Keep the rewards one by one: among those of this batch are some that an array cannot hold as they are."""
        outcome, rewards = self.outcome, self._rewards.tolist()
        for part, answer in zip(self.parts, others, strict=True):
            for lane, reward in (answer or {}).items():
                rewards[part.start + lane] = reward if isinstance(reward, int | np.ndarray) else _no_number(*reward)
        outcome.rewards += [reward for row in outcome.reward_rows for reward in row.tolist()] + rewards
        outcome.reward_rows.clear()

    # ---- checkpoints ---------------------------------------------------------------------------------------------
    def is_replayable(self) -> bool:
        return self.run_seed is not None and all(self._each("is_replayable"))

    def fingerprints(self) -> list[str]:
        return [each for answer in self._each("fingerprints") for each in answer]

    def load_state_dict(self, state, *, replay):
        history = self.take_history(state)
        states = [
            {name: state[name][part.start : part.stop] for name in _OF_LANES}
            | {"clock": state["clock"], "history": history[:, part.start : part.stop] if len(history) else history}
            for part in self.parts
        ]
        self.reopen(int(state["clock"]), state["started"], state["episodes"])
        answers = self._each("load_state_dict", lambda _, place: {"state": states[place], "replay": replay})
        self._fallen.clear()  # what was not brought back is to be reset
        lost = [part.start + lane for part, lanes in zip(self.parts, answers, strict=True) for lane in lanes]
        for lane in set(range(self.n)).difference(lost):
            self.mark_seeded(lane)
        return lost


def _no_number(shown: str, kind: str) -> Any:
    """Stand, in an error, for a reward that is no number, which need not be known here."""
    return type(kind, (), {"__repr__": lambda self: shown})()
