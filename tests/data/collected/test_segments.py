"""A folder of segments, reopened, equals the run in memory bit for bit; everything that is not as written is found."""

from __future__ import annotations

import json
import multiprocessing
import struct
import warnings

import numpy as np
import pytest
import torch
from batches import same, twins
from face import Disk, refused
from safetensors import safe_open
from tensordict import NonTensorData, TensorDict

from rlcli.data import Rows, SegmentReader, SegmentWriter, open_segments, verify_segments
from rlcli.data.files.tensors import decode, encode
from rlcli.data.next_obs import concat
from rlcli.errors import ArgumentError, DamagedDataError, ResourceError
from tests.preloaded import forked

NEXT = ("next", "observation")


def written(folder, count=4, close=True, **options):
    """(batches as full, the writer)."""
    pairs = [twins(seed, steps=3 + seed % 3, **options) for seed in range(count)]
    writer = SegmentWriter(folder, {"env": "Test-v0", "seed": 3, "shape": [1, 2]})
    for exact, _ in pairs:
        writer.append(exact)
    if close:
        writer.close()
    else:
        writer._journal.close()
    return [full for _, full in pairs], writer


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_reopened_segments_equal_the_run_in_memory(tmp_path, dtype):
    full, writer = written(tmp_path / "data", dtype=dtype)
    reader = open_segments(tmp_path / "data")
    assert len(reader) == 4 and reader.frames == sum(td.numel() for td in full) == writer.frames
    assert reader.metadata == {"env": "Test-v0", "seed": 3, "shape": [1, 2]} and reader.closed
    for i, batch in enumerate(reader):
        same(batch, full[i])
        assert isinstance(batch.get(NEXT), Rows) and batch.names == full[i].names
    same(reader.concat(), torch.cat(full, 1))
    same(reader.read(-1), full[-1])
    assert reader.verify() == [] and reader.notices == []


def test_exact_segments_hold_each_observation_once(tmp_path):
    pairs = twins(steps=500, shapes=((64,), (8, 8)))
    sizes = []
    for name, batch in zip(("exact", "full"), pairs, strict=True):
        with SegmentWriter(tmp_path / name) as writer:
            writer.append(batch)
        sizes.append(writer.nbytes)
    assert sizes[0] < 0.52 * sizes[1]


def test_every_dtype_and_odd_shape_comes_back_bit_for_bit(tmp_path):
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
    dtypes += [torch.int8, torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64]
    batch = TensorDict({str(d): torch.arange(6).to(d).reshape(3, 2) for d in dtypes}, [3])
    batch["nan"] = torch.tensor([float("nan"), -0.0, float("-inf")])
    batch["nothing"] = torch.zeros(3, 0)
    batch["strided"] = torch.arange(12.0).reshape(4, 3).T
    batch["dots and/slashes", "a.b", "@ends", "ü"] = torch.arange(3)
    with SegmentWriter(tmp_path) as writer:
        writer.append(batch)
    back = open_segments(tmp_path).read(0)
    for key, value in batch.items(True, True):
        got = back.get(key)
        assert got.dtype == value.dtype and got.shape == value.shape
        assert got.contiguous().view(torch.uint8).tolist() == value.contiguous().view(torch.uint8).tolist()


def test_files_are_safetensors_that_the_library_reads(tmp_path):
    full, _ = written(tmp_path, count=1)
    with safe_open(tmp_path / "00000000.safetensors", "pt") as file:
        same(file.get_tensor("observation"), full[0].get("observation"))
        assert {"@ends", "@extra/observation", "@extra/camera/pixels", "next/reward"} < set(file.keys())
        assert "next/observation" not in file.keys()  # noqa: SIM118


def test_tensor_bytes_are_aligned_to_their_dtype():
    tensors = {"a": torch.zeros(3, dtype=torch.uint8), "b": torch.zeros(2), "c": torch.zeros(1, dtype=torch.int64)}
    data = b"".join(encode(tensors))
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    assert all((8 + size + header[n]["data_offsets"][0]) % x.element_size() == 0 for n, x in tensors.items())
    same(decode(data, "here"), tensors)


def test_memory_does_not_grow_with_the_number_of_segments(tmp_path):
    """The peak of a process that writes and reads 30 MB in 1 MB segments stays far below 30 MB."""
    script = f"""
import resource, torch
from tensordict import TensorDict
from rlcli.data import SegmentWriter, open_segments
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
def go(count, folder):
    with SegmentWriter(folder) as writer:
        for i in range(count):
            writer.append(TensorDict({{"x": torch.full((1000, 250), float(i))}}, [1000]))
    for i, batch in enumerate(open_segments(folder)):
        assert batch["x"][0, 0] == i
go(4, r"{tmp_path}/a")
before = peak()
go(30, r"{tmp_path}/b")
print((peak() - before) // 1024)
"""
    code, out, err = forked(script, tmp_path)
    assert code == 0 and int(out) < 12, (out, err)


def test_batches_written_in_groups_are_acknowledged_at_the_commit(tmp_path):
    pairs = [twins(seed) for seed in range(3)]
    writer = SegmentWriter(tmp_path, commit_seconds=3600)
    for exact, _ in pairs:
        writer.append(exact)
    assert writer.frames == 0 and len(writer.pending) == 3 and len(SegmentReader(tmp_path)) == 0
    writer.commit()
    assert writer.frames == 45 and writer.pending == [] and len(SegmentReader(tmp_path)) == 3
    writer.append(pairs[0][0])
    writer.close()
    writer.close()
    reader = open_segments(tmp_path)
    same(reader.concat(), torch.cat([full for _, full in [*pairs, pairs[0]]], 1))
    assert reader.verify() == []


class Stubborn(Disk):
    calls = ()

    def at(self, call, path):
        if call in self.calls:
            raise PermissionError(1, f"no {call}")


def test_what_cannot_be_taken_away_refuses_no_commit(tmp_path):
    disk, (batch, _) = Stubborn(), twins(0)
    with SegmentWriter(tmp_path, commit_seconds=np.inf, disk=disk) as writer:
        for _ in range(4):
            writer.append(batch)
            writer.commit(state=[b"state"])
            disk.calls = ("remove",)
        assert writer.count == 4 and not writer.pending
        writer.append(batch)
        disk.calls = ("remove", "sync_folder")
        refused(ResourceError, "write", lambda: writer.commit(state=[b"state"]))
        assert not writer.pending
        disk.calls = ()
    assert len(SegmentReader(tmp_path)) == 4


def test_a_reader_sees_what_was_acknowledged_when_it_opened(tmp_path):
    full, _ = written(tmp_path, count=2, close=False)
    reader = open_segments(tmp_path)
    assert len(reader) == 2 and not reader.closed
    same(reader.read(1), full[1])
    assert any("did not finish" in line for line in reader.verify())


def test_writing_goes_on_after_the_last_acknowledged_batch(tmp_path):
    full, _ = written(tmp_path, count=2, close=False)
    (tmp_path / "00000002.safetensors").write_bytes(b"never acknowledged")
    with open(tmp_path / "journal.jsonl", "ab") as file:
        file.write(b'0123 {"kind":"segm')
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(open_segments(tmp_path).notices) == 2
        writer = SegmentWriter(tmp_path, {"env": "Test-v0", "seed": 3, "shape": [1, 2]}, resume=True)
    assert any("never finished" in str(w.message) for w in caught)
    assert any("never acknowledged" in str(w.message) for w in caught)
    exact, more = twins(7)
    assert writer.frames == sum(td.numel() for td in full)
    with writer:
        writer.append(exact)
    reader = open_segments(tmp_path)
    same(reader.concat(), torch.cat([*full, more], 1))
    assert reader.verify() == []


def test_a_closed_folder_can_be_continued(tmp_path):
    full, _ = written(tmp_path, count=1)
    exact, more = twins(9)
    with SegmentWriter(tmp_path, resume=True) as writer:
        writer.append(exact)
    same(open_segments(tmp_path).concat(), torch.cat([full[0], more], 1))


@pytest.mark.parametrize(
    ("act", "error", "text"),
    [
        (lambda f: SegmentWriter(f), ResourceError, "resume"),
        (lambda f: SegmentWriter(f, {"env": "Other-v0"}, resume=True), ArgumentError, "Other-v0"),
        (lambda f: open_segments(f / "nowhere"), ResourceError, "nowhere"),
    ],
)
def test_wrong_folder_is_refused_with_a_sentence(tmp_path, act, error, text):
    written(tmp_path)
    refused(error, text, lambda: act(tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        lambda td: td.set("more", td.get("observation")),
        lambda td: td.exclude(("next", "reward")),
        lambda td: td.set("observation", td.get("observation").double()),
        lambda td: td.set("observation", td.get("observation")[..., :2]),
    ],
)
def test_a_batch_that_looks_different_is_refused_and_leaves_nothing(tmp_path, change):
    full, _ = written(tmp_path / "data", count=1, close=False)
    with SegmentWriter(tmp_path / "data", resume=True) as writer, refused(ArgumentError, "look like"):
        writer.append(change(twins()[0]))
    reader = open_segments(tmp_path / "data")
    same(reader.concat(), full[0])
    assert reader.verify() == []


def numbered(*shape):
    count = torch.Size(shape).numel()
    done = torch.zeros(*shape, 1, dtype=torch.bool)
    return TensorDict({"x": torch.arange(count).view(shape), "next": {"done": done, "truncated": done.clone()}}, shape)


@pytest.mark.parametrize(
    "act",
    [
        lambda writer: writer.append(numbered(3, 4)),
        lambda writer: writer.append(numbered(4)),
        lambda writer: writer.append(numbered(2, 0)),
        lambda writer: writer.append(numbered()),
        lambda writer: writer.cut([9]),
        lambda writer: writer.cut([-1]),
    ],
)
@pytest.mark.parametrize("seconds", [0.0, float("inf")])
def test_what_a_reader_would_refuse_is_refused_before_it_is_written(tmp_path, act, seconds):
    with SegmentWriter(tmp_path, commit_seconds=seconds) as writer:
        writer.append(numbered(2, 4))
        writer.commit()
        refused(ArgumentError, "batches", lambda: act(writer))
        writer.append(numbered(2, 3))
    with SegmentWriter(tmp_path, resume=True) as writer:
        assert (writer.count, writer.frames) == (2, 14)
    assert open_segments(tmp_path).verify() == [] and len(list(tmp_path.glob("0*.safetensors"))) == 2


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_a_first_batch_without_frames_or_time_is_refused(tmp_path, shape):
    with SegmentWriter(tmp_path) as writer:
        refused(ArgumentError, "dim frame", lambda: writer.append(numbered(*shape)))
        writer.append(numbered(4))
    assert open_segments(tmp_path).frames == 4


@pytest.mark.parametrize("lane", range(6))
def test_the_last_step_of_a_cut_lane_is_truncated_whatever_dims_envs_have(tmp_path, lane):
    with SegmentWriter(tmp_path) as writer:
        writer.append(numbered(3, 2, 4))
        writer.cut([lane])
    reader = open_segments(tmp_path)
    for key in ("truncated", "done"):
        assert reader.read(0)["next", key].flatten().nonzero().tolist() == [[4 * lane + 3]]
    assert reader.cut_rows() == [18 + lane]


def test_values_that_are_not_tensors_are_refused(tmp_path):
    batch = TensorDict({"x": torch.zeros(2), "text": NonTensorData("a", batch_size=[2])}, [2])
    with SegmentWriter(tmp_path) as writer, refused(ArgumentError, "text tensor"):
        writer.append(batch)
    with SegmentWriter(tmp_path, resume=True) as writer, pytest.raises(ArgumentError, match="complex"):
        writer.append(TensorDict({"x": torch.zeros(2, dtype=torch.complex128)}, [2]))


def hold(folder, ready, done):
    writer = SegmentWriter(folder)
    ready.set()
    done.wait(20)
    writer.close()


def test_a_second_writer_is_refused_while_the_first_is_at_work(tmp_path):
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    process = context.Process(target=hold, args=(tmp_path, ready, done))
    process.start()
    assert ready.wait(20)
    refused(ResourceError, "process", lambda: SegmentWriter(tmp_path, resume=True))
    done.set()
    process.join()


def test_shuffled_batches_are_stored_as_plain_values(tmp_path):
    exact, full = (td[:, torch.tensor([3, 1, 0, 4, 2])] for td in twins())
    with SegmentWriter(tmp_path) as writer:
        writer.append(exact)
        writer.append(twins()[0])
    reader = open_segments(tmp_path)
    same(reader.read(0), full)
    same(reader.concat(), torch.cat([full, twins()[1]], 1))
    same(concat([reader.read(1), reader.read(1)]), torch.cat([twins()[1]] * 2, 1))


def test_a_newer_format_is_refused_by_name(tmp_path):
    from rlcli.data.files.disk import digest_of

    text = b'{"kind":"header","format":"rlcli-segments","version":99,"metadata":{}}'
    (tmp_path / "journal.jsonl").write_bytes(digest_of(b"", text).encode() + b" " + text + b"\n")
    refused(DamagedDataError, "99", lambda: open_segments(tmp_path))
    assert "99" in verify_segments(tmp_path)[0]
