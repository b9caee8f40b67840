"""The suite itself is tested: each of these mistakes, planted in the passes, must be seen within a few random runs.

The passes are run as the plain Python they are written in, so nothing is compiled anew; unharmed, they must pass too.
"""

# ruff: noqa: E501 - lines of source are quoted whole

import ctypes
import importlib
import random
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
from test_trajectory_index import go

import rlcli.kernels.index as kernels
from rlcli.data.index import TrajectoryIndex, cut_out
from rlcli.data.index.arrays import IndexArrays
from rlcli.data.next_obs.pairs import Pairs
from rlcli.data.ring.contents import Contents

FOLDER = Path(kernels.__file__).parent
PARTS = ("table", "read", "write")
RUNS = 40

# name -> part, what stands there, what the mistake is
PLANTED = {
    "an end is evicted late": ("write", "runs[ix.END, lane, head & mask] < base:", "runs[ix.END, lane, head & mask] < base - 1:"),
    "an end is evicted early": ("write", "runs[ix.END, lane, head & mask] < base:", "runs[ix.END, lane, head & mask] <= base:"),
    "only one key of an end is compared": (
        "write", "    for key in range(pairs.shape[1]):\n        width = pairs[WIDTH, key]\n        one,",
        "    for key in range(1):\n        width = pairs[WIDTH, key]\n        one,"),
    "only one key of all rows is compared": (
        "write", "    for key in range(pairs.shape[1]):\n        if form", "    for key in range(1):\n        if form"),
    "only the first of many rows is compared": (
        "write", "after + (first - 1) * width, (block - first) * width)", "after + (first - 1) * width, width)"),
    "eight rows are passed over if one is plain": (
        "write", "read_8(address + row) & EIGHT_PLAIN == EIGHT_PLAIN", "read_8(address + row) & EIGHT_PLAIN"),
    "only one key is compared at a border": (
        "write", "    for key in range(pairs.shape[1]):\n        width = pairs[WIDTH, key]\n        if not same",
        "    for key in range(1):\n        width = pairs[WIDTH, key]\n        if not same"),
    "only one key is kept in a slot": (
        "write", "    for key in range(pairs.shape[1]):\n        copy_bytes", "    for key in range(1):\n        copy_bytes"),
    "open ends are lost at a reload": ("table", "if trajs[ix.STATE, traj] == ix.PARKED:", "if False:"),
    "a slot is not freed when its successor arrives": (
        "write", "                    free_slot(scalars, slots, runs[ix.WHERE, lane, at])\n                    runs[ix.WHERE, lane, at] = ix.BELOW\n                above",
        "                    runs[ix.WHERE, lane, at] = ix.BELOW\n                above"),
    "a slot is kept beside the stored successor": (
        "write", "                if runs[ix.WHERE, lane, at] >= 0:\n                    free_slot(scalars, slots, runs[ix.WHERE, lane, at])\n                    runs[ix.WHERE, lane, at] = ix.BELOW\n                above",
        "                above"),
    "an evicted end keeps its slot": (
        "write", "            if runs[ix.WHERE, lane, at] >= 0:\n                free_slot(scalars, slots, runs[ix.WHERE, lane, at])\n            traj =",
        "            traj ="),
    "an evicted trajectory is still waited for": (
        "write", "                    unpark(scalars, trajs, hashed, parked(trajs, hashed, trajs[ix.ID, traj], lane))\n", "                    pass\n"),
    "a trajectory found by its id is not compared": (
        "write", "if scalars[ix.KNOWN] == 0 or (slot >= 0 and in_slot(scalars, pairs, slot, row)):", "if True:"),
    "a trajectory is not looked for by its id": ("write", "        if hashed[entry] >= 0:\n", "        if False:\n"),
    "the border between writes is not compared": (
        "write", "same = known and slot >= 0 and in_slot(scalars, pairs, slot, row)", "same = known"),
    "equal bytes alone make a trajectory go on": (
        "write", "goes = trajs[ix.STATE, traj] == ix.OPEN and (same or not known)", "goes = same or not known"),
    "the newest row has no next observation": (
        "write", "        if exact or (known and trajs[ix.STATE, runs[ix.TRAJ, lane, at]] == ix.OPEN):\n", "        if known and trajs[ix.STATE, runs[ix.TRAJ, lane, at]] == ix.OPEN:\n"),
    "the wrong row is kept": ("write", "keep(scalars, slots, pairs, row - 1, form, index)", "keep(scalars, slots, pairs, row, form, index)"),
    "done is not honoured beside ids": ("write", "goes = goes and ids[i] == ids[i + 1]", "goes = ids[i] == ids[i + 1]"),
    "ids are not looked at in a batch": ("write", "goes = goes and ids[i] == ids[i + 1]", "pass"),
    "ids are not looked at between writes": (
        "write", "(trajs[ix.ID, traj] == traj_id if has_ids else", "(True if has_ids else"),
    "env rows of a flat batch are one stream": ("write", "range(-(-first // per_env) * per_env, stop, per_env):", "range(0):"),
    "the last end of a write stays open": ("write", "            if done[row + stretch - 1]:\n", "            if done[row + stretch - 1] and step + stretch < stop:\n"),
    "a bit stays after the border is resolved": (
        "write", "                bits[above >> 3] &= ~np.uint8(1 << (above & 7))\n", "                pass\n"),
    "old bits stay under new rows": (
        "write", "    clear_bits(bits, scalars[ix.CURSOR] * count % capacity, (stop - start) * count, capacity)\n", ""),
    "an older open trajectory of the same id stays open": (
        "write", "        trajs[ix.STATE, before] = ix.CLOSED\n", "        pass\n"),
    "a hole stays where a trajectory was waited for": (
        "table", "        if ((at - wanted) & mask) >= ((at - hole) & mask):", "        if False:"),
    "a link reads the row below": (
        "read", "        elif runs[ix.NXT, lane, at] >= 0:\n", "        elif False:\n"),
    "the cursor is forgotten when a row is looked up": (
        "read", "return base + (row // scalars[ix.LANES] - base) % scalars[ix.STEPS]", "return row // scalars[ix.LANES]"),
    "a trajectory's overwritten head is counted": ("table", "    if run == lanes[ix.HEAD, lane]:\n", "    if False:\n"),
    "many env rows are forgotten at the next write": ("write", "scalars[ix.MANY], scalars[ix.CURSOR] = many, cursor", "scalars[ix.CURSOR] = cursor"),
    "positions begin anew at a link": ("write", "                runs[ix.POS, lane, at] = runs[ix.POS, lane, last]\n", ""),
    "a link keeps its slot": (
        "write", "                if slot >= 0:\n                    free_slot(scalars, slots, slot)\n", ""),
    "strangers are followed where bytes coincide": (
        "write", "goes = goes and ids[i] == ids[i + 1]", "goes = notes[i] != 0 or (goes and ids[i] == ids[i + 1])"),
}  # fmt: skip
TRIED_FIRST = {  # of the runs, one that sees what few of them see
    "eight rows are passed over if one is plain": 497,
    "env rows of a flat batch are one stream": 142,
    "a link reads the row below": 497,
    "many env rows are forgotten at the next write": 773,
    "a link keeps its slot": 497,
    "strangers are followed where bytes coincide": 497,
}


def copy_bytes(target, source, count):
    ctypes.memmove(int(target), int(source), int(count))


def same_bytes(one, other, count):
    return ctypes.string_at(int(one), int(count)) == ctypes.string_at(int(other), int(count))


def read_8(address):
    return int.from_bytes(ctypes.string_at(int(address), 8), sys.byteorder, signed=True)


def same_values(one, other, count):
    kind = np.float32 if count % 4 == 0 else np.uint8
    first, second = (np.frombuffer(ctypes.string_at(int(x), int(count)), kind) for x in (one, other))
    return bool((first == second).all())


@pytest.fixture
def plain(monkeypatch):
    """Replace the compiled passes by their own source, run as Python, with one place changed."""

    def install(part=None, old="", new="", same=same_bytes):
        stand_in = types.SimpleNamespace(
            compiled=lambda **_: lambda f: f, copy_bytes=copy_bytes, same_bytes=same, read_8=read_8
        )
        monkeypatch.setitem(sys.modules, "rlcli.kernels.compiled", stand_in)
        monkeypatch.setattr(Contents, "memory", property(lambda _: None))  # plans have passes of their own, compiled
        for name in PARTS:
            source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
            if name == part:
                assert source.count(old) == 1, f"{source.count(old)} places look like {old!r}"
                source = source.replace(old, new)
            module = types.ModuleType(f"rlcli.kernels.index.{name}")
            monkeypatch.setitem(sys.modules, module.__name__, module)
            monkeypatch.setattr(kernels, name, module, raising=False)
            exec(compile(source, name, "exec"), module.__dict__)

    for name in ("index.draw", "index.write", "rows"):  # before anything in their place can be imported by them
        importlib.import_module(f"rlcli.kernels.{name}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        np.seterr(over="ignore")
        yield install


def seen(runs=RUNS, first=None):
    """Whether a few random runs end in a failure; that of the seed `first` comes before the others."""
    for seed in sorted(random.Random(0).sample(range(1000), runs), key=lambda seed: seed != first):
        try:
            go(seed, writes=30)
        except (AssertionError, IndexError, ValueError, KeyError, OverflowError, TypeError):
            return True
    return False


def test_the_passes_as_plain_python_give_the_same_answers(plain):
    plain()
    assert not seen(5)


@pytest.mark.parametrize("name", PLANTED)
def test_is_caught(plain, name):
    plain(*PLANTED[name])
    assert seen(first=TRIED_FIRST.get(name)), name


def test_values_compared_instead_of_bits_are_caught(plain):
    plain(same=same_values)
    assert seen()


def test_a_reload_that_lets_nameless_trajectories_go_on_is_caught(plain, monkeypatch):
    plain()
    monkeypatch.setattr(TrajectoryIndex, "cut", lambda self: None)
    assert seen()


def test_overwriting_what_another_row_reads_is_caught(plain, monkeypatch):
    plain()

    def forgetful(index, readers, run, before):
        for reader in readers:
            if reader is not None and reader.below is run:
                reader.below = None

    monkeypatch.setattr(cut_out, "_let_go", forgetful)
    assert seen()


def test_slots_that_are_mixed_up_at_a_reload_are_caught(plain, monkeypatch):
    plain()
    real = IndexArrays.used_slots
    monkeypatch.setattr(IndexArrays, "used_slots", lambda self: np.roll(real(self), 1))
    assert seen()


def test_a_pool_that_loses_its_slots_when_it_grows_is_caught(plain, monkeypatch):
    plain()

    def forgetful(self, slots):
        self.memory = np.zeros((slots, self.slot_width), np.uint8)

    monkeypatch.setattr(Pairs, "grow", forgetful)
    assert seen()
