"""The array face of envs in worker processes: the parent writes actions into shared memory, workers the rest.

Each worker runs `GymLanes` on its part of the lanes (`LaneWorker`), on rows in memory that it shares with its parent.
Nothing of a step is pickled, but for actions and rewards that the shared arrays cannot hold as they are. The episode
book is kept on both sides, by the same code: here for the collector, there for seeds, limits and the sentences of
errors; at a reset, this one decides. So all that is stepped, refused and saved is what one process would give; only
lanes after one that raised have gone one step further.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np

from rlcli.errors import ArgumentError, EnvError
from rlcli.keys import Key
from rlcli.lanes.actions import ActionFormat
from rlcli.lanes.contract import broken, named, place_of
from rlcli.lanes.gym_lanes import GymLanes
from rlcli.lanes.lanes import NONE, NUMBERS, Schema
from rlcli.lanes.replay import ReplayableLanes
from rlcli.processes.channel import NOTHING, Channel, packed, unpacked
from rlcli.processes.crew import Crew, Lost, serve
from rlcli.processes.region import Region
from rlcli.processes.worker import Worker

_TARGET = "rlcli.lanes.parallel_lanes:work"
STEP, RESET, CALL = 1, 2, 3  # orders
_OF_WORKER = ("build", "share")  # methods of the worker's own; all other calls are of its lanes' methods
TERMINATED, CUT = 1, 2  # bits of the flags
_WHOLE = 1 << 53  # beyond it float64 no longer holds every whole number
_TRIM = 256  # steps between two times that the actions are forgotten: the parent keeps them
HEAVY = ("torch", "tensordict", "hydra", "rich")  # what a worker does without, unless its env imports it


def fields(n: int, schema: Schema, actions: ActionFormat) -> dict[Any, tuple[tuple[int, ...], np.dtype]]:
    """What lies in the shared memory of `n` lanes: one row of each observation, and what a step takes and gives."""
    bits = np.dtype(np.uint8)
    rows: dict[Any, tuple[tuple[int, ...], np.dtype]] = {
        ("row", key): ((n, *shape), dtype) for key, (shape, dtype) in schema.items()
    }
    return rows | {
        "actions": ((n, *actions.shape), actions.dtype),
        "rewards": ((n,), np.dtype(np.float64)),
        "flags": ((n,), bits),
        "chosen": ((n,), bits),
        "book": ((n, 3), np.dtype(np.int64)),  # at a reset: each lane's episode, the clock, whether a seed waits for it
    }


# ---- in a worker ----------------------------------------------------------------------------------------------------
def work(channel: Channel) -> None:
    """Serve one parent."""
    worker = LaneWorker(channel)
    try:
        serve(channel, worker.carry_out)
    finally:
        worker.close()


class LaneWorker:
    """Envs that a parent steps, some of its lanes."""

    lanes: GymLanes

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._steps = 0

    def carry_out(self, kind: int, body: bytes) -> Any:
        """One order of the parent's."""
        if kind == STEP:
            return self._step(unpacked(body))
        if kind == RESET:
            return self._reset()
        name, args, settings = unpacked(body)
        return getattr(self if name in _OF_WORKER else self.lanes, name)(*args, **settings)

    # ---- the beginning -------------------------------------------------------------------------------------------
    def build(self, recipes: Sequence[bytes], first_lane: int, settings: dict[str, Any]) -> dict[str, Any]:
        """Make the envs; what the parent has to know of them."""
        made: list[gym.Env] = []
        for recipe in recipes:
            found, spec = unpacked(recipe)
            if spec is not None:  # perhaps by a program that a worker does not run
                gym.registry.setdefault(spec.id, spec)
            made.append(found.make())
        self.lanes = GymLanes(made, first_lane=first_lane, **settings)
        return {
            "name": self.lanes.name,
            "spaces": (made[0].observation_space, made[0].action_space),
            "limits": self.lanes.own_limits,
            "text": str(made[0]),
            "heavy": [name for name in HEAVY if name in sys.modules],
        }

    def share(self, n: int) -> None:
        """Map the memory of all `n` lanes, and step on the part of this worker's."""
        lanes = self.lanes
        region = Region(fields(n, lanes.schema, lanes.actions), self.channel.receive_fd())
        region.forget_fd()
        first = lanes.first_lane
        mine = {name: array[first : first + lanes.n] for name, array in region.arrays.items()}
        rows: dict[Key, list[np.ndarray]] = {key: [mine["row", key]] * 2 for key in lanes.schema}
        self._step_lanes, self._reset_lanes = lanes.bind(rows)
        self.actions, self.rewards = mine["actions"], mine["rewards"]
        self.flags, self.chosen, self.book = mine["flags"], mine["chosen"], mine["book"]

    # ---- steps ---------------------------------------------------------------------------------------------------
    def _step(self, actions: Any) -> dict[int, Any] | None:
        """Take a step with the actions in the shared array, or with others; the rewards that the array cannot hold."""
        lanes, outcome = self.lanes, self.lanes.outcome
        outcome.rewards.clear()
        outcome.ends.clear()
        self.flags[:] = 0
        self._step_lanes(0, self.actions if actions is None else actions)
        for _, lane, terminated, cut in outcome.ends:
            self.flags[lane] = TERMINATED * terminated | CUT * cut
        self._steps += 1
        if self._steps % _TRIM == 0:
            lanes.trim_history()
        return self._give(outcome.rewards)

    def _give(self, rewards: list) -> dict[int, Any] | None:
        others: dict[int, Any] = {}
        for lane, reward in enumerate(rewards):
            if reward.__class__ is float:
                self.rewards[lane] = reward
            elif not isinstance(reward, NUMBERS):
                others[lane] = (repr(reward), type(reward).__name__)
            elif isinstance(reward, (int, np.integer)) and not -_WHOLE <= reward <= _WHOLE:
                others[lane] = int(reward)
            else:
                self.rewards[lane] = reward
        return others or None

    def _reset(self) -> None:
        """Begin the parent's next episodes, whatever orders an interrupted parent did not give to all its workers."""
        chosen = np.flatnonzero(self.chosen).tolist()
        self.lanes.clock[0] = int(self.book[0, 1])
        for lane in chosen:
            self.lanes.episodes[lane] = int(self.book[lane, 0]) - 1
        waiting = self.lanes.pending_seeds
        waiting[:] = map(bool, self.book[:, 2])
        try:
            self._reset_lanes(0, chosen)
        finally:
            self.book[:, 2] = waiting

    def close(self) -> None:
        """Release the envs."""
        if hasattr(self, "lanes"):
            self.lanes.close()


# ---- in the parent --------------------------------------------------------------------------------------------------
class ParallelLanes(ReplayableLanes):
    """Gymnasium envs in worker processes.

    Parameters
    ----------
    recipes : sequence of bytes
        Of each env the pickled `GymRecipe`, and gymnasium's spec of its id, if it has one.
    workers : int
        Processes; the lanes are dealt out evenly, neighbours together.
    start_method : {"forkserver", "spawn", "fork"}
        See `rlcli.processes.worker`.
    categorical, narrow, out_of_bounds
        As in `ReplayableLanes`.

    Attributes
    ----------
    spaces : tuple of gymnasium.Space
        Of one lane's observations and actions.
    parts : list of range
        The lanes of each worker.
    heavy : list of str
        What is imported in a worker that it could do without (`torch`, say), since its env's code needs it.

    Raises
    ------
    EnvError
        As `GymLanes` raises; and a worker has ended.
    """

    def __init__(
        self,
        recipes: Sequence[bytes],
        *,
        workers: int,
        start_method: str = "forkserver",
        categorical: bool = False,
        narrow: bool = False,
        out_of_bounds: str = "count",
    ) -> None:
        self.n, self.name, self.clock = len(recipes), "env", [0]  # until the workers say more
        if not isinstance(workers, int) or isinstance(workers, bool) or not 1 <= workers <= self.n:
            raise ArgumentError(f"{self.n} envs can have 1 to {self.n} workers", why=f"got {workers!r}")
        self.parts = dealt(self.n, workers)
        preload = [_TARGET.partition(":")[0]]
        started: list[Worker] = []
        try:
            for _ in self.parts:
                started.append(Worker(_TARGET, start_method=start_method, preload=preload))
        finally:
            self.crew = Crew(started)
        try:
            forms = {"categorical": categorical, "narrow": narrow, "out_of_bounds": out_of_bounds}
            answers = self._build(recipes, forms)
            observation_space, action_space = self.spaces = answers[0]["spaces"]
            super().__init__(
                self.n, name=self.name, observation_space=observation_space, action_space=action_space,
                categorical=categorical, narrow=narrow, out_of_bounds=out_of_bounds,
                limits=[n for each in answers for n in each["limits"]],
            )  # fmt: skip
            self.heavy = sorted({name for each in answers for name in each["heavy"]})
            region = Region(fields(self.n, self.schema, self.actions))
            self._call("share", self.n, fd=region.fd)
            region.forget_fd()
        except BaseException:
            self.close()
            raise
        self._shared = {key: region.arrays["row", key] for key in self.schema}
        self._actions, self._rewards = region.arrays["actions"], region.arrays["rewards"]
        self._flags, self._chosen, self._book = (region.arrays[name] for name in ("flags", "chosen", "book"))
        self._limit: int | None = None  # as the workers know it

    def _build(self, recipes: Sequence[bytes], settings: dict[str, Any]) -> list[dict[str, Any]]:
        """Have the workers make their envs; what they say of them."""
        answers = self._each("build", [
            {"recipes": recipes[part.start : part.stop], "first_lane": part.start, "settings": settings}
            for part in self.parts
        ])  # fmt: skip
        self.name = answers[0]["name"]
        for part, other in zip(self.parts, answers, strict=True):
            if other["spaces"] != answers[0]["spaces"]:
                raise broken(
                    self, "the envs differ in their spaces", lane=part.start, expected=answers[0]["text"],
                    got=other["text"], place=named(self, part.start),
                )  # fmt: skip
        return answers

    # ---- the workers ---------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def _supervised(self) -> Iterator[None]:
        try:
            yield
        except Lost as lost:
            self._refuse(lost)

    def _refuse(self, lost: Lost) -> NoReturn:
        killed = "SIGKILL" in lost.how
        raise EnvError(
            f"a worker process {lost.how}", where=place_of(self, self.parts[lost.index]),
            why="its envs are gone with it" + (", perhaps for want of memory" if killed else ""),
            fix=("Use a smaller env.num or env.workers, or look" if killed else "Look")
            + " in one process at what the env does: env.workers=null.",
        ) from None  # fmt: skip

    def _call(
        self, name: str, *args: Any, fd: int | None = None, only: Sequence[int] | None = None, **settings
    ) -> list:
        """The same method of each worker, or of `only` some."""
        with self._supervised():
            return self.crew.order(CALL, packed((name, args, settings)), only=only, fd=fd)

    def _each(self, name: str, arguments: Sequence[dict[str, Any]]) -> list:
        """The same method of each worker, with arguments of its own."""
        with self._supervised():
            return self.crew.order(CALL, [packed((name, (), each)) for each in arguments])

    def unanswered(self) -> range:
        return self.parts[self.crew.awaited]

    def close(self) -> None:
        self.crew.close()

    # ---- seeds and limits ----------------------------------------------------------------------------------------
    def seed(self, run_seed, *, every_episode=False, first_lane=0, total=None) -> None:
        super().seed(run_seed, every_episode=every_episode, first_lane=first_lane, total=total)
        alike = {"run_seed": run_seed, "every_episode": every_episode, "total": total or self.n}
        self._each("seed", [{**alike, "first_lane": first_lane + part.start} for part in self.parts])

    def limit_frames(self, steps: int | None) -> None:
        super().limit_frames(steps)
        if steps != self._limit:
            self._call("limit_frames", steps)
            self._limit = steps

    # ---- resets --------------------------------------------------------------------------------------------------
    def restart(self, row, lanes) -> None:
        self._reset_into([(row[key], shared) for key, shared in self._shared.items()], lanes)

    def _reset_into(self, pairs: Sequence[tuple[np.ndarray, np.ndarray]], lanes: Sequence[int]) -> None:
        seeds, book = self.begin_episodes(lanes), self._book
        self._chosen[:] = 0
        chosen = list(lanes)
        self._chosen[chosen] = 1
        book[:, 0], book[:, 1], book[:, 2] = self.episodes, self.clock[0], self.pending_seeds
        book[chosen, 2] = [seed is not None for seed in seeds]
        busy = [index for index, part in enumerate(self.parts) if self._chosen[part.start : part.stop].any()]
        try:
            with self._supervised():
                self.crew.order(RESET, only=busy)
        except BaseException:
            left = next((place for place, lane in enumerate(chosen) if book[lane, 2]), len(chosen))
            self.not_begun(lanes[left:], seeds[left:])  # as one process has it: no lane after the one that raised
            raise
        for row, shared in pairs:
            row[chosen] = shared[chosen]

    # ---- the loop ------------------------------------------------------------------------------------------------
    def bind(self, rows) -> tuple[Callable, Callable]:
        columns = [(rows[key], shared) for key, shared in self._shared.items()]
        clock, send, lanes = self.clock, self.actions.sender(), self

        def step(t: int, actions) -> Sequence[int]:
            clock[0] += 1
            lanes.history.append(send(actions))
            with lanes._supervised():
                others = lanes.crew.order(STEP, lanes._hand_over(actions))
            for column, shared in columns:
                column[t + 1][...] = shared
            outcome = lanes.outcome
            if outcome.rewards or any(others):
                lanes._keep_apart(others)
            else:
                outcome.reward_rows.append(lanes._rewards.copy())
            if not lanes._flags.any():
                return NONE
            done = np.flatnonzero(lanes._flags).tolist()
            for lane in done:
                flags = int(lanes._flags[lane])
                outcome.ends.append((t, lane, bool(flags & TERMINATED), bool(flags & CUT)))
            return done

        def reset(t: int, done: Sequence[int]) -> None:
            lanes._reset_into([(column[t + 1], shared) for column, shared in columns], done)

        return step, reset

    def _keep_apart(self, others: Sequence[dict[int, Any] | None]) -> None:
        """Keep the rewards one by one: among those of this batch are some that an array cannot hold as they are."""
        outcome, rewards = self.outcome, self._rewards.tolist()
        for part, found in zip(self.parts, others, strict=True):
            for lane, reward in (found or {}).items():
                rewards[part.start + lane] = reward if isinstance(reward, int) else _no_number(*reward)
        outcome.rewards += [reward for row in outcome.reward_rows for reward in row.tolist()] + rewards
        outcome.reward_rows.clear()

    def _hand_over(self, actions: np.ndarray) -> bytes | list[bytes]:
        """Write the actions into shared memory; where that would change them, the bodies that hold them as they are."""
        if actions.dtype == self._actions.dtype and actions.shape == self._actions.shape:
            self._actions[...] = actions
            return NOTHING
        return [packed(actions[part.start : part.stop]) for part in self.parts]

    # ---- checkpoints ---------------------------------------------------------------------------------------------
    def is_replayable(self) -> bool:
        return self.seeded and self._call("repeats", only=[0])[0]

    def fingerprints(self) -> list[str]:
        return [each for found in self._call("fingerprints") for each in found]

    def load_state_dict(self, state, *, replay):
        history = self.take_history(state)
        states = [
            {name: state[name][part.start : part.stop] for name in _OF_LANES}
            | {"clock": state["clock"], "history": history[:, part.start : part.stop] if len(history) else history}
            for part in self.parts
        ]
        self.reopen(int(state["clock"]), state["started"], state["episodes"])
        found = self._each("load_state_dict", [{"state": each, "replay": replay} for each in states])
        lost = [part.start + lane for part, lanes in zip(self.parts, found, strict=True) for lane in lanes]
        for lane in set(range(self.n)).difference(lost):
            self.mark_seeded(lane)
        return lost


_OF_LANES = ("started", "episodes", "fingerprints")


def dealt(n: int, workers: int) -> list[range]:
    """Neighbouring lanes for each worker, as many for each as for the others, or one more."""
    ends = [-(-n * place // workers) for place in range(workers + 1)]
    return [range(first, last) for first, last in pairwise(ends)]


def _no_number(shown: str, kind: str) -> Any:
    """Looks, in an error, like a reward that is no number, which need not be known here."""
    return type(kind, (), {"__repr__": lambda self: shown})()
