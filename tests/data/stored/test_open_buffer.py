"""Anything that holds stored steps, opened as a buffer: every row is as it was written, and nothing is changed."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch
from face import refused
from tensordict import TensorDict

from rlcli.collectors import Collector
from rlcli.data import (
    CompressedStorage,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SegmentWriter,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    full_next_obs,
    open_buffer,
)
from rlcli.data.files import dumps
from rlcli.data.files.sealed_folder import SealedFolders
from rlcli.data.next_obs import concat
from rlcli.data.storages import mapped
from rlcli.data.stored import opening
from rlcli.envs import GymEnv, SerialEnv
from rlcli.errors import ArgumentError, ConfigError, DamagedDataError, ResourceError
from rlcli.inspection.folder import inspect

NEXT = ("next", "observation")


def batches(mode="exact", lanes=3, frames=240, per_batch=37):
    """Steps of random play, in the batches of a collector; env dims are kept."""
    collector = Collector(
        SerialEnv(lanes, lambda: GymEnv("CartPole-v1")), frames_per_batch=per_batch, total_frames=frames,
        next_obs=mode, seed=5,
    )  # fmt: skip
    return list(collector)


def segments(folder, written, **metadata):
    with SegmentWriter(folder, metadata) as writer:
        for batch in written:
            writer.append(batch)
    return folder


def content(folder):
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def by_step(batch):
    """Rows ``[lanes, T]`` in the order of a buffer with two dims."""
    return batch.transpose(0, 1).reshape(-1) if batch.ndim > 1 else batch


def equal(got, wanted):
    for key in wanted.keys(True, True):
        ours, theirs = got.get(key), wanted.get(key)
        assert ours.dtype == theirs.dtype and torch.equal(ours + 0, theirs + 0), key


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("mode", ["exact", "full"])
def test_every_row_of_a_collection_is_the_one_that_was_collected(tmp_path, mode, lanes):
    written = batches(mode, lanes)
    segments(tmp_path / "data", written, next_obs=mode)
    before = content(tmp_path)
    buffer = open_buffer(tmp_path)  # a run folder has it under data/
    whole = by_step(full_next_obs(concat(written)))
    assert len(buffer) == whole.numel() and buffer.ring.exact == (mode == "exact")
    equal(by_step(buffer[:]), whole)
    rows = torch.tensor(random.Random(1).choices(range(len(buffer)), k=500))
    equal(buffer[rows], whole[rows])
    assert content(tmp_path) == before
    if mode == "exact":  # only what stands for no row is in memory
        assert buffer.ring.contents.pairs.memory.nbytes < 16 * len(buffer) / 2


def test_rows_are_read_in_place_and_not_copied(tmp_path):
    folder = segments(tmp_path, batches("full"))
    buffer = open_buffer(folder)
    assert isinstance(buffer.storage, mapped.MappedStorage)
    paths = sorted(str(path) for path in folder.glob("0*.safetensors"))
    assert [str(part.path) for part in buffer.storage.parts] == paths
    with open("/proc/self/maps") as file:
        lines = [line for line in file if str(folder) in line]
    assert len(lines) == len(paths) and all(" rw-p " in line for line in lines)  # private: nothing gets back


def test_what_compact_kept_is_read_off_the_rows_that_follow(tmp_path):
    written, full = batches("compact"), batches("full")
    about = {"next_obs": "compact", "observations": [["observation"]], "fill_value": None}
    buffer = open_buffer(segments(tmp_path, written, **about))
    got, whole = by_step(buffer[:]), by_step(torch.cat(full, 1))
    unknown = whole["next", "done"].squeeze(-1).clone()
    unknown[-3:] = True
    assert got[NEXT][unknown].isnan().all() and torch.equal(got[NEXT][~unknown], whole[NEXT][~unknown])


def test_differences_are_decoded(tmp_path):
    buffer = open_buffer(segments(tmp_path, batches("delta"), next_obs="delta"))
    whole = by_step(torch.cat(batches("full"), 1))
    assert (by_step(buffer[:])[NEXT] - whole[NEXT]).abs().max() < 2e-3


def test_an_episode_that_a_resume_could_not_go_on_with_ends_there(tmp_path):
    written = batches("full")
    with SegmentWriter(tmp_path) as writer:
        for batch in written[:2]:
            writer.append(batch)
        first = writer.frames + sum(record["frames"] for record in writer.pending)
    with SegmentWriter(tmp_path, resume=True) as writer:
        writer.cut([0, 2])
        for batch in written[2:]:
            writer.append(batch)
    got = by_step(open_buffer(tmp_path)[:])
    plain = by_step(torch.cat(written, 1))
    changed = torch.zeros(len(got), dtype=torch.bool)
    changed[[first - 3, first - 1]] = True
    for flag in ("done", "truncated"):
        wanted = plain["next", flag].squeeze(-1) | changed
        assert torch.equal(got["next", flag].squeeze(-1), wanted)


SAMPLERS = {
    "random": lambda: RandomSampler(seed=0),
    "without": SamplerWithoutReplacement,
    "slices": lambda: SliceSampler(slice_len=4, strict_length=False),
    "slices without": lambda: SliceSamplerWithoutReplacement(slice_len=4, strict_length=False),
    "prioritized slices": lambda: PrioritizedSliceSampler(240, 0.6, 0.4, slice_len=4, strict_length=False),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_draws_what_it_draws_from_memory(tmp_path, name):
    """The same rows under the same seed as from a buffer in memory that was filled with the same batches."""
    written = batches("exact")
    theirs = TensorDictReplayBuffer(
        storage=LazyTensorStorage(240, ndim=2), sampler=SAMPLERS[name](), batch_size=32, next_obs="exact"
    )
    for batch in written:
        theirs.extend(batch)
    ours = open_buffer(segments(tmp_path, written), sampler=SAMPLERS[name](), batch_size=32)
    for buffer in (ours, theirs):
        buffer.set_seed(3)
    for _ in range(5):
        equal(ours.sample(), theirs.sample())


def test_more_files_than_may_be_mapped_are_mapped_in_turn(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped, "MAPPED", 3)
    written = batches("exact", per_batch=12)
    buffer = open_buffer(segments(tmp_path, written))
    assert len(buffer.storage.parts) == 20
    whole, rng = by_step(full_next_obs(concat(written))), np.random.default_rng(0)
    for _ in range(20):
        rows = torch.from_numpy(rng.integers(0, 240, 16))
        equal(buffer[rows], whole[rows])
        assert len(buffer.storage._maps) <= 3


@pytest.mark.parametrize("act", ["extend", "set", "load"])
def test_writing_is_refused_and_says_how_to_copy(tmp_path, act):
    written = batches("exact")
    buffer = open_buffer(segments(tmp_path, written))
    state, before = buffer.state_dict(), buffer[:]
    with refused(ArgumentError, "max_size=N"):
        if act == "extend":
            buffer.extend(written[0])
        elif act == "set":
            buffer[5] = buffer[6]
        else:
            buffer.load_state_dict(state)
    equal(buffer[:], before)


# ---- kept rows and dumps -------------------------------------------------------------------------------------------
def kept(folder, written, *, max_size=120, codes=False, **options):
    """A buffer on disk that went round, closed; and the same rows in memory."""
    storage = LazyMemmapStorage(max_size, scratch_dir=folder, ndim=2, commit_seconds=0)
    both = [
        TensorDictReplayBuffer(storage=kind, batch_size=8, next_obs="exact", codes=codes)
        for kind in (storage, LazyTensorStorage(max_size, ndim=2))
    ]
    for batch in written:
        for buffer in both:
            buffer.extend(batch)
    return both


@pytest.mark.parametrize("codes", [False, True])
def test_kept_rows_are_read_as_their_buffer_read_them(tmp_path, codes):
    ours, theirs = kept(tmp_path / "rows", batches("exact"), codes=codes)
    live = open_buffer(tmp_path / "rows")  # while it is written
    equal(live[:], theirs[:])
    ours.close()
    before = content(tmp_path)
    buffer = open_buffer(tmp_path / "rows", sampler=SliceSampler(slice_len=5, strict_length=False), batch_size=20)
    equal(buffer[:], theirs[:])
    buffer.sample()
    assert content(tmp_path) == before and len(buffer) == 120


class Meanwhile:
    """Calls a function, and before or after its first two calls something else."""

    def __init__(self, function, work, after=False):
        self.function, self.work, self.after, self.left = function, work, after, 2

    def __call__(self, *args, **options):
        found, self.left = self.function(*args, **options) if self.after else None, self.left - 1
        if self.left >= 0:
            self.work()
        return found if self.after else self.function(*args, **options)


def numbered(first, count=40):
    return TensorDict({"number": torch.arange(first, first + count)}, [count])


@pytest.mark.parametrize("codes", [False, True])
def test_kept_rows_are_read_beside_a_writer_that_takes_away_what_it_no_longer_needs(tmp_path, monkeypatch, codes):
    rb = ReplayBuffer(storage=LazyMemmapStorage(50, scratch_dir=tmp_path, commit_seconds=0.0), codes=codes)
    rb.extend(numbered(0))
    written = iter(range(40, 1000, 40))

    def go_round():
        for _ in range(4):
            rb.extend(numbered(next(written)))

    monkeypatch.setattr(opening, "_committed_rows", Meanwhile(opening._committed_rows, go_round))
    found = open_buffer(tmp_path)[:]["number"]
    assert found.sort().values.tolist() == list(range(310, 360))
    monkeypatch.setattr(mapped, "MAPPED", 1)
    equal(open_buffer(tmp_path)[:], rb[:])


@pytest.mark.parametrize("load", ["open", "copy", "loads"])
def test_a_dump_is_read_beside_a_writer_that_replaces_it(tmp_path, monkeypatch, load):
    rb = ReplayBuffer(storage=LazyTensorStorage(50))

    def again():
        rb.extend(numbered(len(rb), 5))
        rb.dumps(tmp_path)

    again()
    for where, name in ((opening, "find"), (dumps, "_newest")):
        monkeypatch.setattr(where, name, Meanwhile(getattr(where, name), again, after=True))
    verify, left = SealedFolders.verify, [3]

    def verified_too_late(self, path, known=()):
        if not known and left[0]:
            left[0] -= 1
            again()
        return verify(self, path, known)

    monkeypatch.setattr(SealedFolders, "verify", verified_too_late)
    if load == "loads":
        read = ReplayBuffer(storage=LazyTensorStorage(50))
        read.loads(tmp_path)
    else:
        read = open_buffer(tmp_path, max_size=50 if load == "copy" else None)
    found = read[:]["number"].tolist()
    assert found == list(range(len(found))) and len(found) >= 20


def test_a_dump_that_is_read_or_written_is_not_taken_away(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(50))
    rb.extend(numbered(0))
    rb.dumps(tmp_path)
    (first,) = tmp_path.iterdir()
    with dumps.FOLDERS.held(first) as there:
        assert there
        rb.dumps(tmp_path)
        assert first.exists()
    other = tmp_path / ".tmp_000009_4711"  # that of another process
    other.mkdir()
    with dumps.FOLDERS.held(other) as there:
        assert not there
        rb.dumps(tmp_path)
        assert other.exists() and not first.exists()
    rb.dumps(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["dump_000004"]


@pytest.mark.parametrize("kind", ["tensor", "memmap", "compressed"])
@pytest.mark.parametrize("codes", [False, True])
def test_a_dump_is_read_as_its_buffer_was(tmp_path, kind, codes):
    ours, theirs = kept(tmp_path / "rows", batches("exact"), codes=codes)
    source = {"tensor": theirs, "memmap": ours}.get(kind)
    if source is None:
        source = TensorDictReplayBuffer(storage=CompressedStorage(120, ndim=2), next_obs="exact", codes=codes)
        for batch in batches("exact"):
            source.extend(batch)
    source.dumps(tmp_path / "dump")
    for folder in (tmp_path / "dump", tmp_path / "dump" / "dump_000001"):
        equal(open_buffer(folder)[:], theirs[:])


# ---- copies --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["exact", "full"])
@pytest.mark.parametrize("room", [100, 240, 1000])
def test_a_copy_holds_the_newest_rows_that_fit_and_can_be_extended(tmp_path, mode, room):
    written = batches(mode)
    folder = segments(tmp_path, written)
    buffer = open_buffer(folder, max_size=room, batch_size=16)
    whole = by_step(full_next_obs(concat(written)))
    rows = min(room // 3 * 3, 240)
    assert len(buffer) == rows
    equal(by_step(buffer[:]), whole[-rows:])
    assert (buffer.ring.index.successors(np.arange(rows)) >= 0).sum() >= rows * 0.8
    buffer.extend(written[0])
    buffer.sample()


def stacked(folder):
    frames = torch.arange(34, dtype=torch.uint8)[:, None, None].expand(-1, 3, 3)
    pixels, no = torch.stack([frames[t : t + 4] for t in range(31)]), torch.zeros(1, 30, 1, dtype=torch.bool)
    flags = {"done": no, "terminated": no.clone(), "truncated": no.clone(), "reward": torch.ones(1, 30, 1)}
    content = {"pixels": pixels[:-1][None], "next": {"pixels": pixels[1:][None], **flags}}
    return segments(folder, [TensorDict(content, [1, 30])]), pixels[:-1]


def test_a_copy_may_be_stored_in_another_way_than_its_source(tmp_path):
    folder, pixels = stacked(tmp_path / "data")
    copy = open_buffer(folder, max_size=30, frame_stack=4, codes=True, next_obs="full")
    assert list(copy.ring.stacks) == ["pixels"] and torch.equal(copy[:]["pixels"], pixels[None])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"frame_stack": 4}, "frame_stack: rows are read as they are stored"),
        ({"codes": True}, "or copy the rows into memory: max_size=..."),
        ({"next_obs": "full"}, "next_obs: rows"),
        ({"storage": LazyTensorStorage, "max_size": 9}, "storage: rows"),
    ],
)
def test_what_the_stored_rows_decide_is_not_asked_for(tmp_path, options, text):
    folder, pixels = stacked(tmp_path / "data")
    with pytest.raises(ArgumentError) as caught:
        open_buffer(folder, **options)
    assert text in str(caught.value)
    assert torch.equal(open_buffer(folder, codes=False, frame_stack=None)[:]["pixels"], pixels[None])


def test_a_copy_without_ids_joins_nothing_that_was_apart(tmp_path):
    """Trajectories that end without a flag, told apart by ids alone, stay apart where ids are not copied."""
    from rlcli.data.stored import copy_rows

    written = [batch.clone() for batch in batches("full")]
    for number, batch in enumerate(written):
        batch["collector", "traj_ids"] += 1000 * number  # every batch begins others, as after a reset
    source = open_buffer(segments(tmp_path, written))
    for ndim in (1, 2):
        target = TensorDictReplayBuffer(storage=LazyTensorStorage(240, ndim=ndim), next_obs="full")
        copy_rows(source, target, lambda rows: source.ring.read(rows).exclude("collector"))
        found = np.arange(240)
        next_row = target.ring.index.successors(found)
        steps = next_row >= 0
        one, other = target[torch.from_numpy(found[steps])], target[torch.from_numpy(next_row[steps])]
        assert torch.equal(one[NEXT], other["observation"]) and not one["next", "done"].any()
        lengths = target.ring.index.trajectories()["length"]
        assert lengths.max() <= max(batch.shape[-1] for batch in written)


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("known", [True, False])
def test_a_lane_that_stops_leaves_the_trajectories_of_other_lanes_whole(lanes, known, monkeypatch):
    """A copy without ids has the trajectories of its source, whatever stops in which lane."""
    from rlcli.data.stored import opening

    monkeypatch.setattr(opening, "PIECE", 24)
    for seed in range(12):
        rng = np.random.default_rng(seed)
        ids = torch.from_numpy((rng.random((lanes, 60)) < 0.08).cumsum(1)) + 100 * torch.arange(lanes)[:, None]
        done = torch.from_numpy(rng.random((lanes, 60, 1)) < 0.04)
        x = 1000.0 * ids + torch.arange(60)
        nexts = {"done": done} | ({"x": x + 1} if known else {})
        batch = TensorDict({"x": x, "next": nexts, "collector": {"traj_ids": ids}}, [lanes, 60])
        ndim = 1 if lanes == 1 else 2
        source, target = (ReplayBuffer(storage=LazyTensorStorage(60 * lanes, ndim=ndim)) for _ in range(2))
        source.extend(batch[0] if lanes == 1 else batch)
        opening.copy_rows(source, target, lambda rows, ring=source.ring: ring.read(rows).exclude("collector"))
        rows = np.arange(60 * lanes)
        assert target.ring.index.successors(rows).tolist() == source.ring.index.successors(rows).tolist()


# ---- bad input -----------------------------------------------------------------------------------------------------
def test_folders_without_steps_are_refused(tmp_path):
    refused(ConfigError, "nowhere", lambda: open_buffer(tmp_path / "nowhere"))
    refused(ConfigError, "stored", lambda: open_buffer(tmp_path))
    SegmentWriter(tmp_path / "data").close()
    refused(ResourceError, "nothing yet", lambda: open_buffer(tmp_path))


@pytest.mark.parametrize("header", [True, False], ids=["header", "torn header"])
@pytest.mark.parametrize("kind", ["segments", "rows"])
def test_a_folder_whose_writer_was_killed_before_its_first_commit_holds_nothing_yet(tmp_path, kind, header):
    """Only what a commit names counts; without a header, files would prove that a journal was lost."""
    folder = tmp_path / "x"
    if kind == "segments":
        SegmentWriter(folder)._journal.close()
    else:
        storage = LazyMemmapStorage(120, scratch_dir=folder, ndim=2, commit_seconds=3600.0)
        TensorDictReplayBuffer(storage=storage).extend(batches("full")[0][:, :3])
        storage._journal.abandon()
    journal = folder / "journal.jsonl"
    if not header:
        for path in folder.glob("*.bin"):
            path.unlink()
        journal.write_bytes(journal.read_bytes()[:20])
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for look in (open_buffer, inspect) if kind == "rows" or not header else (open_buffer,):
        with refused(ResourceError, "nothing yet") as caught:
            look(folder)
        assert "resume" in caught.value.fix and str(folder) in str(caught.value)
    assert before == {path: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["00000000.safetensors", "rows-00000000.0.bin"])
def test_a_journal_without_a_header_beside_what_it_named_is_damaged(tmp_path, name):
    (tmp_path / "journal.jsonl").write_bytes(b"")
    (tmp_path / name).write_bytes(b"x")
    refused(DamagedDataError, "header", lambda: open_buffer(tmp_path))


@pytest.mark.parametrize("kind", ["segments", "rows", "dump"])
def test_a_flipped_bit_is_found_when_a_folder_is_opened(tmp_path, kind):
    written = batches("exact")
    if kind == "segments":
        segments(tmp_path / "x", written)
    else:
        ours, theirs = kept(tmp_path / "x", written, max_size=300)
        ours.close()
    folder = tmp_path / "x"
    if kind == "dump":
        theirs.dumps(tmp_path / "y")
        folder = tmp_path / "y"
    victims = [p for p in sorted(folder.rglob("*")) if p.suffix in (".safetensors", ".bin", ".jsonl", ".json")]
    for victim in victims:
        data = victim.read_bytes()
        at = 9 if victim.suffix == ".bin" else len(data) // 2
        victim.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(DamagedDataError):
            open_buffer(folder)
        victim.write_bytes(data)
    open_buffer(folder)
    os.truncate(victims[-1], 5)
    with pytest.raises(DamagedDataError):
        open_buffer(folder)
