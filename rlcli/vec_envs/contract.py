"""The sentences for an environment that raises or breaks the step contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlcli.errors import EnvError, in_words
from rlcli.keys import Key, show
from rlcli.vec_envs.observations import BadValue


class Book(Protocol):
    """Describe what error sentences are written from: some envs and their episodes (`VecEnv`)."""

    name: str
    n: int
    first_lane: int
    clock: list[int]
    started: list[int]
    episodes: list[int]
    seeds: list[int | None]

    def steps_in_episode(self, lane: int) -> int: ...
    def seed_used(self, lane: int, episode: int) -> int | None: ...


def named(vec_env: Book, lane: int, episode: int | None = None, *steps: str, seed: int | None = None) -> str:
    """Name env, its index in the run, episode, steps and seed, as far as known: the one spelling of it."""
    where = f"{vec_env.name}, env {vec_env.first_lane + lane}"
    if episode is not None:
        where += f", episode {episode}"
    where = ", ".join((where, *steps))
    return where if seed is None else f"{where}, seed {seed}"


def place_of(vec_env: Book, lane: int | range | None) -> str:
    """Return the present place of a lane, of several that one process steps, or of all of them."""
    if lane is None or isinstance(lane, range):  # stepped in one call
        which = f"all {vec_env.n} envs"
        if lane is not None:
            first, last = vec_env.first_lane + lane[0], vec_env.first_lane + lane[-1]
            which = f"env {first}" if first == last else f"envs {first} to {last}"
        return f"{vec_env.name}, {which}, step {vec_env.clock[0]} of the run"
    step = f"step {vec_env.steps_in_episode(lane)}"
    return named(vec_env, lane, vec_env.episodes[lane], step, seed=vec_env.seeds[lane])


def _past_place(vec_env: Book, lane: int, t: int, ends: Sequence[tuple]) -> str:
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
    def of(cls, vec_env: Book) -> BatchStart:
        """Return the present state of the lanes."""
        clock = vec_env.clock[0]
        return cls(clock, [clock - begun for begun in vec_env.started], list(vec_env.episodes))

    def place(self, vec_env: Book, ends: Sequence[tuple], row: int, after_reset: bool, lane: int) -> str:
        """Locate row `row` of the batch (row t + 1 is from step t): env, episode, step and seed, in words."""
        over = [t for t, ended, *_ in ends if ended == lane and t < row - (not after_reset)]
        episode = self.episodes[lane] + len(over)
        step = row - over[-1] - 1 if over else self.ages[lane] + row
        steps = f"step {step}", f"step {self.clock + row} of the run"
        return named(vec_env, lane, episode, *steps, seed=vec_env.seed_used(lane, episode))


def broken(
    vec_env: Book,
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


def not_finite(vec_env: Book, key: Key, lane: int, at: tuple[int, Sequence[tuple]] | None = None) -> EnvError:
    """Return the error for an observation that is NaN or infinite."""
    return broken(
        vec_env, f"the env's {show(key)} is not finite", lane=lane, at=at,
        expected="finite numbers", got="NaN or infinity",
        fix="Show a number: 0 where there is nothing to say, and a flag beside it.",
    )  # fmt: skip


def env_raised(
    vec_env: Book, error: BaseException, lane: int | None, during: str, action: Any = None, place: str | None = None
) -> EnvError:
    """Return an error with type and text of what the env raised, and env, step, seed and last action."""
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
