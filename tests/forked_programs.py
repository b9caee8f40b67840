"""Programs in a process of their own each, forked from one that has loaded torch and its like once for all of them."""

import atexit
import ctypes
import json
import os
import subprocess
import sys
import traceback
import types
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

HUGE, COLLAPSE = 1 << 21, 25  # bytes of a page; Linux's MADV_COLLAPSE
FORK = """
import gc, json, os, sys
from tests.forked_programs import end_as, fork_cheaply
gc.disable()
import {loaded}
{first}
gc.freeze()
fork_cheaply()
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


def fork_cheaply() -> None:
    """Have what is loaded lie in pages of 2 MiB, where Linux can (6.1): most of a fork is the copy of a table of pages.

    What its end takes away is that table, too. A page that the child or the parent writes to is still copied alone.
    """
    if not os.path.exists("/proc/self/maps"):
        return
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, _, _, _, *name = line.split()
        first, end = (int(address, 16) for address in span.split("-"))
        first, end = -(-first // HUGE) * HUGE, end // HUGE * HUGE
        if first < end and rights == "rw-p" and name in ([], ["[heap]"]):
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), COLLAPSE)  # it may refuse: then not


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
