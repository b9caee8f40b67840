"""Next observations in slots that are freed and given away again between two commits: what loads is what was committed.

The state that is kept with a commit holds the slots in use, so a slot that is written over afterwards is another one.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import time

import numpy as np
import pytest
from disks import CountingDisk, DyingDisk, run_and_die
from face import Ring
from rings import STEPS, batch, begin, equal, live, quiet, wrong
from test_rows_survive import let_go

from rlcli.data.storages import LazyTensorStorage

COUNT = 14
pytestmark = pytest.mark.filterwarnings("ignore:.*not followed by their own next observation")


def shuffled(number):
    """A batch of 2 envs and 4 steps whose rows mostly do not follow each other: each of them takes a slot."""
    rng = np.random.default_rng(number)
    return batch(number)[:, rng.permutation(4)] if number % 4 else batch(number)


@functools.cache
def in_memory(count):
    """All live rows after so many batches, and the slots in use."""
    ring = Ring(LazyTensorStorage(STEPS * 2, ndim=2), next_obs="exact")
    for i in range(count):
        ring.extend(shuffled(i))
    return live(ring), len(ring.index.used_slots())


def add(ring, number):
    """Write a batch; every fourth one is followed by a commit, and nothing else is."""
    ring.extend(shuffled(number))
    ring.storage._spare = 10**9
    if number % 4 == 3:
        ring.storage.commit(ring.content)


def write(folder, disk, report=lambda value: None, upto=COUNT):
    ring = begin(folder, disk, commit_seconds=3600.0)
    for i in range(ring.cursor // 4, upto):
        add(ring, i)
        report(ring.storage.acknowledged // 8)
    return ring


def check(folder, acknowledged, text):
    ring = quiet(lambda: begin(folder))
    count = ring.cursor // 4
    assert count >= acknowledged, text
    assert equal(live(ring), in_memory(count)[0]), text
    if count:
        assert len(ring.index.used_slots()) == in_memory(count)[1], text
    let_go(ring)
    ring = quiet(lambda: write(folder, None, upto=COUNT + 3))
    assert equal(live(ring), in_memory(COUNT + 3)[0]), text
    ring.storage.close(ring.content)
    assert wrong(folder) == [], text


def test_slots_are_freed_and_given_away_between_commits(tmp_path):
    ring, numbers, reused = begin(tmp_path / "rows", commit_seconds=3600.0), {}, 0
    for i in range(COUNT):
        before = ring.storage.acknowledged
        add(ring, i)
        now = {int(slot): ring.contents.pairs.memory[slot].tobytes() for slot in ring.index.used_slots()}
        if ring.storage.acknowledged == before:
            reused += sum(numbers.get(slot, held) != held for slot, held in now.items())
        else:
            numbers = now
    assert reused > 5  # a slot that a commit knows holds something else before the next one


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_before_calls_between_which_slots_change(tmp_path, step):
    disk = CountingDisk()
    let_go(write(tmp_path / "counted", disk))
    for n in range(1, len(disk.calls) + 1, step):
        folder = tmp_path / str(n)
        code, told = run_and_die(lambda report, n=n, folder=folder: write(folder, DyingDisk(n), report))
        assert code == 77
        check(folder, max(told, default=0), f"killed before call {n}: {disk.calls[n - 1]}")
        shutil.rmtree(folder)


def write_until_killed(folder, writer):
    ring = begin(folder, commit_seconds=3600.0)
    for i in range(ring.cursor // 4, 10**9):
        os.write(writer, (ring.storage.acknowledged // 8).to_bytes(8, "little"))
        add(ring, i)


def kill_again_and_again(folder, kills, seed):
    rng, safe = np.random.default_rng(seed), 0
    for number in range(kills):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                quiet(lambda writer=writer: write_until_killed(folder, writer))
            finally:
                os._exit(1)
        os.close(writer)
        told, enough = b"", 8 * int(rng.integers(2, 12))  # batches, not seconds: in a second a busy machine writes none
        while len(told) < enough and (part := os.read(reader, enough - len(told))):
            told += part
        time.sleep(float(rng.exponential(0.01)))
        os.kill(pid, signal.SIGKILL)
        while part := os.read(reader, 1 << 16):
            told += part
        os.close(reader)
        os.waitpid(pid, 0)
        safe = max(safe, int.from_bytes(told[len(told) // 8 * 8 - 8 : len(told) // 8 * 8], "little"))
        ring = quiet(lambda: begin(folder))
        count = ring.cursor // 4
        assert count >= safe, f"seed {seed}, kill {number}"
        assert equal(live(ring), in_memory(count)[0]), f"seed {seed}, kill {number}"
        let_go(ring)
    assert safe >= 8  # the ring went round: it holds five
    print(f"seed {seed}: {kills} kills, {safe} batches acknowledged, 0 slots lost or mixed up")


def test_kills_at_any_moment_leave_every_slot_as_it_was_committed(tmp_path):
    kill_again_and_again(tmp_path / "rows", 6, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
def test_100_kills_leave_every_slot_as_it_was_committed(tmp_path, seed):
    kill_again_and_again(tmp_path / "rows", 100, seed=seed)
