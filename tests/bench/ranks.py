"""`python -m tests.bench ranks`: a run of one process, and the same divided among ranks, with fast envs and slow ones.

Seconds are the runs' own, without start and compilation: of all that follows the first report.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium as gym

import rlcli
from rlcli.bench.harness import Report, Side, ratio

FRAMES = 1024  # of a batch


@rlcli.register_env("cartpole_waits")
def cartpole_waits(seconds: float = 0.0) -> gym.Env:
    """CartPole that takes so many seconds for a step, as a simulator in another program does."""

    class Waits(gym.Wrapper):
        def step(self, action):
            if seconds:
                time.sleep(seconds)
            return super().step(action)

    return Waits(gym.make("CartPole-v1"))


def measure(settings: dict[str, Any]) -> Report:
    """Run in turns; a unit is a frame of a PPO run."""
    size, frames = settings["ranks"], settings["frames"]
    report = Report("ranks", settings, unit="frame")
    for wait in (0.0, settings["wait"]):
        case = f"envs of {1e3 * wait:g} ms" if wait else "CartPole"
        sides = [Side(f"{case}, {n} {'ranks' if n > 1 else 'process'}", [], frames) for n in (1, size)]
        for turn in range(settings["rounds"]):
            for n, side in [*zip((1, size), sides, strict=True)][:: 1 if turn % 2 else -1]:
                side.seconds.append(_seconds(n, frames, wait))
        report.sides += sides
        report.ratios.append(ratio(sides, sides[0].name, sides[1].name))
    return report


def _seconds(size: int, frames: int, wait: float) -> float:
    words = [
        "recipe=ppo_exact", "env.id=cartpole_waits", f"env.kwargs={{seconds: {wait}}}", "env.mode=serial",
        f"learner.world_size={size}", f"total_frames={frames + FRAMES}", f"collector.frames_per_batch={FRAMES}",
        "run.eval_episodes=0", "logger=none", "console=off", "--import", "tests.bench.ranks",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        subprocess.run([sys.executable, "-m", "rlcli", "train", *words, f"run.dir={run}"], check=True)
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    records = [record for record in records if "frames" in record]
    return records[-1]["seconds"] - records[0]["seconds"]
