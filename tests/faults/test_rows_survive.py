"""A ring on disk under kills, power cuts, flips and full disks: acknowledged rows are not lost, torn ones not read."""

from __future__ import annotations

import errno
import functools
import os
import resource
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
import torch
from disks import CountingDisk, DyingDisk, PowerCut, RefusingDisk, run_and_die
from face import refused
from rings import LosingPages, batch, batches_in, begin, equal, live, quiet, reference, wrong
from tensordict import TensorDict

from rlcli.data import ReplayBuffer
from rlcli.data.storages import LazyMemmapStorage, LazyTensorStorage
from rlcli.errors import ArgumentError, DamagedDataError, ResourceError

BATCHES = 9  # 36 steps into a ring of 20


def write_all(folder, disk, report=lambda value: None, upto=BATCHES, mode="exact"):
    ring = begin(folder, disk, mode)
    for i in range(batches_in(ring), upto):
        if i % 5 == 4:
            ring.overwrite(np.array([3, 4]), batch(i - 1).reshape(-1)[:2])
            ring.overwrite(np.array([3, 4]), ring.read(np.array([3, 4])))
        ring.extend(batch(i))
        report(batches_in(ring))
    return ring


def let_go(ring):
    """As a killed process does: nothing is committed."""
    if ring.storage._journal is not None:
        ring.storage._journal.abandon()


@functools.cache
def overwritten(batches, mode="exact"):
    """What memory holds after the same writes."""
    from rings import STEPS, Ring

    ring = Ring(LazyTensorStorage(STEPS * 2, ndim=2), next_obs=mode)
    for i in range(batches):
        if i % 5 == 4:
            ring.overwrite(np.array([3, 4]), batch(i - 1).reshape(-1)[:2])
            ring.overwrite(np.array([3, 4]), ring.read(np.array([3, 4])))
        ring.extend(batch(i))
    return live(ring)


def check_and_finish(folder, acknowledged, text, mode="exact"):
    """What was acknowledged is there; the rest can be added; the whole then verifies."""
    ring = quiet(lambda: begin(folder, mode=mode))
    count = batches_in(ring)
    assert acknowledged <= count <= BATCHES, f"{text}: {acknowledged} acknowledged, {count} there"
    found = live(ring)
    may_be = [overwritten(count, mode)]
    if count % 5 == 4:  # the cut may have come after the two rows were written over
        more = begin_like(count, mode)
        may_be += more
    assert any(equal(found, one) for one in may_be) or not count, text
    let_go(ring)
    write = quiet(lambda: write_all(folder, None, mode=mode))
    assert equal(live(write), overwritten(BATCHES, mode)) or count % 5 == 4, text
    write.storage.close(write.contents.encoded)
    assert wrong(folder) == [], text


@functools.cache
def begin_like(count, mode):
    from rings import STEPS, Ring

    out = []
    for times in (1, 2):
        ring = Ring(LazyTensorStorage(STEPS * 2, ndim=2), next_obs=mode)
        for i in range(count + 1):
            if i % 5 == 4:
                ring.overwrite(np.array([3, 4]), batch(i - 1).reshape(-1)[:2])
                if i < count or times == 2:
                    ring.overwrite(np.array([3, 4]), ring.read(np.array([3, 4])))
            if i < count:
                ring.extend(batch(i))
        out.append(live(ring))
    return out


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    disk = CountingDisk()
    ring = write_all(tmp_path_factory.mktemp("counted") / "whole", disk)
    kinds = {call for call, _ in disk.calls}
    assert kinds >= {"create", "reserve", "write", "sync", "sync_folder", "remove"}
    let_go(ring)
    return disk.calls


def every(calls, step=5):
    """Each kind of call at each file, and some of the rest: a slice that takes seconds."""
    seen, out = set(), []
    for n, call in enumerate(calls, 1):
        kind = call[0], call[1].split("-")[0]
        if kind not in seen or n % step == 0:
            out.append(n)
        seen.add(kind)
    return out


def test_killed_before_every_kind_of_call(tmp_path, calls):
    killed_before(tmp_path, calls, every(calls, 64))


@pytest.mark.slow
def test_killed_before_every_single_call_of_a_ring(tmp_path, calls):
    killed_before(tmp_path, calls, range(1, len(calls) + 1))


def killed_before(tmp_path, calls, numbers):
    for n in numbers:
        folder = tmp_path / str(n)
        code, reported = run_and_die(lambda report, n=n, folder=folder: write_all(folder, DyingDisk(n), report))
        assert code == 77
        check_and_finish(folder, max(reported, default=0), f"killed before call {n}: {calls[n - 1]}")
        shutil.rmtree(folder)


@pytest.mark.parametrize("step", [16, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", range(2))
def test_power_cut_before_every_kind_of_call(tmp_path, calls, seed, step):
    rng = np.random.default_rng(seed)
    for n in every(calls, step)[seed::2]:
        folder, disk, reported = tmp_path / f"{n}", LosingPages(n), [0]
        folder.mkdir()
        with pytest.raises(PowerCut) as cut:
            write_all(folder, disk, reported.append)
        del cut
        after = tmp_path / f"{n} after"
        disk.after_the_cut(folder, after, rng)
        text = f"seed {seed}, power cut before call {n}: {calls[n - 1]}"
        check_and_finish(after, max(reported), text)
        shutil.rmtree(after)


@pytest.mark.parametrize("either", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_any_call_may_be_refused_and_nothing_acknowledged_is_lost(tmp_path, calls, error, either):
    """Each with one of the errors, or with either: what is made of them does not look at which it was."""
    for n in every(calls, 7) if either else every(calls, 7)[error == errno.EIO :: 2]:
        folder, done, (kind, _) = tmp_path / str(n), [0], calls[n - 1]
        if kind == "remove":  # what it replaced is acknowledged: the next commit, or opening, takes it away
            let_go(write_all(folder, RefusingDisk(n, error), done.append))
            assert max(done) == BATCHES
        else:
            with pytest.raises(ResourceError) as caught:
                write_all(folder, RefusingDisk(n, error), done.append)
            assert caught.value.exit_code == 5 and str(tmp_path) in str(caught.value)
            if error == errno.ENOSPC and kind in ("reserve", "write"):
                assert "bytes are needed" in str(caught.value)
            del caught
        check_and_finish(folder, max(done), f"call {n} refused: {calls[n - 1]}")


def test_a_ring_goes_on_after_the_disk_was_full(tmp_path):
    for call, n in (("reserve", 2), ("sync", 9), ("write", 7)):
        folder = tmp_path / call
        ring, refused = begin(folder, RefusingDisk(n, call=call)), 0
        while batches_in(ring) < BATCHES:
            written = batches_in(ring)
            try:
                ring.extend(batch(written))
            except ResourceError:
                refused += 1
                written = batches_in(ring)  # a commit that is refused leaves the rows where they are
                assert equal(live(ring), reference(written, "exact")) or not written
        assert refused == 1
        ring.storage.close(ring.content)
        assert wrong(folder) == []
        again = begin(folder)
        assert equal(live(again), reference(BATCHES, "exact"))


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("number", [1, 2])
def test_a_write_around_the_end_of_the_ring_is_refused_whole(tmp_path, kept, number):
    """It needs a file for the rows before the end, and another for those after it."""
    storage = LazyMemmapStorage(64, scratch_dir=tmp_path / "rows" if kept else None, commit_seconds=0.0)
    rb, rows = ReplayBuffer(storage=storage), torch.arange(1000)
    for part in (rows[:64], rows[64:120]):
        rb.extend(TensorDict({"obs": part}, [len(part)]))
    before = rb[:]["obs"].tolist()
    storage.disk = RefusingDisk(number, call="reserve")
    refused(ResourceError, "disk full", lambda: rb.extend(TensorDict({"obs": rows[120:160] + 5000}, [40])))
    assert rb[:]["obs"].tolist() == before and len(rb) == 64
    rb.dumps(tmp_path / "dump")
    again = ReplayBuffer(storage=LazyTensorStorage(64))
    again.loads(tmp_path / "dump")
    assert again[:]["obs"].tolist() == before
    rb.extend(TensorDict({"obs": rows[120:160]}, [40]))
    after = [*range(128, 160), *range(96, 128)]
    assert rb[:]["obs"].tolist() == after
    rb.close()
    if kept:
        back = ReplayBuffer(storage=LazyMemmapStorage(64, scratch_dir=tmp_path / "rows", resume=True))
        assert back[:]["obs"].tolist() == after


def fill_up(folder, size):
    """Write into `folder` until it is full."""
    (folder / "ballast").write_bytes(bytes(size))


@pytest.fixture
def small(tmp_path):
    """A file system of 1 MB, where this process may mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], capture_output=True).returncode:
        pytest.skip("a file system of 1 MB cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_declared_size_that_does_not_fit_is_refused_before_the_first_row(small):
    storage = LazyMemmapStorage(100_000, scratch_dir=small / "rows")
    from rlcli.data.ring.ring import Ring

    ring = Ring(storage)
    with refused(ResourceError, "needed") as caught:
        ring.extend(batch(0))
    assert caught.value.exit_code == 5 and not len(ring)
    assert not (small / "rows").exists() or not list((small / "rows").glob("rows-*"))


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize(("capacity", "width"), [(64, 8), (1000, 3), (5000, 4096)])
def test_the_bytes_that_are_asked_for_are_enough_for_all_files_of_a_ring_that_goes_round(
    tmp_path, kept, capacity, width
):
    class Asked(CountingDisk):
        needed = most = 0

        def require(self, folder, needed):
            self.needed = needed

        def reserve_file(self, path, size):
            super().reserve_file(path, size)
            self.most = max(self.most, storage.nbytes + size)

    storage = LazyMemmapStorage(capacity, scratch_dir=tmp_path / "rows" if kept else None, commit_seconds=0.0)
    storage.disk = disk = Asked()
    rb, part = ReplayBuffer(storage=storage), capacity // 8
    for i in range(20):
        rb.extend(TensorDict({"obs": torch.full((part, width), i, dtype=torch.uint8)}, [part]))
    assert disk.needed == LazyMemmapStorage.disk_need(width, capacity, kept=kept)
    assert capacity * width < disk.most <= LazyMemmapStorage.disk_need(width, capacity, kept=kept, batch=part)
    rb.close()


def test_a_really_full_disk_refuses_rows_and_keeps_those_it_has(small):
    ring = begin(small / "rows")
    for i in range(6):
        ring.extend(batch(i))
    fill_up(small, os.statvfs(small).f_bavail * os.statvfs(small).f_frsize)
    with refused(ResourceError, "needed"):
        for i in range(6, 60):
            ring.extend(batch(i))
    (small / "ballast").unlink()
    count = batches_in(ring)
    for i in range(count, 70):
        ring.extend(batch(i))
    ring.storage.close(ring.content)
    assert wrong(small / "rows") == []
    assert equal(live(begin(small / "rows")), reference(70, "exact"))


def test_a_limit_on_file_sizes_is_refused_in_a_sentence(tmp_path):
    def work(report):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        try:
            write_all(tmp_path / "rows", None)
        except ResourceError as error:
            report(str(error))

    _, reported = run_and_die(work)
    assert "bytes are needed" in reported[0] and "ulimit" in reported[0]


# ---- kills at any moment -------------------------------------------------------------------------------------------
def collect(folder, writer):
    """Write for ever; what is acknowledged is reported after every batch."""
    ring = quiet(lambda: begin(folder, commit_seconds=0.002))
    os.write(writer, ring.storage.acknowledged.to_bytes(8, "little"))
    i = batches_in(ring)
    while True:
        ring.extend(batch(i))
        i += 1
        os.write(writer, ring.storage.acknowledged.to_bytes(8, "little"))


def kill_again_and_again(folder, kills, seed):
    rng = np.random.default_rng(seed)
    safe = 0
    for number in range(kills):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            try:
                collect(folder, writer)
            finally:
                os._exit(1)
        os.close(writer)
        first = os.read(reader, 8)
        assert len(first) == 8, f"seed {seed}, kill {number}: the process did not begin"
        time.sleep(float(rng.exponential(0.02)))
        os.kill(pid, signal.SIGKILL)
        told = first
        while part := os.read(reader, 1 << 16):
            told += part
        os.close(reader)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        told = told[: len(told) // 8 * 8]
        safe = max(safe, int.from_bytes(told[-8:], "little"))
        ring = quiet(lambda: begin(folder))
        assert ring.cursor * 2 >= safe, f"seed {seed}, kill {number}: acknowledged rows are lost"
        assert equal(live(ring), reference(batches_in(ring), "exact")), f"seed {seed}, kill {number}"
        let_go(ring)
    assert safe > ONCE_ROUND, "the ring went round"
    print(f"seed {seed}: {kills} kills, {safe} rows acknowledged, 0 lost, 0 torn")


ONCE_ROUND = 40


def test_12_kills_lose_nothing_that_was_acknowledged(tmp_path):
    kill_again_and_again(tmp_path / "rows", 12, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_500_kills_lose_nothing_that_was_acknowledged(tmp_path, seed):
    kill_again_and_again(tmp_path / "rows", 125, seed=seed)


def give_up(folder, disk):
    ring = write_all(folder, disk, upto=6)
    before = len(disk.calls)
    ring.clear(fields=True)
    return before


def test_killed_while_all_rows_are_given_up_the_folder_can_be_gone_on_with(tmp_path):
    disk = CountingDisk()
    before = give_up(tmp_path / "counted", disk)
    assert not list((tmp_path / "counted").iterdir())
    for n in range(before + 1, len(disk.calls) + 1):
        folder, text = tmp_path / str(n), f"killed before call {n}: {disk.calls[n - 1]}"
        code, _ = run_and_die(lambda report, n=n, folder=folder: give_up(folder, DyingDisk(n)))
        assert code == 77, text
        assert not [line for line in wrong(folder) if "did not finish" not in line and "no commit" not in line]
        ring = quiet(lambda folder=folder: begin(folder))
        assert not len(ring) or equal(live(ring), overwritten(6)), text
        let_go(ring)
        ring = quiet(lambda folder=folder: write_all(folder, None))
        ring.storage.close(ring.content)
        assert wrong(folder) == [], text


@pytest.mark.parametrize("error", [errno.EROFS, errno.ENOSPC])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_ring_whose_files_cannot_be_taken_away_is_empty_and_goes_on_when_they_can(tmp_path, number, error):
    ring = begin(tmp_path / "rows", disk := RefusingDisk(0, error, "remove"))
    for i in range(6):
        ring.extend(batch(i))
    for times in range(2):
        disk.n = (number if not times else 1) + sum(call == "remove" for call, _ in disk.calls)
        with pytest.raises(ResourceError, match=r"Read-only|disk is full"):
            ring.extend(batch(0)) if times else ring.clear(fields=True)
        assert not len(ring) and not ring.fields
        if not times and number < 4:  # the folder is this ring's still
            with refused(ResourceError, "writing"):
                begin(tmp_path / "rows")
    for i in range(3):
        ring.extend(batch(i))
    assert equal(live(ring), reference(3, "exact"))
    ring.storage.close(ring.content)
    assert wrong(tmp_path / "rows") == [] and equal(live(begin(tmp_path / "rows")), reference(3, "exact"))


def test_a_first_write_that_is_refused_leaves_nothing_in_the_way_of_the_next(tmp_path):
    begin(tmp_path / "counted", counted := CountingDisk()).extend(batch(0))
    calls = counted.calls[: 1 + [call for call, _ in counted.calls].index("sync_folder")]
    assert [call for call, _ in calls] == ["mkdir", "open", "write", "write", "sync", "sync_folder"]
    for n, (kind, _) in enumerate(calls, 1):
        ring = begin(tmp_path / str(n), RefusingDisk(n, errno.ENOSPC))
        with refused(ResourceError, "disk full"):
            ring.extend(batch(0))
        ring.extend(batch(0))
        assert equal(live(ring), reference(1, "exact")), kind
        ring.storage.close(ring.content)
        assert wrong(tmp_path / str(n)) == [], kind


def test_a_file_that_cannot_be_mapped_is_taken_away_and_the_ring_goes_on(tmp_path, monkeypatch):
    ring = begin(tmp_path / "rows")
    ring.extend(batch(0))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "from_file", no_more_maps)
        for write in (lambda: [ring.extend(batch(i)) for i in range(1, 9)], lambda: overwrite(ring)):
            refused(ResourceError, "map", write)
    count = batches_in(ring)
    overwrite(ring)
    for i in range(count, BATCHES):
        ring.extend(batch(i))
    assert equal(live(ring), reference(BATCHES, "exact"))
    ring.storage.close(ring.content)
    assert wrong(tmp_path / "rows") == []


def test_a_file_that_the_disk_did_not_take_away_is_in_nobodys_way(tmp_path):
    ring = begin(tmp_path / "rows")
    ring.extend(batch(0))
    (tmp_path / "rows" / "rows-00000000.1.bin").write_bytes(b"")
    overwrite(ring)
    ring.storage.commit(ring.content)
    assert equal(live(ring), reference(1, "exact"))


def overwrite(ring):
    rows = np.arange(ring.base * 2, ring.base * 2 + 3) % 40
    ring.overwrite(rows, ring.read(rows))


def no_more_maps(*_, **__):
    raise RuntimeError("unable to mmap: Cannot allocate memory")


# ---- flips, cuts, missing files ------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "rows"
    ring = write_all(folder, None)
    ring.storage.close(ring.content)
    assert wrong(folder) == []
    return folder


def counted_bytes(folder):
    """(file, byte) of everything that a checksum covers: all but rows that are dead or not yet written."""
    from rlcli.data.storages.row_journal import JOURNAL, Committed, state_name
    from rlcli.data.storages.segment import SegmentLayout, name_of

    said = Committed(folder / JOURNAL)
    layout = SegmentLayout.of(said.fields, said.header["segment_rows"])
    out = [(JOURNAL, at) for at in range((folder / JOURNAL).stat().st_size)]
    number = said.state[0]
    out += [(state_name(number), at) for at in range((folder / state_name(number)).stat().st_size)]
    for segment, (version, pieces) in said.pieces.items():
        for piece in pieces:
            for offset, width in zip(layout.offsets.tolist(), layout.widths.tolist(), strict=True):
                places = range(offset + piece.start * width, offset + piece.stop * width)
                out += [(name_of(segment, version), at) for at in places]
    return out


def is_found(folder, name, text):
    assert wrong(folder), text
    try:
        ring = quiet(lambda: begin(folder))
    except DamagedDataError as error:
        assert name.split("-")[0] in str(error) and error.exit_code == 4, text
    except ArgumentError:
        pass
    else:
        let_go(ring)
        pytest.fail(f"{text}: opened as if nothing had happened")


def flips(folder, tmp_path, count, seed):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    rng, places = np.random.default_rng(seed), counted_bytes(folder)
    for name, at in (places[i] for i in rng.integers(0, len(places), count)):
        content = bytearray((copy / name).read_bytes())
        content[at] ^= 1 << int(rng.integers(8))
        (copy / name).write_bytes(content)
        text = f"seed {seed}, byte {at} of {name}"
        if name == "journal.jsonl" and bytes(content).rfind(b"\n") != len(content) - 1:
            assert wrong(copy), text  # the end of the last line: a record that looks unfinished
        else:
            is_found(copy, name, text)
        shutil.copy(folder / name, copy / name)
    print(f"seed {seed}: {count} flips, {count} found")


def test_100_flips_are_all_found(whole, tmp_path):
    flips(whole, tmp_path, 100, seed=0)


@pytest.mark.slow
def test_2000_flips_are_all_found(whole, tmp_path):
    flips(whole, tmp_path, 2000, seed=1)


def test_a_file_cut_grown_or_missing_is_named(whole, tmp_path):
    copy, rng = tmp_path / "copy", np.random.default_rng(0)
    shutil.copytree(whole, copy)
    named = {name for name, _ in counted_bytes(whole)}
    for path in sorted(copy.iterdir()):
        if path.name not in named:
            continue
        content = path.read_bytes()
        ends = [0, len(content) - 1, *rng.integers(0, len(content), 8).tolist()]
        for new in (*(content[:end] for end in ends), content + b"\0", content + content):
            path.write_bytes(new)
            assert wrong(copy), f"{path.name}: {len(new)} bytes of {len(content)}"
            if path.name != "journal.jsonl":
                with refused(DamagedDataError, path.name):
                    begin(copy)
        path.unlink()
        if path.name != "journal.jsonl":
            assert any(path.name in line for line in wrong(copy))
            with refused(DamagedDataError, path.name):
                begin(copy)
        path.write_bytes(content)


def test_a_folder_in_use_or_of_another_storage_is_refused(tmp_path):
    ring = write_all(tmp_path / "rows", None, upto=3)
    refused(ResourceError, "already", lambda: LazyMemmapStorage(40, ndim=2, scratch_dir=tmp_path / "rows"))
    refused(ResourceError, "writing", lambda: begin(tmp_path / "rows"))
    ring.storage.close(ring.content)
    with refused(ArgumentError, "max_size 40 10"):
        LazyMemmapStorage(10, ndim=2, scratch_dir=tmp_path / "rows", resume=True)
    journal = tmp_path / "rows" / "journal.jsonl"
    text = journal.read_text()
    assert '"version":3' in text
    from rlcli.data.files.disk import digest_of

    line = text.splitlines()[0][33:].replace('"version":3', '"version":2')
    journal.write_text(f"{digest_of(b'', line.encode())} {line}\n")
    refused(DamagedDataError, "version", lambda: begin(tmp_path / "rows"))


# ---- forks ---------------------------------------------------------------------------------------------------------
def in_a_child(work):
    """The answer of `work()` in a forked child, or what it raised."""

    def report_it(report):
        try:
            report(work())
        except Exception as error:
            report(f"{type(error).__name__}: {error}")

    code, (answer,) = run_and_die(report_it)
    assert code == 0
    return answer


@pytest.mark.parametrize("kept", [True, False])
def test_a_forked_child_reads_the_rows_and_is_not_a_second_writer_of_them(tmp_path, kept):
    storage = LazyMemmapStorage(100, scratch_dir=tmp_path / "rows" if kept else None, commit_seconds=0.0)
    rb = ReplayBuffer(storage=storage)
    rb.extend(TensorDict({"a": torch.arange(10)}, [10]))
    assert in_a_child(lambda: rb[:]["a"].tolist()) == list(range(10))
    for write in (lambda: rb.extend(TensorDict({"a": torch.zeros(10).long()}, [10])), lambda: rb.ring.overwrite(
        np.array([3]), TensorDict({"a": torch.zeros(1).long()}, [1])
    )):  # fmt: skip
        said = in_a_child(write)
        assert "a forked process cannot write these rows" in said and f"process {os.getpid()} does" in said

    def begin_anew():
        rb.empty(fields=True)
        if not kept:
            rb.extend(TensorDict({"b": torch.ones(5)}, [5]))
        rb.close()

    assert in_a_child(rb.close) is None and in_a_child(begin_anew) is None
    rb.extend(TensorDict({"a": torch.arange(10, 20)}, [10]))
    assert rb[:]["a"].tolist() == list(range(20))
    rb.close()
    if kept:
        back = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=tmp_path / "rows", resume=True))
        assert back[:]["a"].tolist() == list(range(20))


@pytest.mark.parametrize("collected", [True, False])
def test_a_forked_child_does_not_keep_the_folder_of_a_killed_writer(tmp_path, collected):
    from rlcli.data import SegmentWriter

    def begin_there(resume):
        if collected:
            return SegmentWriter(tmp_path / "rows", resume=resume)
        return ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=tmp_path / "rows", resume=resume))

    def write_and_die(report):
        writer = begin_there(False)
        (writer.append if collected else writer.extend)(TensorDict({"a": torch.arange(10)[None]}, [1, 10]))
        if not os.fork():
            report(os.getpid())  # what a fork does in a child has been done
            time.sleep(60)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        write_and_die(lambda child: os.write(writer, child.to_bytes(8, "little")))
    child = int.from_bytes(os.read(reader, 8), "little")
    os.waitpid(pid, 0)
    os.close(reader), os.close(writer)
    try:
        begin_there(True).close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_child_does_not_collect_into_the_folder_of_its_parent(tmp_path):
    from rlcli.data import SegmentWriter, open_segments

    with SegmentWriter(tmp_path / "rows") as writer:
        writer.append(TensorDict({"a": torch.arange(10)[None]}, [1, 10]))
        said = in_a_child(lambda: writer.append(TensorDict({"a": torch.arange(10)[None]}, [1, 10])))
        assert "this process does not write here" in said and f"process {os.getpid()} does" in said
        assert in_a_child(writer.close) is None
        writer.append(TensorDict({"a": torch.arange(10, 20)[None]}, [1, 10]))
    assert torch.cat([batch["a"] for batch in open_segments(tmp_path / "rows")], 1).tolist() == [list(range(20))]
