"""Envs in worker processes: the parent writes actions into shared memory, workers the rest.

The lanes are dealt out in shards (`shard.py`); the caller may step the first of them itself, straight into the batch's
rows. Nothing of a step is pickled, but for actions and rewards that the shared arrays cannot hold as they are, and an
order is a number in shared memory (`rlcli.processes.line`). The episode book is kept on both sides, by the same code;
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
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np

from rlcli import arguments
from rlcli.errors import ArgumentError, EnvError
from rlcli.keys import Key
from rlcli.processes.channel import NOTHING, packed
from rlcli.processes.group import NOT_REPLACED, Lost, Restarts, WorkerGroup, time_to_build
from rlcli.processes.region import Region
from rlcli.processes.worker import Worker
from rlcli.vec_envs.episodes import broken, named, place_of
from rlcli.vec_envs.replay import ReplayableVecEnv
from rlcli.vec_envs.shard import (
    AHEAD,
    CALL,
    CUT,
    INFOS,
    RESET,
    STEP,
    STEP_ON,
    TARGET,
    TERMINATED,
    Shard,
    described,
    memory_of,
    numbered,
)
from rlcli.vec_envs.vec_env import NONE
from rlcli.vec_envs.workers import shared_out

_TRIES = {"is_replayable": "a trial run", "load_state_dict": "a replay"}  # of episodes, by many steps each
_OF_LANES = ("started", "episodes", "fingerprints")  # of a saved state: one entry a lane


class ParallelVecEnv(ReplayableVecEnv):
    """Step gymnasium envs in worker processes, perhaps some in this one; see `ParallelEnv`."""

    own: Shard | None = None

    def __init__(
        self,
        recipes: Sequence[bytes],
        *,
        workers: int | None = None,
        per_worker: int | str | None = None,
        caller_steps: bool | None = None,
        step_timeout: float | None = None,
        on_worker_error: str = "raise",
        start_method: str = "forkserver",
        categorical: bool = False,
        narrow: bool = False,
        out_of_bounds: str = "count",
        first: gym.Env | None = None,
    ) -> None:
        arguments.seconds("step_timeout", step_timeout)
        self.n, self.name, self.clock = len(recipes), "env", [0]  # until the envs say more
        goes_on = on_worker_error == "restart"
        # env indices of each process; the caller's (`own`) come first
        self.parts, caller_steps = shared_out(self.n, workers, per_worker, caller_steps, on_worker_error)
        self._beside = int(caller_steps)  # parts that are no worker's
        self._apart = self.parts[0].stop if caller_steps else 0  # lanes that are no worker's
        self._start_method = start_method
        forms = {"categorical": categorical, "narrow": narrow, "out_of_bounds": out_of_bounds}
        self._built = [(recipes[part.start : part.stop], part.start, forms) for part in self.parts]
        started: list[Worker] = []
        try:
            for _ in self.parts[self._beside :]:
                started.append(self._worker())
        finally:
            self.group = WorkerGroup(started)
        try:
            answers = self._build(first)
            observation_space, action_space = self.spaces = answers[0]["spaces"]
            super().__init__(
                self.n, name=self.name, observation_space=observation_space, action_space=action_space,
                categorical=categorical, narrow=narrow, out_of_bounds=out_of_bounds,
                limits=[n for each in answers for n in each["limits"]],
            )  # fmt: skip
            self.heavy = sorted({name for each in answers for name in each.get("heavy", ())})
            region = Region(memory_of(self.n, len(started), self.schema, self.actions))
            arrays = self._share(region)
        except BaseException:
            self.close()
            raise
        self._shared = {key: arrays["row", key][self._apart :] for key in self.schema}
        self._actions, self._rewards, self._flags = arrays["actions"], arrays["rewards"], arrays["flags"]
        self._chosen, self._book, self._seeds = arrays["chosen"], arrays["book"], arrays["seeds"]
        self._firsts = {key: arrays["first", key] for key in self.schema}
        self.group.progress = self._tried = arrays["tried"]
        for place, leaf in enumerate(self.leaves):
            self.bounds.rounded[leaf.key] += list(arrays["rounded"][:, place])
        self._none = bytes(self.n)  # the flags of a step in which nothing ends
        self._limit: int | None = None  # as the shards know it
        self.step_timeout, self.ends_what_hangs = step_timeout, self.own is None
        # of each worker: how often it was replaced, and how many steps that lost
        self.restarts = [(0, 0)] * len(started)
        self._fallen: set[int] = set()  # workers whose lanes are in no episode, since they are new
        self.group.goes_on, self._counted = goes_on, Restarts()
        if goes_on:  # a new worker is to have the memory too, and rows that were shown are kept from a torn write
            self._region = region
            self._last = {key: shared.copy() for key, shared in self._shared.items()}
        else:
            region.forget_fd()

    def _worker(self) -> Worker:
        return Worker(TARGET, start_method=self._start_method, preload=[TARGET.partition(":")[0]])

    def _build(self, first: gym.Env | None) -> list[dict[str, Any]]:
        """Make the envs, here and in the workers; what they say of themselves."""
        each = self._built
        try:
            self.group.send(CALL, [packed(("build", one, {})) for one in each[self._beside :]])
            if self._beside:
                self.own = Shard(*each[0], first)
            answers = self.group.answers()
        except Lost as lost:
            self._refuse(lost)
        if self.own is not None:
            answers.insert(0, described(self.own))
        self.name = answers[0]["name"]
        for part, other in zip(self.parts, answers, strict=True):
            if other["spaces"] != answers[0]["spaces"]:
                raise broken(
                    self, "the envs differ in their spaces", lane=part.start, expected=answers[0]["text"],
                    got=other["text"], place=named(self, part.start),
                )  # fmt: skip
        return answers

    def _share(
        self, region: Region, only: Sequence[int] | None = None, patience: float | None = None
    ) -> dict[Any, np.ndarray]:
        """Put the shards, or some workers', on one region of memory; return its arrays."""
        workers, cells = len(self.group.workers), region.arrays["cells"]
        chosen = range(workers) if only is None else only
        for index in chosen:
            cells[index] = 0
        try:
            calls = [packed(("share", (self.n, workers, index), {})) for index in chosen]
            self.group.send(CALL, calls, only=chosen, fd=region.fd, patience=patience)
            self.group.open_lines(cells, chosen)
            self.group.answers(patience)
        except Lost as lost:
            self._refuse(lost)
        if self.own is not None:
            self.own.vec_env.share_counts(self.leaves, self.tried)
            self.own.attach(region.arrays)
        return region.arrays

    # ---- the shards ----------------------------------------------------------------------------------------------
    def _refuse(self, lost: Lost, during: str = "step") -> NoReturn:
        if not self.group.close.alive:
            raise ArgumentError("the env is closed", where=f"env {self.name}", fix="Make a new one.") from None
        place = place_of(self, self.parts[self._beside + lost.index])
        if lost.late is not None:
            raise EnvError(
                f"no answer for {lost.late:g} s", where=place,
                why=f"{during} has not returned in its worker process",
                fix="Fix the env, or allow more time: env.step_timeout=...",
            ) from None  # fmt: skip
        killed = "SIGKILL" in lost.how
        raise EnvError(
            f"a worker process {lost.how}", where=place,
            why="its envs were lost" + ("; the machine may be out of memory" if killed else ""),
            fix=("Use a smaller env.num or env.workers, or debug" if killed else "Debug")
            + " the env in one process: env.mode=serial env.workers=null.",
        ) from None  # fmt: skip

    def _each(self, name: str, arguments: Sequence[dict[str, Any]] | None = None) -> list:
        """Call a method of each shard's envs, with arguments of its own, and return the answers."""
        given = arguments or [{}] * len(self.parts)
        bodies = [packed((name, (), each)) for each in given[self._beside :]]
        try:
            self.group.send(CALL, bodies, patience=self.step_timeout)
            mine = [] if self.own is None else [getattr(self.own.vec_env, name)(**given[0])]
            answers = self.group.answers(self.step_timeout)
        except Lost as lost:
            self._refuse(lost, _TRIES.get(name, name))
        while new := self._replace_failed():
            again = self.group.order(CALL, [bodies[index] for index in new], only=new, patience=self.step_timeout)
            for index, answer in zip(new, again, strict=True):
                answers[index] = answer
        return mine + answers

    def _replace_failed(self) -> list[int]:
        """Replace the named failed workers; their envs are in no episode."""
        new = []
        while self.group.failed:
            index, cause = next(iter(self.group.failed.items()))
            if isinstance(cause, NOT_REPLACED):
                del self.group.failed[index]  # the worker lives
                raise cause
            sentence = self._counted.another(
                self.name, index, f"the worker of {place_of(self, self.parts[index])}", cause,
                collected=self.clock[0] * len(self.parts[index]) - self.restarts[index][1],
                fix="Fix the cause; env.mode=serial shows it in one process.",
            )  # fmt: skip
            warnings.warn(f"{sentence}; restarted, its open episodes are dropped", stacklevel=2)
            self.restarts[index] = self.restarts[index][0] + 1, self.restarts[index][1]
            self._fallen.add(index)
            self.group.replace(index, self._worker())
            new.append(index)
            patience = time_to_build(self.step_timeout)
            self.group.order(CALL, [packed(("build", self._built[index], {}))], only=[index], patience=patience)
            if index in self.group.failed:
                continue
            self._share(self._region, [index], patience)
            seeds = {"run_seed": self.run_seed, "every_episode": self._every_episode, "total": self._total}
            calls: list[tuple[str, dict[str, Any]]] = [
                ("limit_frames", {"steps": self._limit}), ("keep_info", {"keys": self.info_keys})
            ]  # fmt: skip
            if self.run_seed is not None:
                own = {"first_lane": self.first_lane + self.parts[index].start, "before": self.restarts[index][0]}
                calls.append(("seed", {**seeds, **own}))
            for name, settings in calls:
                self.group.order(CALL, [packed((name, (), settings))], only=[index], patience=patience)
        return sorted(set(new))

    def moved(self) -> Any:
        return super().moved(), self._tried.tolist()

    def unanswered(self) -> range:
        return self.parts[self._beside + self.group.awaited]

    def close(self) -> None:
        self.group.close()
        if self.group.goes_on and hasattr(self, "_region"):
            self._region.forget_fd()
        if self.own is not None:
            self.own.vec_env.close()

    # ---- seeds and limits ----------------------------------------------------------------------------------------
    def seed(self, run_seed, *, every_episode=False, first_lane=0, total=None) -> None:
        super().seed(run_seed, every_episode=every_episode, first_lane=first_lane, total=total)
        alike = {"run_seed": run_seed, "every_episode": every_episode, "total": total or self.n}
        self._each("seed", [{**alike, "first_lane": first_lane + part.start} for part in self.parts])

    def limit_frames(self, steps: int | None) -> None:
        super().limit_frames(steps)
        if steps != self._limit:
            self._each("limit_frames", [{"steps": steps}] * len(self.parts))
            self._limit = steps

    def keep_info(self, keys: Sequence[str]) -> None:
        super().keep_info(keys)
        self._each("keep_info", [{"keys": keys}] * len(self.parts))

    # ---- resets --------------------------------------------------------------------------------------------------
    def restart(self, row, lanes) -> None:
        own = self.own
        self._reset_into(row, lanes, lambda _, chosen: own.vec_env.restart(row, chosen), 0)  # type: ignore[union-attr]

    def _reset_into(self, row: dict[Key, np.ndarray], lanes: Sequence[int], reset: Callable, t: int) -> None:
        """Begin episodes; `reset(t, lanes)` is the caller's own lanes' way to do so."""
        own, book = self.own, self._book
        self._settle()
        lanes = [*lanes, *self._unready(lanes)]
        chosen = list(lanes)
        seeds = self.begin_episodes(lanes)
        self._chosen[:] = 0
        self._chosen[chosen] = 1
        book[:, 0], book[:, 1], book[:, 2] = self.episodes, self.clock[0], self.pending_seeds
        book[chosen, 2] = [seed is not None for seed in seeds]
        written = book.copy()
        busy = [i for i, part in enumerate(self.parts[self._beside :]) if any(lane in part for lane in chosen)]
        first = self._apart  # lanes from here on have not begun, for sure
        try:
            self.group.send(RESET, only=busy, patience=self.step_timeout)
            if own is not None and any(lane < first for lane in chosen):
                own.reset(reset, t)
            first = self.n
            self.group.answers(self.step_timeout)
            self._fallen.difference_update(busy)
            while new := self._replace_failed():
                busy = [index for index in new if index in busy]
                for index in busy:
                    book[self.parts[index]] = written[self.parts[index]]
                self.group.order(RESET, only=busy, patience=self.step_timeout)
                self._fallen.difference_update(i for i in busy if set(self.parts[i]) <= set(chosen))
        except BaseException as error:
            waits = (place for place, lane in enumerate(chosen) if book[lane, 2] or lane >= first)
            left = next(waits, len(chosen))
            self.not_begun(lanes[left:], seeds[left:])  # as one process has it: no lane after the one that raised
            if isinstance(error, Lost):
                self._refuse(error, "reset")
            raise
        elsewhere = [lane for lane in chosen if lane >= self._apart]
        for key, shared in self._shared.items() if elsewhere else ():
            row[key][elsewhere] = shown = shared[[lane - self._apart for lane in elsewhere]]
            if self.group.goes_on:
                self._last[key][elsewhere] = shown

    def _take_over(self, row: Sequence[tuple[np.ndarray, np.ndarray]], lanes: Sequence[int]) -> bool:
        """Say whether all of these envs were reset ahead, as they are to be now."""
        for lane in lanes:
            if not self._flags[lane] & AHEAD or self._seeds[lane] != numbered(self.next_seed(lane)):
                return False
        self.begin_episodes(lanes)
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

    def _settle(self) -> None:
        try:
            self.group.settle(self.step_timeout)
        except Lost as lost:
            self._refuse(lost)

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
                patience = lanes.step_timeout
                group.settle(patience)
                bodies = lanes._hand_over(actions)
                group.send(STEP_ON if ahead else STEP, bodies, only=lanes._standing() if lanes._fallen else None)
                mine = own.step(own_step, t, actions[:apart], ahead) if own is not None else None
                others = group.answers(patience)
            except Lost as lost:
                lanes._refuse(lost)
            if group.goes_on:
                others = lanes._without_fallen(others)
            for column, shared in columns:
                column[t + 1][apart:] = shared
            outcome = lanes.outcome
            if own is not None:
                others = [mine, *others]
            for part, answer in zip(lanes.parts, others, strict=True) if any(others) else ():
                if answer and (infos := answer.pop(INFOS, None)):
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
                outcome.ends.append((t, lane, bool(flags & TERMINATED), bool(flags & CUT)))
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
            self._replace_failed()
        for index in self._fallen:
            part, (times, lost) = slice(self.parts[index].start, self.parts[index].stop), self.restarts[index]
            others[index], self._flags[part], self._rewards[part] = None, CUT, 0.0
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

    def _hand_over(self, actions: np.ndarray) -> bytes | list[bytes]:
        """Write the actions into shared memory; where that would change them, the bodies that hold them as they are."""
        if actions.dtype == self._actions.dtype and actions.shape == self._actions.shape:
            self._actions[...] = actions
            return NOTHING
        standing = self._standing()
        parts = enumerate(self.parts[self._beside :])
        return [packed(actions[part.start : part.stop]) for index, part in parts if index in standing]

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
        answers = self._each("load_state_dict", [{"state": each, "replay": replay} for each in states])
        self._fallen.clear()  # what was not brought back is to be reset
        lost = [part.start + lane for part, lanes in zip(self.parts, answers, strict=True) for lane in lanes]
        for lane in set(range(self.n)).difference(lost):
            self.mark_seeded(lane)
        return lost


def _no_number(shown: str, kind: str) -> Any:
    """Stand, in an error, for a reward that is no number, which need not be known here."""
    return type(kind, (), {"__repr__": lambda self: shown})()
