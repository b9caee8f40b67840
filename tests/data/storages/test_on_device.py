"""Rows on a device, for which this CPU stands: the samples of a storage in memory, bit for bit, by few operations."""

import pytest
import torch
from face import Field, refused
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode

from rlcli.data.buffer import stream as stream_module
from rlcli.data.buffer.replay_buffer import ReplayBuffer
from rlcli.data.buffer.tensordict_buffer import TensorDictReplayBuffer
from rlcli.data.ring import elsewhere as elsewhere_module
from rlcli.data.samplers import PrioritizedSampler, PrioritizedSliceSampler, RandomSampler, SliceSampler
from rlcli.data.storages import LazyTensorStorage
from rlcli.data.storages import tensor as tensor_module
from rlcli.errors import ResourceError
from rlcli.graphs import host, static
from rlcli.transforms import MultiStepTransform, NextObservationDelta, NextStateReconstructor

LENGTH, WRITES, SIZE = 24, 7, 96


@pytest.fixture
def elsewhere(monkeypatch):
    """Let storages that are made in here, and samples, be on a device."""

    def on(yes=True):
        monkeypatch.setattr(host, "is_elsewhere", lambda device: yes)

    return on


def stream(lanes=2, frames=0, seed=0):
    """Batches `[lanes, LENGTH]` of envs that end now and then; observations are those of the row above's successor."""
    g = torch.Generator().manual_seed(seed)
    shape = (3,) if not frames else (frames, 4, 4)
    kind = torch.float32 if not frames else torch.uint8

    def fresh():
        x = torch.randint(0, 255, (1 if frames else 3, *shape[1:]), generator=g).to(kind)
        return x.expand(frames, *shape[1:]).clone() if frames else x

    obs, traj, next_id = [fresh() for _ in range(lanes)], list(range(lanes)), lanes
    while True:
        rows = []
        for lane in range(lanes):
            for _ in range(LENGTH):
                after = torch.cat((obs[lane][1:], fresh()[:1])) if frames else fresh()
                done, cut = (bool(torch.rand((), generator=g) < p) for p in (0.15, 0.1))
                flags = {key: torch.tensor([x]) for key, x in (("done", done | cut), ("terminated", done),
                                                               ("truncated", cut and not done))}  # fmt: skip
                following = {"observation": after, "reward": torch.rand(1, generator=g), **flags}
                rows.append(TensorDict({
                    "observation": obs[lane], "action": torch.randint(0, 4, (1,), generator=g),
                    "half": torch.rand(2, generator=g).half(),
                    "wide": torch.rand(1, dtype=torch.complex128, generator=g),
                    "collector": {"traj_ids": torch.tensor(traj[lane])}, "next": following,
                }))  # fmt: skip
                obs[lane] = after
                if done or cut:
                    obs[lane], traj[lane], next_id = fresh(), next_id, next_id + 1
        yield torch.stack(rows).reshape(lanes, LENGTH)


SAMPLERS = {
    "random": lambda: RandomSampler(seed=3),
    "slices": lambda: SliceSampler(slice_len=6, burn_in=2, seed=3),
    "prioritized": lambda: PrioritizedSampler(SIZE, 0.6, 0.4, seed=3),
    "prioritized slices": lambda: PrioritizedSliceSampler(SIZE, 0.6, 0.4, slice_len=6, seed=3),
}
WAYS = {
    "full": ({"next_obs": "full"}, lambda: []),
    "exact": ({"next_obs": "exact"}, lambda: []),
    "delta": ({"next_obs": "full"}, lambda: [NextObservationDelta()]),
    "compact": ({"next_obs": "full"}, lambda: [NextStateReconstructor(["observation"])]),
    "n steps": ({"next_obs": "exact"}, lambda: [MultiStepTransform(3, 0.9)]),
    "stacks": ({"next_obs": "exact", "frame_stack": 4}, lambda: []),
    "stacks, full": ({"next_obs": "full", "frame_stack": 4}, lambda: []),
}


def made(way, sampler="random", ndim=1, **more):
    options, transforms = WAYS[way]
    drawn = SAMPLERS[sampler]()
    kind = TensorDictReplayBuffer if drawn.has_priorities else ReplayBuffer
    storage = LazyTensorStorage(SIZE, ndim=ndim)
    buffer = kind(storage=storage, sampler=drawn, batch_size=24, codes=True, **options, **more)
    for transform in transforms():
        buffer.append_transform(transform)
    return buffer


def batches(way, count=WRITES, **options):
    rows = stream(frames=4 if "stacks" in way else 0, **options)
    for _ in range(count):
        batch = next(rows)
        if way == "compact":
            del batch["next", "observation"]
        yield batch


def same(a, b):
    a, b = (dict(x.items(True, True)) for x in (a, b))
    assert a.keys() == b.keys()
    for key in a:
        x, y = (t.full() if hasattr(t, "full") else t for t in (a[key], b[key]))
        assert x.dtype == y.dtype and x.shape == y.shape, key
        assert torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (x, y))), key


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ndim", [1, 2])
def test_samples_are_those_of_memory(way, sampler, ndim, elsewhere):
    here = made(way, sampler, ndim)
    elsewhere()
    there = made(way, sampler, ndim)
    assert there.storage.elsewhere and not here.storage.elsewhere
    for batch in batches(way):  # more than fit: the ring goes round
        here.extend(batch.clone())
        there.extend(batch)
        for _ in range(3):
            drawn = here.sample(), there.sample()
            same(*drawn)
            if here.sampler.has_priorities:
                for buffer, sample in zip((here, there), drawn, strict=True):
                    buffer.sampler.update_priority(buffer.ring, sample["index"].numpy(), torch.arange(24) / 7)
    same(here[:], there[:])


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("way", WAYS)
def test_several_samples_are_those_of_memory_one_by_one(way, sampler, elsewhere, monkeypatch):
    here = made(way, sampler)
    elsewhere()
    there, copies = made(way, sampler), []
    for batch in batches(way, 5):
        here.extend(batch.clone())
        there.extend(batch)
        for name, module in (("read", elsewhere_module), ("info", stream_module)):
            monkeypatch.setattr(module, "sent", lambda *a, f=static.sent, name=name: (copies.append(name), f(*a))[1])
        copies.clear()
        found = [*there.samples(11)]
        joined = sampler == "random" and way not in ("delta", "compact", "n steps")
        assert copies.count("read") == 2 if joined else copies.count("read") >= 11
        assert len(found) == 11
        for sample in found:
            same(here.sample(), sample)
    assert len([*here.samples(3)]) == 3


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("dumped", [False, True])
def test_a_saved_storage_goes_on_elsewhere(way, back, dumped, elsewhere, tmp_path):
    elsewhere(back)
    one = made(way)
    rows = [*batches(way)]
    for batch in rows[:5]:
        one.extend(batch)
    elsewhere(not back)
    other = made(way)
    if dumped:
        one.dumps(tmp_path)
        other.loads(tmp_path)
    else:
        other.load_state_dict(one.state_dict())
    assert one.storage.elsewhere is back and other.storage.elsewhere is not back
    for batch in rows[5:]:
        same(one.sample(), other.sample())
        one.extend(batch.clone())
        other.extend(batch)
    same(one[:], other[:])


def test_rows_are_written_over_as_in_memory(elsewhere):
    here = made("exact")
    elsewhere()
    there = made("exact")
    for batch in batches("exact"):
        here.extend(batch.clone())
        there.extend(batch)
    rows, new = torch.tensor([3, 50, 3]), next(batches("exact", 1, seed=9)).reshape(-1)[:3]
    here[rows] = new
    there[rows] = new
    same(here[:], there[:])


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def counted(call):
    """Operations of a call, views and allocations left out."""
    free = {"view", "slice", "select", "detach", "empty", "as_strided", "unsqueeze", "expand", "alias", "_unsafe_view"}
    with Counted() as seen:
        call()
    return [name for name in seen.names if name not in free]


def test_a_large_write_goes_up_in_parts(elsewhere, monkeypatch):
    here = made("exact", ndim=2)
    elsewhere()
    there = made("exact", ndim=2)
    for batch in batches("exact", 3):
        here.extend(batch.clone())
        monkeypatch.setattr(tensor_module, "_LARGEST", 1000)
        there.extend(batch)
        monkeypatch.undo()
    assert there.storage.elsewhere
    same(here[:], there[:])


def test_a_device_without_room_says_so(elsewhere, monkeypatch):
    elsewhere()
    buffer = made("full")

    def full(*_, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore")

    monkeypatch.setattr(tensor_module.torch, "empty", full)
    refused(ResourceError, "storage.device=cpu", lambda: buffer.storage.declare({"x": Field((1,), torch.float32)}, 9))


@pytest.mark.parametrize(("way", "most"), {"full": 1, "exact": 3, "stacks": 6, "stacks, full": 3}.items())
def test_a_sample_is_few_operations_after_one_copy(way, most, elsewhere, monkeypatch):
    sent, copies = elsewhere_module.sent, []
    monkeypatch.setattr(elsewhere_module, "sent", lambda *given: copies.append(given) or sent(*given))
    elsewhere()
    buffer = made(way)
    for batch in batches(way):
        buffer.extend(batch)
    done = counted(buffer.sample)
    assert len(copies) == 1 and sum(name.startswith("index_") for name in done) <= most
    assert "_local_scalar_dense" not in done


def test_a_write_is_one_copy_of_packed_rows(elsewhere):
    elsewhere()
    buffer = made("full")
    rows = [*batches("full", 3)]
    buffer.extend(rows[0])
    table, keys = buffer.storage._table, len(buffer.storage.fields)
    assert len(table) == SIZE  # all of it is reserved
    assert counted(lambda: buffer.extend(rows[1])).count("copy_") == keys + 1  # of each key into the block
    assert counted(lambda: buffer.extend(rows[2])).count("copy_") == keys + 1
    assert buffer.storage._table is table


@pytest.mark.parametrize("keep", ["raise", "keep"])
def test_differences_are_read_without_a_look_at_them(keep, elsewhere, monkeypatch):
    elsewhere()
    buffer, rows = made("full"), next(batches("full", 1))
    buffer.append_transform(NextObservationDelta(on_overflow=keep))
    buffer.extend(rows)
    asked = buffer[:]
    monkeypatch.setattr(host, "may_ask", lambda x: False)
    with Counted() as seen:
        same(buffer[:], asked)
    assert "_local_scalar_dense" not in seen.names


def test_a_sample_of_memory_goes_up_in_one_copy(elsewhere, monkeypatch):
    plain, moved = made("exact", "slices"), made("exact", "slices", device="cpu")
    for batch in batches("exact"):
        plain.extend(batch.clone())
        moved.extend(batch)
    sent, copies = stream_module.sent, []
    monkeypatch.setattr(stream_module, "sent", lambda *given: copies.append(given) or sent(*given))
    elsewhere()
    same(plain.sample(), moved.sample())
    assert len(copies) == 1
