"""`python -m tests.bench gaps`: what env processes lose where their next order comes late, as behind a policy on a GPU.

The caller is awake in each pause, as one that waits for a GPU is. Beside a step stands what the largest share of the
envs takes in one process with nothing around it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from rlcli.bench.bare_envs import bare
from rlcli.bench.harness import Figure, Report, Side, fill
from rlcli.bench.settings import env_problems
from rlcli.build.env import configured
from rlcli.config.compose import configure
from rlcli.envs import EnvBase, GymEnv, ParallelEnv, TransformedEnv
from rlcli.processes.process import cores
from rlcli.vec_envs.make import GymRecipe
from rlcli.vec_envs.parallel_vec_env import ParallelVecEnv
from tests.bench.bare_processes import busy

PONG = "ALE/Pong-v5"
GAPS = (0, 100, 500, 2500)  # microseconds between the end of a step and the next order
ALONE = "one process's share, nothing around it"
MOST = "<= 100"  # microseconds


class Given:
    """Envs in processes as a run has them, given actions; nothing is stored."""

    def __init__(self, env: EnvBase, seed: int, actions: np.ndarray | None = None) -> None:
        while isinstance(env, TransformedEnv):
            env = env.base_env
        self.vec_env = vec_env = env.vec_env  # type: ignore[attr-defined]
        assert isinstance(vec_env, ParallelVecEnv)
        vec_env.seed(seed)
        rows = {key: [np.zeros((vec_env.n, *f.shape), f.dtype) for _ in range(2)] for key, f in vec_env.schema.items()}
        vec_env.restart({key: row for key, (row, _) in rows.items()}, range(vec_env.n))
        self.one_step, self.reset = vec_env.bind(rows)
        if actions is None:
            count = int(vec_env.spaces[1].n)
            actions = np.random.default_rng(0).integers(count, size=(256, vec_env.n))
        self.actions = actions.astype(vec_env.actions.dtype)

    def steps(self, count: int, gap: float = 0.0) -> np.ndarray:
        """Step all envs, a pause of so many seconds before each; return which ended when."""
        over, now = np.zeros((count, self.vec_env.n), bool), time.perf_counter
        for t in range(count):
            begins = now() + gap
            while now() < begins:
                pass
            done = self.one_step(0, self.actions[t % len(self.actions)])
            if len(done):
                over[t, done] = True
                self.reset(0, done)
        self.vec_env.take_outcome()
        return over


def measure(settings: dict[str, Any]) -> Report:
    """Time the same envs at every pause in turn."""
    report = Report("gaps", settings, unit="step of all envs")
    recipe, name = env_of(settings["cost"])
    num, gaps, steps = settings["env.num"], settings["gaps"], settings["steps"]
    with envs_in_processes(num, recipe, settings["workers"] or None) as given:
        report.sides = fill(sides(given, recipe, steps, gaps), settings["rounds"], settings["seconds"], steps)
        report.figures = figures({side.name: side for side in report.sides}, gaps, given)
        report.note(f"{num} x {name} in {len(given.vec_env.parts)} processes, {cores()} cores")
    return report


def env_of(cost: int) -> tuple[GymRecipe, str]:
    """Return an env whose step computes for so many microseconds; Pong as its recipe has it, where `cost` is 0."""
    if cost or env_problems(PONG):
        return busy(cost or 850), f"env of {cost or 850} us"
    return configured(configure("train", ["recipe=ppo_pong"]).env), "Pong"


@contextlib.contextmanager
def envs_in_processes(num: int, recipe: GymRecipe, workers: int | None = None) -> Any:
    make = partial(GymEnv, recipe, categorical_action_encoding=True, narrow=True)
    with contextlib.closing(ParallelEnv(num, make, workers=workers, caller_steps=True if workers else None)) as env:
        yield Given(env, 0)


def sides(given: Given, recipe: GymRecipe, steps: int, gaps: Sequence[int]) -> dict[str, Callable[[], Any]]:
    alone = bare(recipe.make, max(map(len, given.vec_env.parts)))
    paused = {f"{gap} us between orders": partial(given.steps, steps, gap / 1e6) for gap in gaps}
    return {ALONE: partial(alone, steps), **paused}


def figures(timed: Mapping[str, Side], gaps: Sequence[int], given: Given) -> list[Figure]:
    """Return microseconds of a step beyond the envs' own, and what of them the pause brought."""
    own, *paused = timed.values()
    beyond = [1e6 * (side.median - own.median) - gap for side, gap in zip(paused, gaps, strict=True)]
    bar = MOST if cores() >= len(given.vec_env.parts) else ""  # else all sleep, and there is nothing to keep awake
    found = []
    for gap, x in zip(gaps, beyond, strict=True):
        after = f"{gap} us between orders"
        found.append(Figure(f"a step beyond the envs' own, {after}", x, "us"))
        if gap > gaps[0]:
            found.append(Figure(f"a step more than with {gaps[0]} us, {after}", x - beyond[0], "us", bar))
    return found
