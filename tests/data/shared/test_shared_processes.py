"""Writers in other processes: what the owner samples meanwhile is whole, consecutive and true, whoever is killed."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time

import numpy as np
import pytest
import torch
from face import refused
from shared_worlds import (
    batch,
    buffer,
    check_rows,
    check_slices,
    forked,
    write_on,
)

from rlcli.data import LazyMemmapStorage, ReplayBuffer, ReplayBufferEnsemble
from rlcli.data.shared import row_log
from rlcli.data.shared.region import RingFolder, place, sweep
from rlcli.data.shared.row_log import LogWriter, RowLog
from rlcli.errors import ResourceError


def end(pid, sig=signal.SIGKILL):
    os.kill(pid, sig)
    return os.waitpid(pid, 0)[1]


def wait_for(condition, seconds=60, pause=0.002):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(pause)


def ours():
    """Folders of this process and of its children."""
    return [name for name in os.listdir(place(True)) if name.startswith("rlcli-rows-")]


def write_and_forget(writer, worker, line):
    """Write until told to stop; then own a buffer, and end without closing it."""
    start = 0
    while not line.poll():
        writer.extend(batch(worker, 0, start, 1, 7)[0])
        start += 7
        time.sleep(0.001)
    rb = buffer()
    rb.extend(batch(0, 0, 0, 1, 5)[0])
    line.send(str(rb.inbox.folder.path))


@pytest.mark.parametrize("ways", [("spawn", "fork"), pytest.param(("spawn",) * 4, marks=pytest.mark.slow)])
def test_writers_fill_an_ensemble_that_is_sampled_all_the_while(ways):
    many, seen = len(ways), set()
    with ReplayBufferEnsemble.per_worker(many, buffer, batch_size=24 * many, seed=0) as rb:
        lines, workers = [], []
        for i, way in enumerate(ways):
            context = multiprocessing.get_context(way)
            mine, line = context.Pipe()
            lines.append(mine)
            workers.append(context.Process(target=write_and_forget, args=(rb.writer(i), i, line)))
        try:
            for i, worker in enumerate(workers):  # one imports while none of the others writes
                worker.start()
                wait_for(lambda i=i: len(rb.buffers[i]), pause=0.05)
            while min(sum(who == i for who, _ in seen) for i in range(many)) < 320:  # more than it holds
                sample = rb.sample()
                for i in range(many):
                    part = sample[sample["index", "buffer_ids"] == i].exclude("index")
                    check_slices(part)
                    seen.update((i, tuple(row)) for row in check_rows(part, i).tolist())
            for line in lines:
                line.send("enough")
            folders = [line.recv() for line in lines]
            for worker in workers:
                worker.join()
            assert not any(worker.exitcode for worker in workers)
            sweep(place(True))  # a forked child of multiprocessing ends without what a spawned one does at its end
            assert not any(map(os.path.exists, folders))
        finally:
            for worker in workers:
                if worker.pid:
                    worker.kill()
                    worker.join()


@pytest.mark.parametrize(
    ("lanes", "ids", "lazy", "next_obs"),
    [(1, True, True, "exact"), (3, True, True, "exact"), (1, False, False, "exact"), (3, False, False, "full")],
)
def test_what_a_forked_writer_publishes_is_seen_and_true(lanes, ids, lazy, next_obs):
    room = 50_000  # more than is written before the first look: a reader that is lapped has what is left
    with buffer(room, lanes, next_obs=next_obs) as rb:
        pid = forked(write_on, rb.writer(), 3, 0, lanes, 11, 60.0, ids, lazy)
        try:
            for upto in range(0, 600, 60):
                wait_for(lambda upto=upto: rb.inbox.region.cursor > upto * lanes)
                rows = rb[:].reshape(-1)
                check_rows(rows, 3)
                check_slices(rb.sample())
                newest = rows["observation"][:, 3].max()
                assert len(rows) == min(newest + 1, room) * lanes
        finally:
            end(pid)


def kills(count, seed):
    """Kill one of two writers at a random moment, look at everything, let another go on; again and again."""
    rng = np.random.default_rng(seed)
    with ReplayBufferEnsemble.per_worker(2, lambda: buffer(150), batch_size=48) as rb:
        lives, pids = [0, 0], [0, 0]

        def live(i):
            pids[i] = forked(write_on, rb.writer(i), i, lives[i], 1, int(rng.integers(1, 40)))

        try:
            live(0), live(1)
            wait_for(lambda: all(len(member) for member in rb.buffers))
            for _ in range(count):
                i = int(rng.integers(2))
                deadline = time.monotonic() + rng.random() * 0.06
                while time.monotonic() < deadline:
                    check_slices(rb.sample().exclude("index"))
                end(pids[i])
                published = rb[i].inbox.region.cursor
                rows = rb[i][:]  # nobody blocks, nothing that was published is gone
                check_rows(rows, i)
                assert len(rows) == min(150, published)
                assert rb[i].inbox.taken == published
                assert rows["observation"][:, 1].max() <= lives[i]
                lives[i] += 1
                live(i)
            wait_for(lambda: all(rb[i][:]["observation"][:, 1].max() == lives[i] for i in range(2)))
            for i in range(2):
                check_rows(rb[i][:], i)
            check_slices(rb.sample().exclude("index"))
        finally:
            for pid in pids:
                end(pid)


def test_a_writer_killed_at_any_moment_leaves_what_it_published_and_another_takes_over():
    kills(12, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
def test_300_kills(seed):
    kills(100, seed)


STEPS = [  # what a writer does to files and memory, in the order of one write
    (LogWriter, "write"),
    (RowLog, "_open"),
    (RowLog, "_part"),
    (RingFolder, "declare"),
    (RingFolder, "publish"),
    (LogWriter, "drop"),
]


def dies_after(calls, after, writer, lengths):
    """Write batches; end before or after the given call of any of `STEPS`."""
    count = 0

    def watched(function):
        def called(*args, **options):
            nonlocal count
            count += 1
            mine = count == calls
            if mine and not after:
                os._exit(9)
            answer = function(*args, **options)
            if mine:
                os._exit(9)
            return answer

        return called

    row_log._LEAST, row_log._WRITES = 1, 2  # writes of a file
    for owner, name in STEPS:
        setattr(owner, name, watched(getattr(owner, name)))
    start = 0
    for length in lengths:
        writer.extend(batch(5, calls, start, 1, length)[0])
        start += length


@pytest.mark.parametrize("after", [False, True])  # after one call is about where it is before the next
@pytest.mark.every(2)
def test_every_place_where_a_writer_can_end_leaves_a_region_that_another_can_go_on_with(after):
    with buffer(40) as rb:
        calls, status = 0, 9
        while status == 9:
            calls += 1
            before = rb.inbox.region.cursor
            status = os.waitstatus_to_exitcode(
                os.waitpid(forked(dies_after, calls, after, rb.writer(), [17] * 5), 0)[1]
            )
            now = rb.inbox.region.cursor
            assert (now - before) % 17 == 0
            if now:
                rows = rb[:]
                assert len(rows) == min(now, 40)
                check_rows(rows, 5)
                check_slices(rb.sample().exclude("index"))
        assert status == 0 and calls > 30


def test_a_region_has_one_writer_and_the_second_is_told_the_pid_of_the_first():
    with buffer() as rb:
        pid = forked(write_on, rb.writer(), 0, 0)
        wait_for(lambda: len(rb))
        refused(ResourceError, pid, lambda: rb.writer().extend(batch(0, 1, 0, 1, 5)[0]))
        end(pid)
        with rb.writer() as mine:
            mine.extend(batch(0, 1, 0, 1, 5)[0])
            refused(ResourceError, f"{os.getpid()}", lambda: rb.writer().extend(batch(0, 2, 0, 1, 5)[0]))
        rb.writer().extend(batch(0, 2, 0, 1, 5)[0])


def test_the_trajectory_that_a_writer_left_is_cut_where_another_goes_on():
    for ids in (True, False):
        with buffer() as rb:
            whole = batch(0, 0, 0, 1, 8, ids=ids)[0]  # an end at 4, and one open
            rb.writer().extend(whole[:7])
            with rb.writer() as writer:
                writer.extend(whole[7:])  # the very next step, of the same id
            assert len(rb) == 8
            assert sorted(rb.ring.index.trajectories()["length"].tolist()) == [1, 2, 5]
            check_rows(rb[:])


def test_a_handle_is_small_and_a_pickled_buffer_arrives_as_its_writer():
    with buffer() as rb:
        assert len(pickle.dumps(rb.writer())) < 500
        writer = pickle.loads(pickle.dumps(rb))
        assert writer.extend(batch(0, 0, 0, 1, 5)[0]) == 5
        assert writer.add(batch(0, 0, 5, 1, 1)[0, 0]) == 6
        again = pickle.loads(pickle.dumps(writer))
        writer.close()
        assert again.extend(batch(0, 0, 6, 1, 2)[0]) == 8
        check_rows(rb[:])


def test_a_forked_child_writes_the_buffer_that_it_was_given_and_never_waits_for_a_thread_of_its_parent():
    with buffer(prefetch=2) as rb:

        def work():
            rb.extend(batch(0, 0, 14, 1, 14, lazy=False)[0])
            check_slices(rb.sample().exclude("index"))  # its own view; the parent's thread is not here
            check_rows(rb[:])

        rb.extend(batch(0, 0, 0, 1, 14, lazy=False)[0])
        rb.sample()
        rb.inbox.writer.close()
        assert os.waitpid(forked(work), 0)[1] == 0
        assert len(rb) == 28 and check_rows(rb[:])[:, 2].tolist() == list(range(28))
        assert rb.inbox.folder.path.is_dir()  # the child has taken nothing away


def test_nothing_is_left_in_shared_memory():
    before = ours()
    rb = buffer()
    rb.extend(batch(0, 0, 0, 1, 200)[0])
    assert len(ours()) == len(before) + 1 and rb.storage.nbytes > 200 * 8 * 40
    rb.close()
    assert ours() == before
    buffer().extend(batch(0, 0, 0, 1, 5)[0])  # nobody holds it any more
    assert ours() == before


def test_after_a_kill_of_all_the_next_start_takes_everything_away():
    def owner():
        os.setsid()
        rb = ReplayBufferEnsemble.per_worker(2, buffer)
        for i in range(2):
            forked(write_on, rb.writer(i), i, 0)
        wait_for(lambda: all(len(member) for member in rb.buffers))
        os.write(mouth, b"x")
        time.sleep(60)

    before = ours()
    ear, mouth = os.pipe()
    pid = forked(owner)
    assert os.read(ear, 1) == b"x"
    assert len(ours()) == len(before) + 2 and not sweep(place(True))  # they live
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    wait_for(lambda: buffer().close() or ours() == before)  # a killed process's lock goes a moment after it
    os.close(ear), os.close(mouth)


def test_a_writer_whose_owner_is_gone_is_told():
    rb = buffer()
    writer = rb.writer()
    writer.extend(batch(0, 0, 0, 1, 5)[0])
    rb.close()
    refused(ResourceError, "owner closed", lambda: writer.extend(batch(0, 0, 5, 1, 5)[0]))
    refused(ResourceError, "owner closed", lambda: pickle.loads(pickle.dumps(writer)).extend(batch(0, 0, 5, 1, 5)[0]))


def test_rows_may_lie_in_temporary_files():
    with ReplayBuffer(storage=LazyMemmapStorage(100), shared=True, batch_size=5) as rb:
        assert not str(rb.inbox.folder.path).startswith("/dev/shm")
        rb.writer().extend(batch(0, 0, 0, 1, 50)[0])
        check_rows(rb.sample())
        assert torch.equal(rb[:]["observation"][:, 3], torch.arange(50.0, dtype=torch.float64))
