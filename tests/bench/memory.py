"""`python -m tests.bench memory`: bytes of a stored step in every storage, time to compress, plans against runs.

What each storage gives back is compared with what was collected. Atari frames of the bars are of random play, stacked
by four; beside them stand a paddle by rule, which has the long rallies of good play and is not learned (no Atari policy
comes with rlcli, and training one takes hours), and RGB pictures of CartPole as a newly trained policy plays it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from rlcli.bench.harness import Figure, Report, interleave, ratio
from rlcli.bench.settings import env_problems
from rlcli.build.env import build_env
from rlcli.collectors import Collector
from rlcli.config.compose import configure
from rlcli.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer, full_next_obs
from rlcli.data.storages import CompressedStorage
from rlcli.errors import NumericsError
from rlcli.keys import Key
from tests.bench.commands import rlcli
from tests.bench.peers.buffers import torchrl_bytes

STACK = 4
PART = 500
KEYS: list[Key] = ["observation", ("next", "observation"), "action", ("next", "reward"), ("next", "done"),
                   ("next", "terminated")]  # fmt: skip
_SIDE = 84
_UP, _DOWN = 2, 3  # of Pong's actions


def measure(settings: dict[str, Any]) -> Report:
    for recipe in _words(settings["recipes"]):
        configure("train", _words_of(recipe))  # what cannot be run is refused before anything is measured
    report = Report("memory", settings, unit="sample")
    ids = _playable(report, settings)
    _cartpole(report, settings)
    _games(report, settings, ids)
    if settings["trained"]:
        _trained(report, settings)
    for recipe in _words(settings["recipes"]):
        _plan(report, recipe)
    return report


def _words_of(recipe: str) -> list[str]:
    return [f"recipe={recipe}", "console=off"]


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


# ---- rows ----------------------------------------------------------------------------------------------------------
def _cartpole(report: Report, settings: dict[str, Any]) -> None:
    """Measure a row of a vector env, in memory and in files that are kept."""
    batches = list(play(["env.num=8"], settings["frames"]))
    with tempfile.TemporaryDirectory() as folder:

        def kept(rows: int) -> LazyMemmapStorage:
            return LazyMemmapStorage(rows, scratch_dir=f"{folder}/rows")

        for name, kind, codes, bar in (
            ("CartPole row, exact, packed", LazyTensorStorage, {"action": 2}, "<= 30"),
            ("CartPole row, exact, packed, on disk", kept, {"action": 2}, "<= 30"),
            ("CartPole row, exact", LazyTensorStorage, False, ""),
        ):
            ours = _buffer(kind, settings["frames"] + PART, settings, codes=codes)
            with ours:
                for batch in batches:
                    ours.extend(batch)
                _check(name, ours, batches)
                report.figures.append(Figure(name, _bytes(ours), "B", bar))
    _upstream(report, "CartPole row", batches, settings)


def _buffer(
    kind: Callable[..., Any], rows: int, settings: dict[str, Any], frame_stack: int | None = None, codes: Any = False
) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=kind(rows), batch_size=settings["batch_size"], next_obs="exact", frame_stack=frame_stack, codes=codes
    )


def _bytes(buffer: TensorDictReplayBuffer) -> float:
    """Return bytes of a stored step: rows, index and next observations that no row holds."""
    return buffer.ring.nbytes / max(len(buffer), 1)


def _upstream(report: Report, name: str, batches: list[TensorDictBase], settings: dict[str, Any]) -> None:
    """Add bytes of a step in torchrl's tensor storage; a few hundred of them show it."""
    size = report.peer("torchrl", torchrl_bytes, full_next_obs(batches[0]).reshape(-1))
    if size is not None:
        report.figures.append(Figure(f"{name}, torchrl", size, "B"))


def _check(name: str, buffer: TensorDictReplayBuffer, batches: list[TensorDictBase]) -> None:
    """Check every key of every row, next observations at episode ends too."""
    start = 0
    for batch in batches:
        wanted = full_next_obs(batch).reshape(-1)
        stored = buffer[torch.arange(start, start + len(wanted))]
        for key in wanted.keys(True, True):
            if not torch.equal(stored.get(key).reshape(wanted.get(key).shape), wanted.get(key)):
                raise NumericsError(f"{name}: a row is not what was collected", where=str(key))
        start += len(wanted)


# ---- games ---------------------------------------------------------------------------------------------------------
def _playable(report: Report, settings: dict[str, Any]) -> list[str]:
    """Return the games' ids; none where the emulator is not installed."""
    ids = [f"ALE/{name}-v5" for name in _words(settings["games"])]
    if ids and (problems := env_problems(ids[0])):
        report.notes.append(f"games are left out: {problems[0]}")
        return []
    for env_id in ids:
        build_env(configure("collect", _atari(env_id)).env).close()  # a name that there is not is refused now
    return ids


def _games(report: Report, settings: dict[str, Any], ids: list[str]) -> None:
    packed = []
    for env_id in ids:
        batches = list(play(_atari(env_id), settings["frames"]))
        packed.append(_game(report, settings, env_id, batches, bar="<= 7200" if "Pong" in env_id else ""))
    if packed:
        mean = sum(packed) / len(packed)
        report.figures.append(Figure(f"stacks of {len(packed)} games, compressed", mean, "B", "<= 400"))
        by_rule = TensorDictModule(Paddle(), ["observation"], ["action"])
        batches = list(play(_atari("ALE/Pong-v5"), settings["frames"], by_rule))
        _game(report, settings, "Pong by rule (not learned)", batches, beside=True)
        colours = [*_atari(ids[0]), "env.atari.grayscale=false"]
        _game(report, settings, f"{ids[0]} in colour", list(play(colours, settings["frames"])), beside=True)


def _atari(env_id: str) -> list[str]:
    return ["env=atari", f"env.id={env_id}", "env.num=1", f"env.frame_stack={STACK}"]


def _trained(report: Report, settings: dict[str, Any]) -> None:
    """Measure RGB pictures, not stacked, of a policy's own play."""
    batches, mean_return = trained_cartpole(settings["frames"])
    name = "CartPole drawn in RGB, trained policy"
    report.checks[name] = f"ppo_exact, mean return {mean_return:.0f}"
    _game(report, settings, name, batches, beside=True, frame_stack=None)


def _game(
    report: Report, settings: dict[str, Any], name: str, batches: list[TensorDictBase], *, bar: str = "",
    beside: bool = False, frame_stack: int | None = STACK,
) -> float:  # fmt: skip
    """Return bytes of a step compressed; report the plain tier, and the times of both unless it stands `beside`."""
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
        _upstream(report, name, batches, settings)
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
    """Compare `rlcli plan` in one process with the run in another."""
    words = _words_of(recipe)
    plan = json.loads(rlcli("plan", "train", *words, "--json"))
    with tempfile.TemporaryDirectory() as folder:
        rlcli("train", *words, "total_frames=5000", f"run.dir={folder}/first")  # compiling once is not the run's
        rlcli("train", *words, f"run.dir={folder}/run")
        with open(f"{folder}/run/summary.json", encoding="utf-8") as file:
            process = json.load(file)["memory"]["process"]
    made = process["peak"] - process["imported"]
    report.figures += [
        Figure(f"{recipe}: peak of the process", process["peak"] / 2**20, "MiB"),
        Figure(f"{recipe}: off the plan", abs(process["peak"] / plan["total"] - 1) * 100, "%", "<= 5"),
        Figure(f"{recipe}: off the plan, imports aside", abs(made / plan["own"] - 1) * 100, "%", "<= 15"),
    ]


# ---- what is played ------------------------------------------------------------------------------------------------


def play(words: list[str], frames: int, policy: nn.Module | None = None) -> Iterator[TensorDictBase]:
    """Yield batches of play in the envs of some overrides, `exact`, flat in time; random without a policy."""
    env = build_env(configure("collect", words).env)
    collector = Collector(
        env, policy, frames_per_batch=PART, total_frames=frames, next_obs="exact", seed=0, keep_keys=KEYS
    )
    try:
        yield from collector  # type: ignore[misc]
    finally:
        collector.shutdown()


class Paddle(nn.Module):
    """Play Pong by rule: the right paddle follows the ball, from stacks uint8 `[..., k, 84, 84]`."""

    def forward(self, stacks: Tensor) -> Tensor:
        frame = stacks[..., -1, 14:77, :].to(torch.int16)  # the field, without score and walls
        seen = (frame - frame[..., :1, :1]).abs() > 20  # what is not background
        rows = torch.arange(seen.shape[-2], dtype=torch.float32)
        paddle, ball = (self._height(part, rows) for part in (seen[..., 73:77], seen[..., 12:72]))
        follow = torch.where(ball < paddle - 1, _UP, torch.where(ball > paddle + 1, _DOWN, 0))
        return torch.where(ball.isnan() | paddle.isnan(), 0, follow)

    @staticmethod
    def _height(seen: Tensor, rows: Tensor) -> Tensor:
        """Return the mean row of what is seen; NaN where nothing is."""
        count = seen.sum((-2, -1))
        return (seen.sum(-1) * rows).sum(-1) / count


def trained_cartpole(frames: int) -> tuple[list[TensorDictBase], float]:
    """Train a CartPole policy; return pictures of its play, and its mean return."""
    from rlcli.build import load

    with tempfile.TemporaryDirectory() as folder:
        rlcli("train", "recipe=ppo_exact", "console=off", "logger=none", f"run.dir={folder}/run")
        with open(f"{folder}/run/summary.json", encoding="utf-8") as file:
            mean_return = json.load(file)["evaluation"]["mean_return"]
        actor = load(f"{folder}/run").actor
    return [_pictured(batch) for batch in play(["env.num=1"], frames, actor)], mean_return


def _pictured(batch: TensorDictBase) -> TensorDictBase:
    rows = full_next_obs(batch).reshape(-1)
    rows["observation"] = drawn(rows["observation"])
    rows["next", "observation"] = drawn(rows["next", "observation"])
    return TensorDict(rows.to_dict(), rows.batch_size)


def drawn(states: Tensor) -> Tensor:
    """Draw CartPole's states `[N, 4]` as pictures uint8 `[N, 84, 84, 3]`: white, a line, a cart, a pole."""
    scale = _SIDE / 4.8  # pixels of a unit: the track is 4.8 wide
    x, angle = states[:, 0] * scale + _SIDE / 2, states[:, 2]
    across, down = torch.arange(_SIDE) + 0.5, torch.arange(_SIDE)[:, None] + 0.5
    out = torch.full((len(states), _SIDE, _SIDE, 3), 255, dtype=torch.uint8)
    out[:, 62] = 0
    cart = ((across - x[:, None, None]).abs() < 7) & ((down - 62).abs() < 4)
    along = (across - x[:, None, None]) * angle.sin()[:, None, None] - (down - 58) * angle.cos()[:, None, None]
    apart = (across - x[:, None, None]) * angle.cos()[:, None, None] + (down - 58) * angle.sin()[:, None, None]
    pole = (along > 0) & (along < scale) & (apart.abs() < 1.5)
    out[cart] = torch.tensor([40, 40, 40], dtype=torch.uint8)
    out[pole] = torch.tensor([202, 152, 101], dtype=torch.uint8)
    return out
