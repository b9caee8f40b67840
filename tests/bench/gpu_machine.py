"""Parts of `python -m tests.bench gpu` that a whole machine decides: env processes beside a GPU, memory, a start."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

import rlcli
from rlcli.bench.settings import env_problems
from rlcli.build.collecting import collector_alone
from rlcli.build.env import build_env
from rlcli.config.compose import configure
from rlcli.config.schemas import CollectConfig
from rlcli.errors import ResourceError
from tests.bench import gaps
from tests.bench.commands import rlcli as command
from tests.bench.gpu_part import AUTO, Part

GIVEN = "bare envs, given actions"
QUIET = ["console=off", "logger=none", "run.eval_episodes=0"]


# ---- env processes ---------------------------------------------------------------------------------------------------
def workers(part: Part) -> None:
    """Collecting with a policy over the same processes given actions; and what a pause between orders costs."""
    why = [*map(str, env_problems(gaps.PONG))]
    if why and not part.tiny:
        part.refuse(f"Pong: {AUTO} over {GIVEN}", why[0])
    else:
        _collecting(part, *part.pick(("Pong", "ppo_pong", 128), ("CartPole", "ppo_exact", 16)))
    num, steps, cost = part.pick((8, 64, 0), (2, 16, 50))
    recipe, name = gaps.env_of(cost)
    with gaps.envs_in_processes(num, recipe) as given:
        timed = part.fill(f"{num} x {name}", sides := gaps.sides(given, recipe, steps, gaps.GAPS), steps, share=0.4)
        for found in gaps.figures(timed, gaps.GAPS, given) if len(timed) == len(sides) else ():
            part.figure(f"{num} x {name}: {found.name}", found.value, found.unit, found.bar)


def _collecting(part: Part, name: str, recipe: str, steps: int) -> None:
    words = [f"recipe={recipe}", f"device={part.settings['device']}", "env.mode=parallel", "total_frames=1000000000"]
    cfg = configure("train", [*words, f"env.num={part.pick(8, 2)}"])
    cfg.collector.frames_per_batch = cfg.env.num * steps
    with collector_alone(cfg) as collector:
        batch = next(batches := iter(collector))
        actions = batch["action"].cpu().numpy().swapaxes(0, 1)
        ended = batch["next", "done"][..., 0].cpu().numpy().swapaxes(0, 1)
        with _given(cfg, actions) as given:
            part.same(f"{name}: ends of episodes with the actions that {AUTO} took", _differ(given, ended), 0.0)
            sides = {AUTO: partial(next, batches), GIVEN: partial(given.steps, steps)}
            timed = part.fill(name, sides, steps, share=0.4)
    part.ratio(timed, GIVEN, AUTO, ">= 0.75")
    for side in timed.values():
        part.figure(side.name.partition(", ")[2], cfg.env.num / side.median, "frames/s")


@contextlib.contextmanager
def _given(cfg: CollectConfig, actions: np.ndarray) -> Iterator[gaps.Given]:
    with contextlib.closing(build_env(cfg.env)) as env:
        yield gaps.Given(env, cfg.seed, actions)


def _differ(given: gaps.Given, ended: np.ndarray) -> float:
    return float((given.steps(len(ended)) != ended).sum())


# ---- a run of its own ------------------------------------------------------------------------------------------------
STARTED = """
import json, sys, time
began, path, device, words = float(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]
from rlcli.vec_envs.gym_vec_env import GymVecEnv
from rlcli.vec_envs.native_vec_env import NativeVecEnv
from rlcli.vec_envs.parallel_vec_env import ParallelVecEnv
seen = {}

def told(plain):
    def bind(self, rows):
        step, reset = plain(self, rows)
        def first(t, actions):
            found = step(t, actions)
            seen.setdefault("first frame", time.time() - began)
            return found
        return first, reset
    return bind

for kind in (GymVecEnv, NativeVecEnv, ParallelVecEnv):
    kind.bind = told(kind.bind)
from rlcli.cli.main import main
try:
    code = main(["train", *words])
finally:
    if device != "cpu":
        import torch
        free, total = torch.cuda.mem_get_info()
        seen["used"] = total - free
    json.dump(seen, open(path, "w"))
sys.exit(code)
"""


def start(part: Part) -> None:
    """A run in a process of its own, what it compiles cached: seconds to its first frame, memory beside its plan."""
    recipe, frames = part.pick(("ppo_pong", 2048), ("ppo_exact", 2048))
    if recipe == "ppo_pong" and (why := env_problems(gaps.PONG)):
        part.refuse("Pong: all but resuming", str(why[0]))
    else:
        words = [f"recipe={recipe}", f"device={part.settings['device']}", *QUIET, f"total_frames={frames}"]
        with tempfile.TemporaryDirectory() as folder:
            _run_apart(part, folder, "cold", words)
            seen, summary = _run_apart(part, folder, "warm", words)
        part.figure(f"{recipe}: from the command to the first frame", seen["first frame"], "s", "<= 6")
        process = summary["memory"]["process"]
        part.figure(f"{recipe}: peak of the process", process["peak"] / 2**20, "MiB")
        off = 100 * abs(process["peak"] / process["planned"] - 1)
        part.figure(f"{recipe}: off the plan", off, "%", "<= 5")
        if "used" in seen:
            places = json.loads(command("plan", "train", *words, "--json"))["places"]
            need = next(place["need"] for place in places if place["name"].startswith("cuda"))
            part.figure(f"{recipe}: of the GPU, context and libraries included", seen["used"] / 2**20, "MiB")
            part.figure(f"{recipe}: GPU, off the plan", 100 * abs(seen["used"] / need - 1), "%", "<= 10")
    _resumed(part)


def _run_apart(part: Part, folder: str, name: str, words: list[str]) -> tuple[dict[str, float], dict[str, Any]]:
    def used() -> int:
        free, total = torch.cuda.mem_get_info(part.device)
        return total - free

    before = used() if part.device.type == "cuda" else 0
    path, run = f"{folder}/{name}.json", f"{folder}/{name}"
    given = [sys.executable, "-c", STARTED, str(time.time()), path, part.device.type, *words, f"run.dir={run}"]
    done = subprocess.run(given, capture_output=True, text=True, timeout=max(10.0, part.left))
    if done.returncode:
        raise ResourceError(f"a run of its own exited {done.returncode}", why=done.stderr.strip()[-400:])
    with open(path, encoding="utf-8") as file, open(f"{run}/summary.json", encoding="utf-8") as summary:
        seen = json.load(file)
        if "used" in seen:
            seen["used"] -= before
        return seen, json.load(summary)


def _resumed(part: Part) -> None:
    """A run that was stopped half-way against one that was not: how many weights differ in a bit."""
    words = ["recipe=ppo_exact", f"device={part.settings['device']}", *QUIET, "optim.anneal_lr=false"]
    frames = 2048
    with tempfile.TemporaryDirectory() as folder:
        whole = rlcli.train([*words, f"total_frames={2 * frames}", f"run.dir={folder}/whole"])
        half = rlcli.train([*words, f"total_frames={frames}", f"run.dir={folder}/half"])
        half = rlcli.resume(half.path, [f"total_frames={2 * frames}"])
        a, b = (
            torch.cat([p.detach().cpu().flatten() for p in rlcli.load(run.path).actor.parameters()])
            for run in (whole, half)
        )
    differ = float((a.view(torch.int32) != b.view(torch.int32)).sum())
    part.figure("ppo_exact, resumed half-way: weights that differ in a bit", differ, f"of {len(a):,}", "<= 0")
