"""The sentences for an environment that raises or breaks the step contract (rows 6 to 9 of the fault table)."""

from __future__ import annotations

from typing import Any

from rlcli.errors import EnvError


def _place(lanes: Any, lane: int | None) -> str:
    where = f"env {getattr(lanes, 'name', 'env')}"
    if lane is None:  # an engine that steps all lanes in one call
        return f"{where}, all {lanes.n} lanes, step {lanes.clock[0]} of the run"
    where += f", lane {lane}"
    if hasattr(lanes, "steps_in_episode") and hasattr(lanes, "started"):
        where += f", episode {lanes.episodes[lane]}, step {lanes.steps_in_episode(lane)}"
        if lanes.seeds[lane] is not None:
            where += f", seed {lanes.seeds[lane]}"
    return where


def broken(
    lanes: Any, what: str, *, lane: int | None, expected: str, got: str, action: Any = None, fix: str | None = None
) -> EnvError:
    """An error naming env, lane, episode, step, seed, what was expected and what came."""
    why = f"expected {expected}, got {got}"
    if action is not None:
        why += f" after action {action!r}"
    return EnvError(what, where=_place(lanes, lane), why=why, fix=fix)


def env_raised(lanes: Any, error: BaseException, lane: int | None, during: str, action: Any = None) -> EnvError:
    """An error that keeps type and text of what the env raised, with env, lane, step, seed and last action."""
    why = f"{type(error).__name__}: {error}"
    if action is not None:
        why += f" (action {action!r})"
    return EnvError(f"the environment raised in {during}", where=_place(lanes, lane), why=why)
