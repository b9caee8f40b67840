"""`rlcli doctor`: what this machine has, what is missing, and the command that installs it."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlcli import __version__
from rlcli.cli.flags import read
from rlcli.config.installed import EXTRAS, gymnasium_problem, install
from rlcli.errors import ConfigError, in_words
from rlcli.processes.memory import free_memory, limits, size
from rlcli.processes.process import cores
from rlcli.runs.provenance import ALWAYS, LISTED, version_of


def run(words: Sequence[str], recipe_dirs: Sequence[str]) -> int:
    usage = "usage: rlcli doctor\n\nVersions, cores, memory, devices and extras of this machine.\n"
    if (args := read("doctor", words, usage, "words*")) is None:
        return 0
    if args.words:
        raise ConfigError(f"doctor takes no words, and was given {args.words[0]!r}", fix="Write rlcli doctor.")
    for line in _report():
        print(line)
    return 0


def _report() -> Iterator[str]:
    yield "versions"
    yield f"  {'python':<24} {platform.python_version()}  ({sys.executable})"
    optional = {name for packages in EXTRAS.values() for name in packages.values()}
    for name in (*ALWAYS, *(name for name in LISTED if name not in optional)):
        # rlcli may be run from its folder, without being installed
        yield f"  {name:<24} {version_of(name) or (__version__ if name == 'rlcli' else 'not installed')}"
    if (old := gymnasium_problem()) is not None:
        yield f"  {old}"
    yield "machine"
    yield from _machine()
    yield "devices"
    yield from _devices()
    yield "extras"
    for extra, packages in EXTRAS.items():
        present = [f"{name} {version_of(name)}" for name in packages.values() if version_of(name)]
        advice = "" if len(present) == len(packages) else install(extra)
        yield f"  {extra:<12} {', '.join(present) or 'not installed':<44} {advice}".rstrip()


def _machine() -> Iterator[str]:
    import psutil

    from rlcli.kernels.compiled import damaged

    gib = 2**30
    (free, total), bounds = free_memory(), "".join(f"; {who}: {size(limit)}" for _, limit, who in limits() if who)
    yield f"  {'system':<24} {platform.platform()}"
    yield f"  {'cores':<24} {cores()} usable, {psutil.cpu_count(logical=False) or '?'} physical"
    yield f"  {'memory':<24} {size(free)} free of {size(total)}{bounds}"
    yield f"  {'disk here':<24} {shutil.disk_usage('.').free / gib:.1f} GiB free"
    if Path("/dev/shm").is_dir():
        yield f"  {'/dev/shm':<24} {shutil.disk_usage('/dev/shm').free / gib:.1f} GiB free"
    if sys.platform != "win32":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        yield f"  {'open files':<24} {soft} (at most {hard})"
    yield f"  {'sbatch':<24} {shutil.which('sbatch') or 'not found: no jobs of SLURM from here'}"
    if files := damaged():
        yield f"  {'compiled kernels':<24} {len(files)} damaged, compiled anew by the run that needs them: {files[0]}"


def _devices() -> Iterator[str]:
    import torch

    yield f"  {'cpu':<24} torch threads by default: {torch.get_num_threads()}; runs choose their own (threads=auto)"
    if torch.cuda.is_available():
        triton, cudnn = version_of("triton") or "not installed", torch.backends.cudnn.version() or "not there"
        yield f"  {'cuda':<24} CUDA {torch.version.cuda}, cuDNN {cudnn}, Triton {triton}"
        for device in (torch.device("cuda", index) for index in range(torch.cuda.device_count())):
            free, total = map(size, torch.cuda.mem_get_info(device))
            yield f"  {device!s:<24} {torch.cuda.get_device_name(device)}, {free} free of {total}; {_graphs(device)}"
    else:
        built = torch.version.cuda
        yield f"  {'cuda':<24} {'no device found' if built else 'this torch is a CPU build'}"
    if sys.platform == "darwin":
        yield f"  {'mps':<24} {'available' if torch.backends.mps.is_available() else 'not available'}"
    there = [name for name in ("gloo", "nccl", "mpi") if getattr(torch.distributed, f"is_{name}_available")()]
    yield f"  {'torch.distributed':<24} {', '.join(there)}"


def _graphs(device: Any) -> str:
    """Say how it went to record an operation."""
    import torch

    from rlcli.graphs.graph import recorder_of

    record = recorder_of(device)
    assert record is not None
    try:
        x = torch.zeros(1, device=device)
        record(lambda: x.add_(1)).replay()
    except RuntimeError as error:
        return f"no graphs: {in_words(error)}"
    return "graphs are recorded and replayed" if x.item() == 1 else f"no graphs: one of 0 + 1 gave {x.item():g}"
