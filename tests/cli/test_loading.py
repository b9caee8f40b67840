"""Loading torch: said before the wait, and the garbage collector rests meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from rlcli.cli import main
from rlcli.config import registry

PROGRAM = """
import contextlib, gc, io, json, sys
from rlcli.cli.main import announced, loading

facts, said = {}, io.StringIO()
with contextlib.redirect_stderr(said):
    gc.disable()
    with loading(quiet=True):
        pass
    facts["off before"] = [gc.isenabled(), gc.get_freeze_count()]
    gc.enable()
    with loading(quiet=True):
        facts["inside"] = gc.isenabled()
    facts["afterwards"] = [gc.isenabled(), gc.get_freeze_count()]
    facts["said quietly"] = said.getvalue()
    with loading():
        facts["said before torch"] = [said.getvalue(), "torch" in sys.modules]
        import torch
    with loading():
        pass
    facts["said of torch"] = said.getvalue()
    said.truncate(said.seek(0))
    import numba
    with announced():
        numba.njit(lambda x: x + 1)(1)
        facts["said of kernels at first"] = said.getvalue()
        numba.njit(lambda x: x + 2)(1)
    numba.njit(lambda x: x + 3)(1)
    facts["said of kernels"] = said.getvalue()
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    """What a process saw of itself: it loads quietly with its collector off, and on, then torch, then kernels."""
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert ran.stderr == ""
    return json.loads(ran.stdout)  # nothing else is on the standard output


def test_a_word_goes_to_the_standard_error_before_torch_is_loaded(facts):
    assert facts["said before torch"] == ["loading torch ...\n", False]
    assert facts["said of torch"] == "loading torch ...\n"


def test_nothing_is_collected_while_modules_load_and_everything_after(facts):
    enabled, frozen = facts["afterwards"]
    assert not facts["inside"] and enabled and frozen > 0
    assert facts["said quietly"] == ""


def test_a_collector_that_was_off_stays_off(facts):
    assert facts["off before"] == [False, 0]


def test_a_verb_without_a_console_says_once_that_it_compiles(facts):
    once = "compiling kernels, once; later runs reuse them ...\n"
    assert facts["said of kernels at first"] == facts["said of kernels"] == once


@pytest.mark.parametrize(("words", "order"), [("collect nothing", ["runs", "mine"]), ("train --cfg job", ["mine"])])
def test_what_a_run_uses_is_loaded_before_packages_that_are_imported(rlcli, monkeypatch, words, order):
    done = []
    monkeypatch.setattr(main, "_load_first", lambda rest: done.append("runs"))
    monkeypatch.setattr(registry, "import_package", done.append)
    rlcli(f"{words} --import mine")
    assert done == order
