"""`rlcli bench memory`: bytes of a stored step in every storage, what compressing costs in time, plans against runs.

Atari frames of the bars are of random play, stacked by four; better play and RGB pictures stand beside them
(`memory_play` says whose). What each storage gives back is compared with what was collected.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase

from rlcli.bench.harness import Figure, Report, interleave, ratio
from rlcli.bench.memory_play import PART, play, pong_by_rule, rlcli, trained_cartpole
from rlcli.bench.peers import buffers as peers
from rlcli.bench.settings import env_problems
from rlcli.config.schemas import AtariConfig, EnvConfig
from rlcli.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer, full_next_obs
from rlcli.data.storages import CompressedStorage
from rlcli.errors import NumericsError

STACK = 4


def measure(settings: dict[str, Any]) -> Report:
    """CartPole rows, Atari stacks, plans."""
    report = Report("memory", settings, unit="sample")
    if settings["peers"] and peers.torchrl(1) is None:
        report.leave_out("torchrl")
    _cartpole(report, settings)
    _games(report, settings)
    if settings["trained"]:
        _trained(report, settings)
    for recipe in _words(settings["recipes"]):
        _plan(report, recipe)
    return report


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


# ---- rows ----------------------------------------------------------------------------------------------------------
def _cartpole(report: Report, settings: dict[str, Any]) -> None:
    """A row of a vector env, in memory and in files that are kept."""
    batches = list(play(EnvConfig(num=8), settings["frames"]))
    with tempfile.TemporaryDirectory() as folder:

        def kept(rows: int) -> LazyMemmapStorage:
            return LazyMemmapStorage(rows, scratch_dir=f"{folder}/rows")

        for name, kind, codes, bar in (
            ("CartPole row, exact, packed", LazyTensorStorage, True, "<= 30"),
            ("CartPole row, exact, packed, on disk", kept, True, "<= 30"),
            ("CartPole row, exact", LazyTensorStorage, False, ""),
        ):
            ours = _buffer(kind, settings["frames"] + PART, settings, codes=codes)
            with ours:
                for batch in batches:
                    ours.extend(batch)
                _check(name, ours, batches)
                report.figures.append(Figure(name, _bytes(ours), "B", bar))
    if (upstream := _upstream(batches, settings)) is not None:
        report.figures.append(Figure("CartPole row, torchrl", upstream, "B"))


def _buffer(
    kind: Callable[..., Any], rows: int, settings: dict[str, Any], frame_stack: int | None = None, codes: bool = False
) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=kind(rows), batch_size=settings["batch_size"], next_obs="exact", frame_stack=frame_stack, codes=codes
    )


def _bytes(buffer: TensorDictReplayBuffer) -> float:
    """Of a stored step: rows, index and next observations that no row holds."""
    return buffer.ring.nbytes / max(len(buffer), 1)


def _upstream(batches: list[TensorDictBase], settings: dict[str, Any]) -> float | None:
    """Bytes of a step in torchrl's tensor storage; a few hundred of them show it."""
    buffer = peers.torchrl(PART) if settings["peers"] else None
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
def _games(report: Report, settings: dict[str, Any]) -> None:
    ids = [f"ALE/{name}-v5" for name in _words(settings["games"])]
    if ids and (problems := env_problems(ids[0])):
        report.notes.append(f"games are left out: {problems[0]}")
        return
    packed = []
    for env_id in ids:
        batches = list(play(_atari(env_id), settings["frames"]))
        packed.append(_game(report, settings, env_id, batches, bar="<= 7200" if "Pong" in env_id else ""))
    if packed:
        mean = sum(packed) / len(packed)
        report.figures.append(Figure(f"stacks of {len(packed)} games, compressed", mean, "B", "<= 400"))
        batches = list(pong_by_rule(_atari("ALE/Pong-v5"), settings["frames"]))
        _game(report, settings, "Pong by rule (not learned)", batches, beside=True)
        colours = _atari(ids[0], AtariConfig(grayscale=False))
        _game(report, settings, f"{ids[0]} in colour", list(play(colours, settings["frames"])), beside=True)


def _atari(env_id: str, atari: AtariConfig | None = None) -> EnvConfig:
    return EnvConfig(kind="atari", id=env_id, num=1, frame_stack=STACK, atari=atari or AtariConfig())


def _trained(report: Report, settings: dict[str, Any]) -> None:
    """RGB pictures, not stacked, of a policy's own play."""
    batches, mean_return = trained_cartpole(settings["frames"])
    name = "CartPole drawn in RGB, trained policy"
    report.checks[name] = f"ppo_exact, mean return {mean_return:.0f}"
    _game(report, settings, name, batches, beside=True, frame_stack=None)


def _game(
    report: Report, settings: dict[str, Any], name: str, batches: list[TensorDictBase], *, bar: str = "",
    beside: bool = False, frame_stack: int | None = STACK,
) -> float:  # fmt: skip
    """Bytes of a step compressed; the plain tier and the time of both go to the report.

    What stands `beside` the bars is neither timed nor compared with others.
    """
    rows = sum(batch.numel() for batch in batches)
    plain, packed = (_buffer(kind, rows, settings, frame_stack) for kind in (LazyTensorStorage, CompressedStorage))
    buffers = {"exact, each frame once": plain, "compressed": packed}
    if frame_stack is not None:
        buffers = {"exact, stacks whole": _buffer(LazyTensorStorage, rows, settings), **buffers}
    for tier, buffer in buffers.items():
        for batch in batches:
            buffer.extend(batch)
        _check(f"{name}, {tier}", buffer, batches)
        limit = bar if buffer is plain else ""
        report.figures.append(Figure(f"{name}, {tier}", _bytes(buffer), "B", limit))
    report.checks[f"rows of {name}"] = f"{rows:,} as collected in every storage, next observations at ends too"
    if not beside:
        if (upstream := _upstream(batches, settings)) is not None:
            report.figures.append(Figure(f"{name}, torchrl", upstream, "B"))
        _time(report, settings, name, plain, packed)
    return _bytes(packed)


def _time(report: Report, settings: dict[str, Any], name: str, plain: Any, packed: Any) -> None:
    def draws(buffer: Any) -> Callable[[], Any]:
        return lambda: [buffer.sample() for _ in range(settings["calls"])]

    sides = {f"{name}, plain": draws(plain), f"{name}, compressed": draws(packed)}
    report.sides += interleave(sides, settings["rounds"], per=settings["calls"])
    report.ratios.append(ratio(report.sides, f"{name}, compressed", f"{name}, plain", "<= 3"))


# ---- plans ---------------------------------------------------------------------------------------------------------
def _plan(report: Report, recipe: str) -> None:
    """`rlcli plan` in one process, the run in another."""
    words = [f"recipe={recipe}", "console=off"]
    said = json.loads(rlcli("plan", "train", *words, "--json"))
    with tempfile.TemporaryDirectory() as folder:
        rlcli("train", *words, "total_frames=5000", f"run.dir={folder}/first")  # compiling once is not the run's
        rlcli("train", *words, f"run.dir={folder}/run")
        with open(f"{folder}/run/summary.json", encoding="utf-8") as file:
            process = json.load(file)["memory"]["process"]
    own = process["peak"] - process["imported"]
    report.figures += [
        Figure(f"{recipe}: peak of the process", process["peak"] / 2**20, "MiB"),
        Figure(f"{recipe}: off the plan", abs(process["peak"] / said["total"] - 1) * 100, "%", "<= 5"),
        Figure(f"{recipe}: off the plan, imports aside", abs(own / said["own"] - 1) * 100, "%", "<= 15"),
    ]
