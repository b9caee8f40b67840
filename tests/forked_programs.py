"""Programs in a process of their own each, forked from one that has loaded torch and its like once for all of them."""

import atexit
import json
import os
import subprocess
import sys
import traceback
import types
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

FORK = """
import gc, json, os, sys
from tests.forked_programs import end_as
gc.disable()
import {loaded}
{first}
gc.freeze()
gc.enable()

def run(name, program, folder):
    os.chdir(folder)
    for stream, file in enumerate(("stdout", "stderr"), 1):
        os.dup2(os.open(os.path.join({into!r}, f"{{name}}.{{file}}"), os.O_WRONLY | os.O_CREAT), stream)
    end_as(program, name)

for name, (program, folder) in json.load(sys.stdin).items():
    if os.fork() == 0:
        run(name, program, folder)
    with open(os.path.join({into!r}, f"{{name}}.code"), "w") as code:
        code.write(str(os.waitstatus_to_exitcode(os.wait()[1])))
os._exit(0)
"""


def end_as(program: str, name: str) -> NoReturn:
    """Run a program as `__main__`, and end with it."""
    main, code = types.ModuleType("__main__"), 0
    sys.modules["__main__"] = main
    try:
        exec(compile(program, name, "exec"), vars(main))
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)  # an end of Python that looks through all that was loaded takes a second


@dataclass
class Ran:
    """How a program ended, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


def run_forked(
    programs: dict[str, tuple[str, Path]],
    into: Path,
    first: str = "",
    loaded: str = "gymnasium, numba, torch, tensordict",
) -> dict[str, Ran]:
    """Run programs, each in a folder, one after the other; what they write is kept in `into`.

    Parameters
    ----------
    first : str
        What the process does from which they are forked, after it has imported what is `loaded`.
    """
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, "-c", FORK.format(loaded=loaded, first=first, into=str(into))],
        env={**os.environ, "PYTHONPATH": path},
        input=json.dumps({name: (program, str(folder)) for name, (program, folder) in programs.items()}),
        text=True,
        check=True,
        timeout=600,
    )

    def said(name: str, of: str) -> str:
        return (into / f"{name}.{of}").read_text()

    return {name: Ran(int(said(name, "code")), said(name, "stdout"), said(name, "stderr")) for name in programs}
