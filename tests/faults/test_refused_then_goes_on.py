"""A call that is refused changes nothing; rows whose commit alone is refused are there, and committed later."""

from __future__ import annotations

import errno
import warnings

import numpy as np
import pytest
import torch
from disks import interrupted_at
from face import Disk
from tensordict import TensorDict

from rlcli.data import (
    CompressedStorage,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SegmentWriter,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    open_segments,
)
from rlcli.errors import ArgumentError, ResourceError

SIZE, FRAMES = 46, 3  # a number of rows that batches do not divide
MODES = {
    "full": {},
    "exact": {"next_obs": "exact"},
    "codes": {"next_obs": "exact", "codes": {"action": 9}},
    "stacks": {"frame_stack": {"pixels": FRAMES}},
}
SAMPLERS = {
    "random": lambda: RandomSampler(seed=1),
    "epochs": lambda: SamplerWithoutReplacement(seed=1),
    "slices": lambda: SliceSampler(slice_len=2, seed=1, strict_length=False),
    "priorities": lambda: PrioritizedSampler(SIZE, 0.7, 0.5, seed=1),
}


class Failing(Disk):
    """Refuses one call after so many, where a number is given."""

    left: int | None = None

    def at(self, call, path):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise OSError(errno.ENOSPC, "full")


def storage_of(kind, ndim, folder, disk, **options):
    if kind == "disk":
        return LazyMemmapStorage(SIZE, ndim=ndim, scratch_dir=folder, commit_seconds=0.0, disk=disk, **options)
    if kind == "temporary":
        return LazyMemmapStorage(SIZE, ndim=ndim, commit_seconds=0.0, disk=disk)
    return CompressedStorage(SIZE, ndim=ndim, widest=1) if kind == "compressed" else LazyTensorStorage(SIZE, ndim=ndim)


class Envs:
    """Two envs that show stacks of frames, a count, and actions that are mostly one-hot."""

    def __init__(self, rng):
        self.rng, self.step = rng, np.zeros(2, np.int64)
        self.stacks = [np.zeros((FRAMES, 4), np.uint8) for _ in range(2)]
        self.ids, self.new = [0, 1], 2

    def batch(self, length):
        rng, rows = self.rng, [[], []]
        for env, out in enumerate(rows):
            for _ in range(length):
                before = self.stacks[env]
                after = np.concatenate([before[1:], rng.integers(0, 255, (1, 4)).astype(np.uint8)])
                done = rng.random() < 0.2
                out.append((before, after, self.ids[env], done))
                self.stacks[env] = after
                if done:
                    self.stacks[env] = np.repeat(rng.integers(0, 255, (1, 4)).astype(np.uint8), FRAMES, 0)
                    self.ids[env], self.new = self.new, self.new + 1
        columns = [torch.from_numpy(np.array([[row[k] for row in out] for out in rows])) for k in range(4)]
        action = torch.nn.functional.one_hot(torch.from_numpy(rng.integers(0, 9, (2, length))), 9)
        if rng.random() < 0.1:
            action[0, 0] = 7
        count = torch.from_numpy(rng.integers(0, 2 ** int(rng.integers(1, 20)), (2, length, 1)))
        done = columns[3][..., None]
        nexts = {"pixels": columns[1], "done": done, "reward": torch.from_numpy(rng.random((2, length, 1)))}
        batch = TensorDict({"pixels": columns[0], "action": action, "count": count, "next": nexts}, [2, length])
        batch["td_error"] = torch.from_numpy(rng.random((2, length)))
        return batch.set(("collector", "traj_ids"), columns[2])


def alike(a, b, text):
    keys = set(a.keys(True, True))
    assert keys == set(b.keys(True, True)), text
    for key in keys:
        assert torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])), (text, key)


def same(rb, twin, text):
    """Same rows; and the same draws, of which each leaves both samplers as they were."""
    assert len(rb) == len(twin), text
    if len(rb):
        alike(rb[:], twin[:], text)
        states = [buffer.sampler.state_dict() for buffer in (rb, twin)]
        alike(rb.sample(), twin.sample(), text)
        for buffer, state in zip((rb, twin), states, strict=True):
            buffer.sampler.load_state_dict(state)


def refuse(rb, rng, envs, disk, folder):
    """Ask for something that may be refused; None where nothing of it happened, as in all but a refused commit."""
    batch = envs.batch(int(rng.integers(1, 12)))
    rows = rng.integers(0, max(1, len(rb)), 3)
    disk.left = int(rng.integers(0, 12))
    calls = {
        "extend": lambda: rb.extend(batch),
        "overwrite": lambda: rb.__setitem__(rows, batch.reshape(-1)[[0, 1, 0]]) if len(rb) and batch.numel() > 1 else 1,
        "another shape": lambda: rb.extend(batch.set("count", batch["action"])),
        "another key": lambda: rb.extend(batch.set("more", batch["count"])),
        "other envs": lambda: rb.extend(torch.cat((batch, batch))) if rb.storage.ndim > 1 and len(rb) else 1 / 0,
        "priorities": lambda: rb.extend(batch.set("td_error", -torch.ones(batch.shape))),
        "a dead row": lambda: rb.__setitem__([SIZE + 3], batch.reshape(-1)[:1]),
        "a load": lambda: rb.loads(folder / "nothing"),
        "a sample": lambda: rb.sample(0),
    }
    name = list(calls)[int(rng.integers(len(calls)))]
    if name in ("another shape", "another key") and not rb.ring.fields:
        name = "a sample"  # an empty buffer takes any keys
    cursor, before = rb.ring.cursor, rb[:] if len(rb) else None
    try:
        calls[name]()
    except (ResourceError, ArgumentError, ZeroDivisionError):
        if rb.ring.cursor == cursor and (before is None or (before == rb[:]).all()):
            return name, None
        pass  # its commit alone was refused
    finally:
        disk.left = None
    return name, (batch, rows)


def go(folder, kind, mode, sampler, ndim, seed):
    rng = np.random.default_rng(seed)
    envs, disk = Envs(np.random.default_rng(seed)), Failing()

    def make(kind, **options):
        made = storage_of(kind, ndim, folder / "rows", disk, **options)
        return TensorDictReplayBuffer(storage=made, sampler=SAMPLERS[sampler](), batch_size=6, **MODES[mode])

    rb, twin, refused = make(kind), make("tensor"), set()
    for i in range(40):
        text = f"{kind} {mode} {sampler} ndim {ndim} seed {seed} call {i}"
        name, done = refuse(rb, rng, envs, disk, folder)
        if done is None:
            refused.add(name)
        elif name in ("extend", "priorities", "other envs"):
            twin.extend(done[0])
        elif name == "overwrite" and len(twin) and done[0].numel() > 1:
            twin[done[1]] = done[0].reshape(-1)[[0, 1, 0]]
        same(rb, twin, f"{text}: {name} {'refused' if done is None else 'done'}")
        if rng.random() < 0.2 and len(rb):
            rb.dumps(folder / "dump")
            back = make("tensor")
            back.loads(folder / "dump")
            same(back, twin, f"{text}: dumped")
        if rng.random() < 0.1 and len(rb) and kind == "disk":
            state = rb.sampler.state_dict()
            rb.close()
            rb = make(kind, resume=True)
            rb.sampler.load_state_dict(state)
            twin.ring.index.cut()  # as whoever goes on with a folder does
            same(rb, twin, f"{text}: opened again")
    rb.close()
    return refused


KINDS = ["tensor", "temporary", "disk", "compressed"]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.every(2)
def test_what_is_refused_never_was(tmp_path, kind, mode, every):
    """With every sampler, or with two of the four: the other two where the kind or the mode is the next one."""
    refused, which = set(), (KINDS.index(kind) + list(MODES).index(mode)) % 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed, sampler in enumerate(SAMPLERS):
            if not every and seed % 2 != which:
                continue
            (tmp_path / sampler).mkdir()
            refused |= go(tmp_path / sampler, kind, mode, sampler, 1 + seed % 2, seed)
    assert {"a dead row", "a load"} <= refused and len(refused) > 5
    assert kind in ("tensor", "compressed") or "extend" in refused


def test_a_batch_whose_commit_was_refused_is_there_and_drawn_and_committed_later(tmp_path):
    disk, rows = Failing(), torch.arange(30)
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=0.4, storage=storage_of("disk", 1, tmp_path / "rows", disk), batch_size=3000
    )
    rb.extend(TensorDict({"row": rows[:4]}, [4]))
    disk.left = 0
    with pytest.raises(ResourceError):
        rb.extend(TensorDict({"row": rows[4:14]}, [10]))
    assert rb[:]["row"].tolist() == list(range(14)) and rb.storage.acknowledged == 4
    rb.extend(TensorDict({"row": rows[14:]}, [16]))
    assert rb.storage.acknowledged == 30
    assert rb[:]["row"].tolist() == rows.tolist() == rb.sample()["row"].unique().tolist()


@pytest.mark.parametrize("call", ["mkdir", "open", "create", "sync", "write"])
def test_a_buffer_whose_first_batch_was_refused_takes_any_other(tmp_path, call):
    class Once(Disk):
        bad = True

        def at(self, name, path):
            if self.bad and name == call:
                self.bad = False
                raise OSError(errno.ENOSPC, "full")

    rb = TensorDictReplayBuffer(storage=storage_of("disk", 1, tmp_path / "rows", Once()), batch_size=4)
    with pytest.raises(ResourceError):
        rb.extend(TensorDict({"a": torch.zeros(5, 2)}, [5]))
    assert not len(rb)
    rb.extend(TensorDict({"b": torch.arange(3)}, [3]))
    assert rb[:]["b"].tolist() == [0, 1, 2]
    rb.close()
    again = LazyMemmapStorage(SIZE, scratch_dir=tmp_path / "rows", resume=True)
    assert TensorDictReplayBuffer(storage=again)[:]["b"].tolist() == [0, 1, 2]


def test_a_close_that_was_refused_can_be_made_again(tmp_path):
    for n in range(8):
        disk = Failing()
        rb = TensorDictReplayBuffer(storage=storage_of("disk", 1, tmp_path / str(n), disk), batch_size=4)
        rb.storage.commit_seconds = 3600.0
        rb.extend(TensorDict({"b": torch.arange(3)}, [3]))
        disk.left = n
        try:
            rb.close()
        except ResourceError:
            assert rb[:]["b"].tolist() == [0, 1, 2]
            rb.extend(TensorDict({"b": torch.arange(3, 4)}, [1]))
            rb.close()
        disk.left = None
        again = LazyMemmapStorage(SIZE, scratch_dir=tmp_path / str(n), resume=True)
        assert TensorDictReplayBuffer(storage=again)[:]["b"].tolist()[:3] == [0, 1, 2]


# ---- Ctrl-C --------------------------------------------------------------------------------------------------------
EVERY = pytest.mark.parametrize("every", [83, pytest.param(1, marks=pytest.mark.slow)])


def rows(first, count):
    return TensorDict({"count": torch.arange(first, first + count)}, [count])


def counts(rb):
    return rb[:]["count"].sort().values.tolist()


@EVERY
@pytest.mark.parametrize("call", ["extend", "overwrite", "close"])
def test_interrupted_at_any_line_rows_on_disk_are_acknowledged_or_not_and_it_goes_on(tmp_path, call, every):
    """What is read afterwards is what the folder gives back, whether the interrupted call counts or not."""
    number, ended = 1, False
    while not ended:
        folder = tmp_path / str(number)
        storage = LazyMemmapStorage(120, scratch_dir=folder, commit_seconds=0.0)
        rb = TensorDictReplayBuffer(storage=storage, codes={"count": 150}, batch_size=2)
        for start in range(0, 90, 10):
            rb.extend(rows(start, 10))
        work = {
            "extend": lambda rb=rb: rb.extend(rows(90, 40)),
            "overwrite": lambda rb=rb: rb.__setitem__([3, 4, 70], rows(40, 3)),
            "close": rb.close,
        }
        ended = interrupted_at(number, work.pop(call)) < number
        number += every
        if rb.ring.storage.fields:
            if call != "overwrite":
                known = [*range(130)]
                assert set(counts(rb)) <= {*known}, number
            rb.extend(rows(50, 3))
            rb[[5]] = rows(1, 1)
            rb.extend(rows(60, 20))
        found = counts(rb) if storage.fields else None
        rb.close()
        with warnings.catch_warnings(action="ignore"):  # of a file that had just been made
            again = TensorDictReplayBuffer(storage=LazyMemmapStorage(120, scratch_dir=folder, resume=True))
        assert counts(again) == (list(range(90)) if found is None else found), number
        again.close()
        del rb, storage, again, work


@EVERY
def test_interrupted_at_any_line_collected_frames_are_acknowledged_or_not_and_it_goes_on(tmp_path, every):
    number, ended = 1, False
    while not ended:
        writer = SegmentWriter(tmp_path / str(number), commit_seconds=0.0)
        writer.append(rows(0, 10)[None])
        ended = interrupted_at(number, lambda: [writer.append(rows(n, 10)[None]) for n in (10, 20)]) < number  # noqa: B023
        count = writer.count
        writer.append(rows(30, 10)[None])
        writer.close()
        with warnings.catch_warnings(action="error"):
            reader = open_segments(tmp_path / str(number))
        assert len(reader) >= count + 1 and reader.verify() == [], number
        found = torch.cat([batch["count"].reshape(-1) for batch in reader]).tolist()
        assert found == [*range(10 * len(reader) - 10), *range(30, 40)], number
        number += every


def test_what_a_recipe_says_of_a_value_net_is_not_read_by_a_loss_without_one(rlcli, tmp_path):
    (tmp_path / "recipes").mkdir()
    values = "{normaliser: popart, shifted: true, num_chunks: 2, compute_dtype: bfloat16}"
    text = f"defaults: [override /loss: reinforce, override /value: td1]\nvalue: {values}\npolicy: {{shared: true}}\n"
    (tmp_path / "recipes" / "mine.yaml").write_text(text)
    answer = rlcli("train", "recipe=mine", "loss.baseline=false", "optim.epochs=1", "run.dir=r")
    assert answer.code == 0, answer.err
