"""Jobs that take a moment: imported by the processes of a sweep, it stands where training would begin.

By seed: 3 raises, 5 is killed, 9 is sent SIGTERM, from 50 on a job lasts a second, from 100 on until it is stopped.
Each beginning is a line in `begun.txt`.
"""

import json
import os
import signal
import sys
import time
import types
from pathlib import Path

import rlcli.cli.job
from rlcli.errors import EnvError, StoppedSafely
from rlcli.runs.folder import locked
from rlcli.runs.signals import StopSignals

print("greetings, as many a package has them, on standard output", flush=True)


def note(line):
    with open(os.environ["BEGUN"], "a") as file:
        file.write(f"{line}\n")


def work(folder, seed, kind):
    note(f"{kind} {seed}")
    print(f"I am job with seed {seed}", flush=True)
    with StopSignals() as stop, locked(folder):
        if seed == 3 and kind == "start":
            raise EnvError("it broke")
        if seed == 5 and kind == "start":
            os.kill(os.getpid(), signal.SIGKILL)
        if seed == 9 and kind == "start":
            os.kill(os.getpid(), signal.SIGTERM)
        lasts = 60 if seed >= 100 and kind == "start" else 1 if 50 <= seed < 100 else 0.05
        until = time.monotonic() + lasts
        while time.monotonic() < until and not stop.requested:
            time.sleep(0.01)
        status = "stopped" if stop.requested else "done"
        ended = {"status": status, "frames": 10, "total_frames": 10, "learning": {"return": float(seed)}}
        (Path(folder) / "summary.json").write_text(json.dumps(ended))
    note(f"{status} {seed}")
    if stop.requested:
        raise StoppedSafely("saved")


def start(verb, cfg, words):
    folder = Path(cfg.run.dir)
    (folder / "checkpoints" / "checkpoint_000001").mkdir(parents=True)  # it has saved something
    info = {"recipe": None, "env": cfg.env.id, "seed": cfg.seed, "overrides": words}
    (folder / "run.json").write_text(json.dumps(info))
    work(folder, cfg.seed, "start")


def resume(path, *args, **options):
    work(path, json.loads((Path(path) / "run.json").read_text())["seed"], "resume")


def plan(cfg, verb):
    """A job needs what `NEEDS` says, in bytes."""
    return types.SimpleNamespace(places=[types.SimpleNamespace(name="RAM", need=int(os.environ.get("NEEDS", "1")))])


rlcli.cli.job.start = start
sys.modules["rlcli.build"] = types.ModuleType("rlcli.build")
sys.modules["rlcli.build"].resume = resume
sys.modules["rlcli.build.plan"] = types.ModuleType("rlcli.build.plan")
sys.modules["rlcli.build.plan"].plan = plan
