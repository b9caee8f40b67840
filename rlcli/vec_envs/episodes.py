"""The episode book of N envs that are stepped together: clock, seeds, limits, and the actions of open episodes.

Every `VecEnv` keeps its book here; error sentences name env, episode, step and seed from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlcli.errors import EnvError, RlcliError, in_words
from rlcli.keys import Key, show
from rlcli.vec_envs.observations import BadValue

NO_LIMIT = 1 << 62  # steps
_BITS = 31
_MASK = (1 << _BITS) - 1


class Episodes:
    """Keep the books of n envs' episodes: since when, with which seed, and when each is truncated."""

    name: str  # in error sentences
    history_limit = 0  # steps whose actions are remembered; longer episodes cannot be replayed
    first_lane = 0  # index of env 0 among all envs of the run

    def __init__(self, n: int, limits: Sequence[int] | None = None) -> None:
        self.n = n
        self.clock = [0]  # steps so far
        self.tried: Any = [0]  # steps and resets of tries and replays
        self.started = [0] * n  # clock at which each env's episode began
        self.episodes = [-1] * n  # index of each env's episode; -1 before the first
        self.seeds: list[int | None] = [None] * n  # given to each env last
        self.deadlines = [NO_LIMIT] * n  # clock at which each episode is truncated
        self.nearest = [NO_LIMIT]  # a cell with the earliest of the deadlines
        self.history: list = []  # actions sent at each of the last steps, newest last
        self.own_limits = [NO_LIMIT] * n if limits is None else list(limits)
        self.limits = list(self.own_limits)  # steps after which each env's next episode is truncated
        self._limited = min(self.limits) < NO_LIMIT
        self.run_seed: int | None = None  # once somebody has given one
        self._every_episode = False
        self.pending_seeds = [False] * n  # one waits for its next reset
        self._total = n

    def count_in(self, clock: Any) -> None:
        """Count steps in this memory from now on, 0 until then, before rows are bound."""
        self.clock = clock

    # ---- seeds and limits ----------------------------------------------------------------------------------------
    def seed(
        self, run_seed: int, *, every_episode: bool = False, first_lane: int = 0, total: int | None = None
    ) -> None:
        """Derive all env seeds from `run_seed`, from each env's next reset on; episodes are counted anew."""
        self.episodes[:] = [-1] * self.n
        self.run_seed, self._every_episode = run_seed, every_episode
        self.first_lane, self._total = first_lane, total or self.n
        self.pending_seeds = [True] * self.n

    def seed_of(self, lane: Any, episode: Any) -> Any:
        """Return the seed of a lane's k-th episode; of tensors of both a tensor."""
        assert self.run_seed is not None
        return episode_seed(self.run_seed, self.first_lane + lane, episode, self._total)

    def next_seed(self, lane: int) -> int | None:
        """Return what the lane's next reset is to be given; None goes on with the env's own stream."""
        if self.pending_seeds[lane] or (self._every_episode and self.run_seed is not None):
            return self.seed_of(lane, self.episodes[lane] + 1)
        return None

    def seed_used(self, lane: int, episode: int) -> int | None:
        """Return the seed of an episode, or the last one its lane was given before; None where there was none."""
        return self.seed_of(lane, episode) if self._every_episode else self.seeds[lane]

    def limit_frames(self, steps: int | None) -> None:
        """Truncate each episode after `steps` steps (None: no limit), from each env's next reset on."""
        self.limits = [limit if steps is None else min(limit, steps) for limit in self.own_limits]
        self._limited = min(self.limits) < NO_LIMIT

    # ---- episodes ------------------------------------------------------------------------------------------------
    def begin_episodes(self, lanes: Sequence[int], at: int | None = None) -> list[int | None]:
        """Open the next episode of these lanes, now or `at` a clock; the seeds to reset them with, before `began`."""
        clock, seeds = self.clock[0] if at is None else at, []
        for lane in lanes:
            if self.pending_seeds[lane] and self.seeds[lane] == self.seed_of(lane, self.episodes[lane]):
                self.episodes[lane] -= not self._every_episode  # it could not be reset: again, or the next seed may do
            seed = self.next_seed(lane)
            self.episodes[lane] += 1
            self.started[lane] = clock
            self.deadlines[lane] = clock + self.limits[lane]
            if seed is not None:
                self.seeds[lane] = seed
            seeds.append(seed)
        if self._limited or self.nearest[0] < NO_LIMIT:  # else there is none
            self.nearest[0] = min(self.deadlines)
        return seeds

    def began(self, lanes: Sequence[int]) -> None:
        """Note that these lanes were reset: no seed waits for them any more."""
        for lane in lanes:
            self.pending_seeds[lane] = False

    def past_deadline(self) -> np.ndarray:
        """Say which lanes' episodes have reached their limit, `[N]` bool."""
        return np.asarray(self.deadlines) <= self.clock[0]

    def steps_in_episode(self, lane: int) -> int:
        """Return steps taken in the lane's current episode."""
        return self.clock[0] - self.started[lane]

    def trim_history(self) -> None:
        """Forget the actions of episodes that are over, and those beyond `history_limit`."""
        needed = min(self.clock[0] - min(self.started), self.history_limit)
        del self.history[: max(0, len(self.history) - needed)]

    # ---- coming back ---------------------------------------------------------------------------------------------
    def reopen(self, clock: int, started: Sequence[int], episodes: Sequence[int]) -> None:
        """Set the book back to open episodes that began at `started`."""
        self.clock[0] = clock
        self.started[:] = map(int, started)
        self.episodes[:] = map(int, episodes)
        self.deadlines[:] = [began + limit for began, limit in zip(self.started, self.limits, strict=True)]
        self.nearest[0] = min(self.deadlines)

    def mark_seeded(self, lane: int) -> None:
        """Mark the env as in its open episode, from that episode's seed: none is pending."""
        self.pending_seeds[lane] = False
        self.seeds[lane] = self.seed_of(lane, self.episodes[lane])


def episode_seed(run_seed: int, lane: Any, episode: Any, lanes: int) -> Any:
    """Return the seed of one episode, 31 bits, never the same twice within a run: a bijection of its count."""
    key = mixed(mixed(run_seed & _MASK) ^ ((run_seed >> _BITS) & _MASK) ^ 0x5BD1E995 & _MASK)
    rest = run_seed >> 2 * _BITS
    while rest not in (0, -1):
        key, rest = mixed(key ^ (rest & _MASK) ^ 0x2545F491), rest >> _BITS
    return mixed(((episode * lanes + lane) & _MASK) ^ key)


def mixed(value: Any) -> Any:
    """Return a bijection of `[0, 2**31)`, of an int or a tensor: odd multiplications and xor-shifts, each undone."""
    value = (value * 0x2C1B3C6D) & _MASK
    value = value ^ (value >> 12)
    value = (value * 0x297A2D39) & _MASK
    return value ^ (value >> 15)


# ---- the sentences for an env that raises or breaks the step contract -----------------------------------------------
def named(vec_env: Episodes, lane: int, episode: int | None = None, *steps: str, seed: int | None = None) -> str:
    """Name env, its index in the run, episode, steps and seed, as far as known: the one spelling of it."""
    where = f"{vec_env.name}, env {vec_env.first_lane + lane}"
    if episode is not None:
        where += f", episode {episode}"
    where = ", ".join((where, *steps))
    return where if seed is None else f"{where}, seed {seed}"


def place_of(vec_env: Episodes, lane: int | range | None) -> str:
    """Return the present place of a lane, of several that one process steps, or of all of them."""
    if lane is None or isinstance(lane, range):  # stepped in one call
        which = f"all {vec_env.n} envs"
        if lane is not None:
            first, last = vec_env.first_lane + lane[0], vec_env.first_lane + lane[-1]
            which = f"env {first}" if first == last else f"envs {first} to {last}"
        return f"{vec_env.name}, {which}, step {vec_env.clock[0]} of the run"
    step = f"step {vec_env.steps_in_episode(lane)}"
    return named(vec_env, lane, vec_env.episodes[lane], step, seed=vec_env.seeds[lane])


def _past_place(vec_env: Episodes, lane: int, t: int, ends: Sequence[tuple]) -> str:
    """Return the place of step `t` of a batch that is over: episodes may have ended since."""
    episode = vec_env.episodes[lane] - sum(1 for end in ends if end[1] == lane and end[0] >= t)
    return named(vec_env, lane, episode, f"step {t} of the batch", seed=vec_env.seed_used(lane, episode))


@dataclass(frozen=True)
class BatchStart:
    """Keep where the envs stood when a batch began, so that any of its rows can be located."""

    clock: int  # steps of the run before the batch
    ages: list[int]  # of each env: steps in its episode
    episodes: list[int]

    @classmethod
    def of(cls, vec_env: Episodes) -> BatchStart:
        """Return the present state of the lanes."""
        clock = vec_env.clock[0]
        return cls(clock, [clock - begun for begun in vec_env.started], list(vec_env.episodes))

    def place(self, vec_env: Episodes, ends: Sequence[tuple], row: int, after_reset: bool, lane: int) -> str:
        """Locate row `row` of the batch (row t + 1 is from step t): env, episode, step and seed, in words."""
        over = [t for t, ended, *_ in ends if ended == lane and t < row - (not after_reset)]
        episode = self.episodes[lane] + len(over)
        step = row - over[-1] - 1 if over else self.ages[lane] + row
        steps = f"step {step}", f"step {self.clock + row} of the run"
        return named(vec_env, lane, episode, *steps, seed=vec_env.seed_used(lane, episode))


def broken(
    vec_env: Episodes,
    what: str,
    *,
    lane: int | None,
    expected: str,
    got: str,
    action: Any = None,
    fix: str | None = None,
    at: tuple[int, Sequence[tuple]] | None = None,
    place: str | None = None,
) -> EnvError:
    """Return an error naming env, episode, step, seed, what was expected and what came."""
    why = f"expected {expected}, got {got}"
    if action is not None:
        why += f" after action {_short(action)}"
    if place is None:
        place = place_of(vec_env, lane) if at is None or lane is None else _past_place(vec_env, lane, *at)
    return EnvError(what, where=place, why=why, fix=fix)


def not_finite(vec_env: Episodes, key: Key, lane: int, at: tuple[int, Sequence[tuple]] | None = None) -> EnvError:
    """Return the error for an observation that is NaN or infinite."""
    return broken(
        vec_env, f"the env's {show(key)} is not finite", lane=lane, at=at,
        expected="finite numbers", got="NaN or infinity",
        fix="Show a number: 0 where there is nothing to say, and a flag beside it.",
    )  # fmt: skip


def env_raised(
    vec_env: Episodes, error: BaseException, lane: int | None, during: str, action: Any = None, place: str | None = None
) -> EnvError:
    """Return the error for what the env raised, and where; raise errors of ours and KeyboardInterrupt as they are."""
    if isinstance(error, RlcliError | KeyboardInterrupt):
        raise error
    if isinstance(error, BadValue):
        what = f"{during} returned a bad value"
        return broken(
            vec_env, what, lane=lane, expected=error.expected, got=error.got, action=action, fix=error.fix, place=place
        )  # fmt: skip
    why = in_words(error)
    if action is not None:
        why += f" (action {_short(action)})"
    return EnvError(f"the environment raised in {during}", where=place or place_of(vec_env, lane), why=why)


def _short(action: Any) -> str:
    return " ".join(repr(action).split())[:200]
