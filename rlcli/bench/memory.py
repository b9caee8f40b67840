"""`rlcli bench memory`: bytes of a stored step in every storage, what compressing costs in time, plans against runs.

Atari frames are of random play, stacked by four. What each storage gives back is compared with what was collected.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDictBase

from rlcli.bench.harness import Figure, Report, interleave, ratio
from rlcli.bench.peers import buffers as peers
from rlcli.bench.settings import SETTINGS, env_problems, read
from rlcli.collectors import Collector
from rlcli.config import build
from rlcli.config.schemas import AtariConfig, EnvConfig
from rlcli.data import LazyTensorStorage, TensorDictReplayBuffer, full_next_obs
from rlcli.data.storages import CompressedStorage
from rlcli.errors import NumericsError, ResourceError
from rlcli.keys import Key

STACK, PART = 4, 500
KEYS: list[Key] = [
    "observation",
    ("next", "observation"),
    "action",
    ("next", "reward"),
    ("next", "done"),
    ("next", "terminated"),
]


def run(overrides: list[str]) -> dict[str, Any]:
    """Measure; the result is `Report.as_dict()`."""
    return measure(overrides).as_dict()


def measure(overrides: list[str]) -> Report:
    """CartPole rows, Atari stacks, plans."""
    given = read(SETTINGS["memory"], overrides)
    torch.set_num_threads(given["threads"])
    report = Report("memory", given, unit="sample")
    if given["peers"] and peers.torchrl(1) is None:
        report.notes.append("torchrl is not installed: left out (pip install 'rlcli[peers]')")
    _cartpole(report, given)
    _games(report, given)
    for recipe in _words(given["recipes"]):
        _plan(report, recipe)
    return report


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


# ---- rows ----------------------------------------------------------------------------------------------------------
def _cartpole(report: Report, given: dict[str, Any]) -> None:
    """A row of a vector env, in memory."""
    batches = list(_frames(EnvConfig(num=8), given["frames"]))
    for name, codes, bar in (("CartPole row, exact, packed", True, "<= 30"), ("CartPole row, exact", False, "")):
        ours = _buffer(LazyTensorStorage, given["frames"] + PART, given, codes=codes)
        for batch in batches:
            ours.extend(batch)
        _check(name, ours, batches)
        report.figures.append(Figure(name, _bytes(ours), "B", bar))
    if (upstream := _upstream(batches, given)) is not None:
        report.figures.append(Figure("CartPole row, torchrl", upstream, "B"))


def _frames(cfg: EnvConfig, frames: int) -> Iterator[TensorDictBase]:
    """Batches of random play, `exact`, flat in time."""
    env = build.build_env(cfg)
    collector = Collector(env, frames_per_batch=PART, total_frames=frames, next_obs="exact", seed=0, keep_keys=KEYS)
    try:
        yield from collector  # type: ignore[misc]
    finally:
        collector.shutdown()


def _buffer(
    kind: Callable[..., Any], rows: int, given: dict[str, Any], frame_stack: int | None = None, codes: bool = False
) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=kind(rows), batch_size=given["batch_size"], next_obs="exact", frame_stack=frame_stack, codes=codes
    )


def _bytes(buffer: TensorDictReplayBuffer) -> float:
    """Of a stored step: rows, index and next observations that no row holds."""
    return buffer.ring.nbytes / max(len(buffer), 1)


def _upstream(batches: list[TensorDictBase], given: dict[str, Any]) -> float | None:
    """Bytes of a step in torchrl's tensor storage; a few hundred of them show it."""
    buffer = peers.torchrl(PART) if given["peers"] else None
    if buffer is None:
        return None
    first = full_next_obs(batches[0]).reshape(-1)
    buffer.extend(first)
    return peers.nbytes(buffer) / len(buffer)


def _check(name: str, buffer: TensorDictReplayBuffer, batches: list[TensorDictBase]) -> None:
    """Every key of every row, next observations at episode ends too."""
    start = 0
    for batch in batches:
        wanted = full_next_obs(batch).reshape(-1)
        held = buffer[torch.arange(start, start + len(wanted))]
        for key in wanted.keys(True, True):
            if not torch.equal(held.get(key).reshape(wanted.get(key).shape), wanted.get(key)):
                raise NumericsError(f"{name}: a row is not what was collected", where=str(key))
        start += len(wanted)


# ---- games ---------------------------------------------------------------------------------------------------------
def _games(report: Report, given: dict[str, Any]) -> None:
    ids = [f"ALE/{name}-v5" for name in _words(given["games"])]
    if ids and (problems := env_problems(ids[0])):
        report.notes.append(f"games are left out: {problems[0]}")
        return
    packed = []
    for env_id in ids:
        packed.append(_game(report, given, env_id, EnvConfig(kind="atari", id=env_id, num=1, frame_stack=STACK)))
    if packed:
        mean = sum(packed) / len(packed)
        report.figures.append(Figure(f"stacks of {len(packed)} games, compressed", mean, "B", "<= 400"))
        colours = EnvConfig(kind="atari", id=ids[0], num=1, frame_stack=STACK, atari=AtariConfig(grayscale=False))
        _game(report, given, f"{ids[0]} in colour", colours, timed=False)


def _game(report: Report, given: dict[str, Any], name: str, cfg: EnvConfig, timed: bool = True) -> float:
    """Bytes of a step compressed; the plain tier and the time of both go to the report."""
    batches = list(_frames(cfg, given["frames"]))
    rows = sum(batch.numel() for batch in batches)
    whole = _buffer(LazyTensorStorage, rows, given)
    plain, packed = (_buffer(kind, rows, given, STACK) for kind in (LazyTensorStorage, CompressedStorage))
    for batch in batches:
        for buffer in (whole, plain, packed):
            buffer.extend(batch)
    _check(f"{name}, stacks whole", whole, batches)
    _check(name, plain, batches)
    _check(f"{name}, compressed", packed, batches)
    report.checks[f"rows of {name}"] = f"{rows:,} as collected in every storage, next observations at ends too"
    bar = "<= 7200" if "Pong" in name and timed else ""
    report.figures.append(Figure(f"{name}, exact, stacks whole", _bytes(whole), "B"))
    report.figures.append(Figure(f"{name}, exact, each frame once", _bytes(plain), "B", bar))
    report.figures.append(Figure(f"{name}, compressed", _bytes(packed), "B"))
    if timed and (upstream := _upstream(batches, given)) is not None:
        report.figures.append(Figure(f"{name}, torchrl", upstream, "B"))
    if timed:
        _time(report, given, name, plain, packed)
    return _bytes(packed)


def _time(report: Report, given: dict[str, Any], name: str, plain: Any, packed: Any) -> None:
    def draws(buffer: Any) -> Callable[[], Any]:
        return lambda: [buffer.sample() for _ in range(given["calls"])]

    sides = {f"{name}, plain": draws(plain), f"{name}, compressed": draws(packed)}
    report.sides += interleave(sides, given["rounds"], per=given["calls"])
    report.ratios.append(ratio(report.sides, f"{name}, compressed", f"{name}, plain", "<= 3"))


# ---- plans ---------------------------------------------------------------------------------------------------------
def _plan(report: Report, recipe: str) -> None:
    """`rlcli plan` in one process, the run in another."""
    words = [f"recipe={recipe}", "console=off"]
    said = json.loads(_rlcli("plan", "train", *words, "--json"))
    with tempfile.TemporaryDirectory() as folder:
        _rlcli("train", *words, "total_frames=5000", f"run.dir={folder}/first")  # compiling once is not the run's
        _rlcli("train", *words, f"run.dir={folder}/run")
        with open(f"{folder}/run/summary.json", encoding="utf-8") as file:
            process = json.load(file)["memory"]["process"]
    own = process["peak"] - process["imported"]
    report.figures += [
        Figure(f"{recipe}: peak of the process", process["peak"] / 2**20, "MiB"),
        Figure(f"{recipe}: off the plan", abs(process["peak"] / said["total"] - 1) * 100, "%", "<= 5"),
        Figure(f"{recipe}: off the plan, imports aside", abs(own / said["own"] - 1) * 100, "%", "<= 15"),
    ]


def _rlcli(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "rlcli", *words], capture_output=True, text=True)
    if done.returncode:
        raise ResourceError(f"rlcli {' '.join(words)} exited {done.returncode}", why=done.stderr.strip()[-400:])
    return done.stdout
