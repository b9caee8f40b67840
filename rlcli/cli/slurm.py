"""`sweep.launcher=slurm`: the jobs of a sweep as one array of `rlcli resume SWEEP --job N`; nothing waits for them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcli.config import registry
from rlcli.errors import ConfigError, ResourceError
from rlcli.runs.sweep import Sweep, SweepJob

_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_OURS = ("array", "requeue", "signal", "output", "error", "parsable", "wait", "wrap")  # that this file gives
# a signal reaches the shell, which hands it on; where time ends (SIGUSR1) a run that saved asks for its turn again,
# and where scancel (SIGTERM) ended it, not
SCRIPT = """\
#!/bin/sh
{options}
cd {folder} || exit 5
again=
trap 'kill -TERM "$run"' TERM
trap 'again=yes; kill -TERM "$run"' USR1
{command} --job "$SLURM_ARRAY_TASK_ID" &
run=$!
wait "$run"
code=$?
while kill -0 "$run" 2>/dev/null; do wait "$run"; code=$?; done
if [ "$code" -eq 75 ] && [ "$again" ]; then exec scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"; fi
exit "$code"
"""


def check_slurm(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError where jobs cannot be submitted from here, or an option of sbatch is none."""
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "there is no sbatch on this machine", where="sweep.launcher=slurm",
            fix="Submit from a login node of the cluster, or leave it out: the jobs run here then.",
        )  # fmt: skip
    for name, value in settings.items():
        if not _OPTION.fullmatch(name) or name in _OURS:
            why = "rlcli gives it" if name in _OURS else "such as partition, time, cpus-per-task, mem, gres"
            raise ConfigError(f"{name!r} is no option for sweep.slurm", why=why)
        text = str(value)
        if value is False or not isinstance(value, str | int | float) or not text.isprintable() or not text.strip():
            raise ConfigError(f"sweep.slurm.{name} cannot be {value!r}", fix="Give a number, a text, or true.")


def submit(sweep: Sweep, jobs: Sequence[SweepJob], settings: Mapping[str, Any], at_a_time: int | str) -> str:
    """Submit an array of jobs and return its number; `at_a_time`: so many where that is more than one."""
    here = sweep.path.absolute()
    limit = f"%{at_a_time}" if isinstance(at_a_time, int) and at_a_time > 1 else ""
    options = {
        "job-name": f"rlcli_{sweep.path.name}",
        "array": ",".join(str(job.number) for job in jobs) + limit,
        "signal": "B:USR1@120",
        "output": f"{here}/slurm_%a.txt",
        **settings,
    }
    lines = ["#SBATCH --requeue", "#SBATCH --open-mode=append"]
    lines += [f"#SBATCH --{x}" if y is True else f"#SBATCH --{x}={shlex.quote(str(y))}" for x, y in options.items()]
    flags = registry.flags(sweep.packages, sweep.recipe_dirs)
    command = shlex.join([sys.executable, "-m", "rlcli", "resume", str(here), *flags])
    script = here / "array.sh"
    try:
        script.write_text(
            SCRIPT.format(options="\n".join(lines), folder=shlex.quote(str(Path.cwd())), command=command),
            encoding="utf-8",
        )
        done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ResourceError("cannot submit the sweep", where=str(script), why=error.strerror) from error
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[:500]
        raise ResourceError("sbatch refused the sweep", where=str(script), why=said or f"exit code {done.returncode}")
    return done.stdout.strip().partition(";")[0]
