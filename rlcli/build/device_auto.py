"""Settle `device=auto` for a new run: where there is a GPU, both sides act and learn for a moment, the faster is taken.

They are tried by a process of its own (`pace.py`): if the CPU is taken, nothing that a GPU's libraries load stays with
the run. What was chosen is written into the run's configuration, so that a resumed run does not ask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from rlcli.build import env_mode
from rlcli.build.env_mode import First
from rlcli.config.schemas import CollectConfig, Config
from rlcli.config.validate import validate
from rlcli.processes.channel import Closed, packed, unpacked
from rlcli.processes.worker import Worker, end
from rlcli.vec_envs.workers import told

PATIENCE = 60.0  # seconds for a first context, compilers and all that is timed
SAID = 100_000  # frames
C = TypeVar("C", bound=CollectConfig)


def settled(cfg: C) -> tuple[C, list[str], First]:
    """Do as `env_mode.settled` does, and decide `device=auto` where there is a GPU and something to do for it."""
    lines = []
    if cfg.device.kind == "auto" and torch.cuda.is_available() and work_for(cfg):
        kind, line = chosen(cfg)
        cfg, lines = _on(cfg, kind), [line]
    found, more, first = env_mode.settled(cfg)
    return found, [*lines, *more], first


def work_for(cfg: CollectConfig) -> str:
    """Say what a run's own process does by a policy; workers act on the CPU."""
    acts = cfg.collector.kind == "sync" and cfg.policy.kind != "random"
    return " and ".join(["acting"] * acts + ["learning"] * isinstance(cfg, Config))


def chosen(cfg: CollectConfig) -> tuple[str, str]:
    """Return the kind of the device to take, and why in a line."""
    if against := [problem for problem in validate(_on(cfg, "cuda")) if problem not in {*validate(cfg)}]:
        return "cpu", f"device=auto -> cpu: {against[0].what}"
    found = tried([_on(cfg, kind) for kind in ("cpu", "cuda")])
    if isinstance(found, str):
        return "cpu", f"device=auto -> cpu: the GPU could not be tried: {found}"
    (least, taken), (more, other) = sorted((seconds, device) for device, seconds in found)
    figures = f"{SAID * least:,.1f} s per {SAID:,} frames of {work_for(cfg)} against {SAID * more:,.1f} s on {other}"
    return torch.device(taken).type, f"device=auto -> {taken}: {figures}"


def tried(runs: Sequence[CollectConfig]) -> list[tuple[str, float]] | str:
    """Return device and seconds a frame of each, as a process of its own found them, or why there is nothing."""
    worker = Worker("rlcli.build.pace:serve", start_method="spawn")  # nothing of it stays in the fork server
    try:
        worker.channel.give_up_after(PATIENCE)
        worker.channel.send(0, 0, packed((told(), runs)))
        return unpacked(worker.channel.receive()[2])
    except BlockingIOError:
        return f"no answer in {PATIENCE:.0f} s"
    except Closed:
        return f"the process that tried it {worker.how_it_ended()}"
    finally:
        end([worker], 0.0)


def _on(cfg: C, kind: str) -> C:
    there: Any = dataclasses.replace(cfg, device=dataclasses.replace(cfg.device, kind=kind))
    return there
