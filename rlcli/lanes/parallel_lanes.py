"""The array face of envs in worker processes: the parent writes actions into shared memory, workers the rest.

Each worker runs `GymLanes` on its part of the lanes (`lane_worker.py`). The episode book is kept on both sides, by the
same code: here for the collector, there for seeds, limits and the sentences of errors; at a reset, this one decides. So
all that is stepped, refused and saved is what one process would give; only lanes after one that raised have gone one
step further.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np

from rlcli.errors import ArgumentError, EnvError
from rlcli.lanes.contract import broken, named, place_of
from rlcli.lanes.lane_worker import CALL, CUT, RESET, STEP, TERMINATED, fields
from rlcli.lanes.lanes import NONE
from rlcli.lanes.replay import ReplayableLanes
from rlcli.processes.channel import NOTHING, packed
from rlcli.processes.crew import Crew, Lost
from rlcli.processes.region import Region
from rlcli.processes.worker import Worker

_TARGET = "rlcli.lanes.lane_worker:work"


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
        self.parts = _dealt(self.n, workers)
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
        each = [(recipes[part.start : part.stop], part.start, settings) for part in self.parts]
        answers = self._each("build", each)
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
        raise EnvError(
            f"a worker process {lost.how}", where=place_of(self, self.parts[lost.index]),
            why="its envs are gone with it" + (", perhaps for want of memory" if "SIGKILL" in lost.how else ""),
            fix="Make the env anew; a run of the command line goes on with rlcli resume.",
        ) from None  # fmt: skip

    def _call(
        self, name: str, *args: Any, fd: int | None = None, only: Sequence[int] | None = None, **settings
    ) -> list:
        """The same method of each worker, or of `only` some."""
        with self._supervised():
            return self.crew.order(CALL, packed((name, args, settings)), only=only, fd=fd)

    def _each(self, name: str, arguments: Sequence[tuple]) -> list:
        """A method of each worker, with arguments of its own."""
        with self._supervised():
            return self.crew.order(CALL, [packed((name, each, {})) for each in arguments])

    def unanswered(self) -> range:
        return self.parts[self.crew.awaited]

    def close(self) -> None:
        self.crew.close()

    # ---- seeds and limits ----------------------------------------------------------------------------------------
    def seed(self, run_seed, *, every_episode=False, first_lane=0, total=None) -> None:
        super().seed(run_seed, every_episode=every_episode, first_lane=first_lane, total=total)
        with self._supervised():
            self.crew.order(CALL, [
                packed((
                    "tell", ("seed", run_seed),
                    {"every_episode": every_episode, "first_lane": first_lane + part.start, "total": total or self.n},
                ))
                for part in self.parts
            ])  # fmt: skip

    def limit_frames(self, steps: int | None) -> None:
        super().limit_frames(steps)
        if steps != self._limit:
            self._call("tell", "limit_frames", steps)
            self._limit = steps

    # ---- resets --------------------------------------------------------------------------------------------------
    def restart(self, row, lanes) -> None:
        self._reset_into([(row[key], shared) for key, shared in self._shared.items()], lanes)

    def _reset_into(self, pairs: Sequence[tuple[np.ndarray, np.ndarray]], lanes: Sequence[int]) -> None:
        self.begin_episodes(lanes)
        self._chosen[:] = 0
        chosen = list(lanes)
        self._chosen[chosen] = 1
        self._book[:, 0], self._book[:, 1] = self.episodes, self.clock[0]
        busy = [index for index, part in enumerate(self.parts) if self._chosen[part.start : part.stop].any()]
        with self._supervised():
            self.crew.order(RESET, only=busy)
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
        return self.seeded and self._call("tell", "repeats", only=[0])[0]

    def fingerprints(self) -> list[str]:
        return [each for found in self._call("tell", "fingerprints") for each in found]

    def load_state_dict(self, state, *, replay):
        history = self.take_history(state)
        states = [
            {name: state[name][part.start : part.stop] for name in _OF_LANES}
            | {"clock": state["clock"], "history": history[:, part.start : part.stop] if len(history) else history}
            for part in self.parts
        ]
        self.reopen(int(state["clock"]), state["started"], state["episodes"])
        found = self._each("load", [(each, replay) for each in states])
        lost = [part.start + lane for part, lanes in zip(self.parts, found, strict=True) for lane in lanes]
        for lane in set(range(self.n)).difference(lost):
            self.mark_seeded(lane)
        return lost


_OF_LANES = ("started", "episodes", "fingerprints")


def _dealt(n: int, workers: int) -> list[range]:
    """Neighbouring lanes for each worker, as many for each as for the others, or one more."""
    ends = [-(-n * place // workers) for place in range(workers + 1)]
    return [range(first, last) for first, last in pairwise(ends)]


def _no_number(shown: str, kind: str) -> Any:
    """Looks, in an error, like a reward that is no number, which need not be known here."""
    return type(kind, (), {"__repr__": lambda self: shown})()
