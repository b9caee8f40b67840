"""Rows on disk whose codes change: whatever happens on the way, they are read as before or as they are to be."""

from __future__ import annotations

import errno
import shutil

import numpy as np
import pytest
import torch
from disks import CountingDisk, DyingDisk, PowerCut, RefusingDisk, run_and_die
from face import Disk, Ring
from rings import STEPS, LosingPages, batch, batches_in, equal, live, quiet, wrong

from rlcli.data.files import dumps
from rlcli.data.storages import LazyMemmapStorage, LazyTensorStorage
from rlcli.errors import ResourceError

BATCHES, CHANGES = 9, {3: 200, 7: 2**40}  # 36 steps into a ring of 20; what no code held before


def coded(number):
    rows = batch(number)
    kinds = torch.arange(number * 4, number * 4 + 4).repeat(2, 1) % 3
    rows["action"] = torch.nn.functional.one_hot(kinds, 3)
    rows["count"] = kinds[..., None] - 1
    if number in CHANGES:
        rows["count"][1, 2] = CHANGES[number]
    if number == 6:
        rows["action"][0, 1] = 7  # no longer one-hot
    return rows


def other():
    """Two rows to be written over, with what no code held."""
    rows = coded(2).reshape(-1)[:2]
    rows["count"][1] = 100_000
    return rows


def begin(folder, disk=None):
    storage = LazyMemmapStorage(
        STEPS * 2, ndim=2, scratch_dir=folder, resume=True, disk=disk or Disk(), commit_seconds=0.0
    )
    ring = Ring(storage, next_obs="exact", codes=True)
    if storage.fields:
        dumps.resume(ring)
    return ring


def write(ring, report=lambda value: None, upto=BATCHES):
    for i in range(batches_in(ring), upto):
        ring.extend(coded(i))
        report(batches_in(ring))
        if i == 3:
            ring.overwrite(np.array([3, 4]), other())
    return ring


def wanted(count):
    """What may be there after so many batches: after the fourth, two rows were written over or not."""
    out = []
    for over in (True, False):
        ring = Ring(LazyTensorStorage(STEPS * 2, ndim=2), next_obs="exact")
        for i in range(count):
            ring.extend(coded(i))
            if i == 3 and (over or count > 4):
                ring.overwrite(np.array([3, 4]), other())
        out.append(live(ring))
    return out


def let_go(ring):
    if ring.storage._journal is not None:
        ring.storage._journal.abandon()


def check_and_finish(folder, acknowledged, text):
    ring = quiet(lambda: begin(folder))
    count = batches_in(ring)
    assert acknowledged <= count <= BATCHES, f"{text}: {acknowledged} acknowledged, {count} there"
    assert not count or any(equal(live(ring), one) for one in wanted(count)), text
    over = count != 4 or equal(live(ring), wanted(4)[0])
    quiet(lambda: write(ring))
    if over:
        assert equal(live(ring), wanted(BATCHES)[0]), text
    ring.storage.close(ring.content)
    assert wrong(folder) == [], text
    again = begin(folder)
    assert batches_in(again) == BATCHES and again.contents.codes, text
    let_go(again)


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    disk = CountingDisk()
    ring = write(begin(tmp_path_factory.mktemp("counted") / "rows", disk))
    assert ring.contents.relaid == 4 and "count" in ring.storage.fields and "action" in ring.storage.fields
    let_go(ring)
    return disk.calls


def relays(calls):
    """The calls of the first two changes, and some of the rest."""
    made = [n for n, (call, name) in enumerate(calls, 1) if call == "create" and name.split(".")[1] != "0"]
    near = {n for first in made[:12] for n in range(first, first + 8)}
    return sorted(near | set(range(1, len(calls) + 1, 29)))


def test_killed_before_every_call_of_a_change(tmp_path, calls):
    killed(tmp_path, calls, relays(calls)[::7])


@pytest.mark.slow
def test_killed_before_every_single_call(tmp_path, calls):
    killed(tmp_path, calls, range(1, len(calls) + 1))


def killed(tmp_path, calls, numbers):
    for n in numbers:
        folder = tmp_path / str(n)
        code, told = run_and_die(lambda report, n=n, folder=folder: write(begin(folder, DyingDisk(n)), report))
        assert code == 77
        check_and_finish(folder, max(told, default=0), f"killed before call {n}: {calls[n - 1]}")
        shutil.rmtree(folder)


@pytest.mark.parametrize("step", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_power_cut_before_every_call_of_a_change(tmp_path, calls, step):
    for n in relays(calls)[1::step]:
        folder, disk, told = tmp_path / f"{n}", LosingPages(n), [0]
        folder.mkdir()
        with pytest.raises(PowerCut):
            write(begin(folder, disk), told.append)
        after = tmp_path / f"{n} after"
        disk.after_the_cut(folder, after, np.random.default_rng(n))
        check_and_finish(after, max(told), f"power cut before call {n}: {calls[n - 1]}")
        shutil.rmtree(after)


@pytest.mark.parametrize("step", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_any_call_of_a_change_may_be_refused(tmp_path, calls, step):
    """The write is refused as a whole and may be tried again; nothing else changes."""
    for n in relays(calls)[2::step]:
        folder, told = tmp_path / str(n), [0]
        text = f"refused call {n}: {calls[n - 1]}"
        disk = RefusingDisk(n, errno.ENOSPC)
        ring = None
        try:
            ring = begin(folder, disk)
            write(ring, told.append)
        except ResourceError:
            pass
        else:
            assert calls[n - 1][0] == "remove", text  # a file that nobody names stays a while
        if ring is not None:
            count = batches_in(ring)
            assert not count or any(equal(live(ring), one) for one in wanted(count)), text
            let_go(ring)
        check_and_finish(folder, max(told), text)
        shutil.rmtree(folder)


def test_a_refused_change_can_be_tried_again(tmp_path, calls):
    for call in ("create", "reserve", "sync", "write"):
        folder = tmp_path / call
        ring = write(begin(folder, disk := RefusingDisk(0, errno.ENOSPC, call)), upto=3)
        seen = sum(name == call for name, _ in disk.calls)
        disk.n = seen + 1
        with pytest.raises(ResourceError):
            ring.extend(coded(3))
        assert batches_in(ring) == 3, call
        assert equal(live(ring), wanted(3)[1])
        write(ring)
        assert equal(live(ring), wanted(BATCHES)[0])
        ring.storage.close(ring.content)
        assert wrong(folder) == []


def test_a_dump_made_before_a_change_stays_whole(tmp_path):
    """It holds links to segments under the old codes."""
    ring = write(begin(tmp_path / "rows"), upto=3)
    held = live(ring)
    dumps.dump(ring, tmp_path / "dump")
    write(ring)
    assert ring.contents.relaid
    back = Ring(LazyTensorStorage(STEPS * 2, ndim=2), next_obs="exact", codes=True)
    dumps.load(back, tmp_path / "dump", cut=False)
    assert equal(live(back), held)
    let_go(ring)
