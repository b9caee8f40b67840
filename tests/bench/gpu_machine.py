"""Parts of `python -m tests.bench gpu` that a whole machine decides: env processes beside a GPU, memory, a start."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

import rlcli
from rlcli.bench.bare_envs import bare, busy
from rlcli.bench.harness import rlcli as command
from rlcli.bench.settings import env_problems
from rlcli.build.collecting import collector_alone
from rlcli.build.env import build_env, configured
from rlcli.config.compose import configure
from rlcli.config.schemas import CollectConfig
from rlcli.envs import EnvBase, GymEnv, ParallelEnv, TransformedEnv
from rlcli.errors import ResourceError
from rlcli.processes.process import cores
from rlcli.vec_envs.parallel_vec_env import ParallelVecEnv
from tests.bench.gpu_part import AUTO, Part

PONG, GIVEN = "ALE/Pong-v5", "bare envs, given actions"
QUIET = ["console=off", "logger=none", "run.eval_episodes=0"]
GAPS = (0.0, 0.1, 0.5, 2.5)  # milliseconds between the end of a step and the next order
NO_CORES = "processes outnumber the cores, so that none of them is awake while it waits"


# ---- env processes ---------------------------------------------------------------------------------------------------
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
        """Step all envs, the gap between two orders spent awake; return which ended when."""
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


def workers(part: Part) -> None:
    """Collecting with a policy over the same processes given actions; and what a pause between orders costs."""
    why = [*map(str, env_problems(PONG))]
    if why and not part.tiny:
        part.refuse(f"Pong: {AUTO} over {GIVEN}", why[0])
    else:
        _collecting(part, *part.pick(("Pong", "ppo_pong", 128), ("CartPole", "ppo_exact", 16)))
    num = part.pick(8, 2)
    if part.tiny or why:
        cost = part.pick(850, 50)
        recipe, name = busy(cost), f"envs of {cost} us"
    else:
        recipe, name = configured(configure("train", ["recipe=ppo_pong"]).env), "Pong"
    make = partial(GymEnv, recipe, categorical_action_encoding=True, narrow=True)
    with contextlib.closing(ParallelEnv(num, make)) as env:
        _gaps(part, f"{num} {name}", Given(env, 0), partial(bare, recipe.make))


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
def _given(cfg: CollectConfig, actions: np.ndarray) -> Iterator[Given]:
    with contextlib.closing(build_env(cfg.env)) as env:
        yield Given(env, cfg.seed, actions)


def _differ(given: Given, ended: np.ndarray) -> float:
    return float((given.steps(len(ended)) != ended).sum())


def _gaps(part: Part, name: str, given: Given, bare_envs: Callable[[int], Callable[[int], None]]) -> None:
    steps, parts = part.pick(64, 16), given.vec_env.parts
    share = max(map(len, parts))
    sides: dict[str, Callable[[], Any]] = {"one process's share, nothing around it": partial(bare_envs(share), steps)}
    sides |= {f"{gap} ms between orders": partial(given.steps, steps, gap / 1e3) for gap in GAPS}
    timed = part.fill(name, sides, steps, share=0.4)
    if len(timed) < len(sides):
        return
    spare = cores() >= len(parts)
    if not spare:
        part.report.note(f"workers, {name}: {NO_CORES}")
    own, *others = timed.values()
    beyond = [1e6 * (side.median - own.median) - 1e3 * gap for side, gap in zip(others, GAPS, strict=True)]
    for gap, each in zip(GAPS, beyond, strict=True):
        part.figure(f"{name}: a step beyond the envs' own, {gap} ms between orders", each, "us")
        if gap:
            bar = "<= 100" if spare else ""
            part.figure(f"{name}: more than with no gap, {gap} ms between orders", each - beyond[0], "us", bar)


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
    if recipe == "ppo_pong" and (why := env_problems(PONG)):
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
