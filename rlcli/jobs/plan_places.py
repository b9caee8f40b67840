"""Where a run's bytes go (RAM, the disk, a GPU), and what is free there."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import torch

from rlcli.config.schemas import CollectConfig
from rlcli.jobs.plan_buffer import BUFFER
from rlcli.report.ledger import LEARNER
from rlcli.report.plan import Place, Plan, at_once, held
from rlcli.report.process import free_memory


def places_of(cfg: CollectConfig, plan: Plan) -> list[Place]:
    """RAM, the disk under the run folder, and every GPU that the run uses."""
    found = [Place("RAM", plan.total, *free_memory())]
    folder = _existing(Path(cfg.run.dir or "runs"))
    usage = shutil.disk_usage(folder)
    found.append(Place("disk", disk_need(cfg, plan), usage.free, usage.total))
    for device in sorted({entry.device for entry in plan.entries} - {"", "cpu", "disk", "meta"}):
        if device.startswith("cuda") and torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info(device)
            found.append(Place(device, held(plan.entries, device) + at_once(plan.peaks, device), free, total))
    return found


def disk_need(cfg: CollectConfig, plan: Plan) -> int:
    """Bytes that the run folder will grow to: frames where they are collected, checkpoints and a memmap else."""
    if plan.verb == "collect":
        return math.ceil(plan.component("rollout") / max(plan.frames, 1) * cfg.total_frames)
    kept = plan.component(LEARNER) - sum(e.bytes for e in plan.entries if e.key == "gradients")
    ram = sum(e.bytes for e in plan.entries if e.component == BUFFER and e.device != "disk")
    return (cfg.run.keep + 1) * (kept + ram) + held(plan.entries, "disk")


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
