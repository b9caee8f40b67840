"""Settle `device=auto` for a new run: where there is a GPU, both sides act and learn for a moment, the faster is taken.

They are tried by a process of its own (`pace.py`): if the CPU is taken, nothing that a GPU's libraries load stays with
the run. What was chosen is written into the run's configuration, so that a resumed run does not ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from rlcli.config.option import changed
from rlcli.config.schemas import CollectConfig, Config
from rlcli.config.validate import validate
from rlcli.processes.channel import Closed, packed, unpacked
from rlcli.processes.worker import Worker, end
from rlcli.vec_envs.workers import told

PATIENCE = 60.0  # seconds for a first context, compilers and all that is timed
SAID = 100_000  # frames
C = TypeVar("C", bound=CollectConfig)


def chosen(cfg: C) -> tuple[C, list[str]]:
    """Return the configuration with the device to take, and why in a line; as it is where nothing is to be done."""
    acts = cfg.collector.kind == "sync" and cfg.policy.kind != "random"  # workers act on the CPU
    work = " and ".join(["acting"] * acts + ["learning"] * isinstance(cfg, Config))
    if not work:
        return cfg, []
    device, why = _faster(cfg, work)
    return changed(cfg, "device", kind=torch.device(device).type), [f"device=auto -> {device}: {why}"]


def _faster(cfg: CollectConfig, work: str) -> tuple[str, str]:
    if against := [
        problem for problem in validate(changed(cfg, "device", kind="cuda")) if problem not in {*validate(cfg)}
    ]:
        return "cpu", against[0].what
    found = tried([changed(cfg, "device", kind=kind) for kind in ("cpu", "cuda")])
    if isinstance(found, str):
        return "cpu", f"the GPU could not be tried: {found}"
    (least, taken), (more, other) = sorted((seconds, device) for device, seconds in found)
    return taken, f"{SAID * least:,.1f} s per {SAID:,} frames of {work} against {SAID * more:,.1f} s on {other}"


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
