"""A planned write leaves what the plain one leaves: rows, index, side pool and answer, bit for bit."""

import numpy as np
import pytest
import torch
from batches import same
from face import Ring
from plain_rings import plain, play
from ring_model import check
from tensordict import TensorDict

from rlcli.data import LazyMemmapStorage, LazyTensorStorage, SliceSampler, TensorDictReplayBuffer
from rlcli.data.ring.plans import alike, form_of
from rlcli.errors import ArgumentError, ResourceError
from rlcli.kernels.index import PAIRED, UNFOLLOWED

pytestmark = pytest.mark.filterwarnings("ignore:.*not followed by their own")


def assert_same(one, other):
    for ring in (one, other):
        ring.index.notes = np.empty(0, np.uint8)  # scratch
    same(one.state_dict(), other.state_dict())
    for key in other.storage.fields:
        held = other.storage.nbytes and int(other.storage.written[0])
        assert int(one.storage.written[0]) == held
        assert torch.equal(one.storage.column(key)[:held], other.storage.column(key)[:held])
    assert one.index.version == other.index.version
    counts = [PAIRED, UNFOLLOWED]
    assert (one.index.scalars[counts] == other.index.scalars[counts]).all()


@pytest.mark.parametrize("ends", [("done",), ("terminated", "truncated"), ()])
@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("next_obs", ["exact", "full"])
@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.every(3)
def test_planned_and_plain_writes_leave_the_same(ndim, next_obs, ids, ends):
    rng = np.random.default_rng(ndim)
    planned = Ring(LazyTensorStorage(64, ndim=ndim), next_obs=next_obs)
    oracle = plain(Ring(LazyTensorStorage(64, ndim=ndim), next_obs=next_obs))
    shapes = {1: [(7,), (20,), (3, 4), (64,)], 2: [(3, 5), (3, 1), (3, 21)], 3: [(2, 3, 4), (2, 3, 9)]}[ndim]
    used = 0
    for _ in range(40):
        batch = play(rng, shapes[rng.integers(len(shapes))], ids=ids, ends=ends)
        used += batch.batch_size in planned.writes
        assert planned.extend(batch).tolist() == oracle.extend(batch).tolist()
        assert_same(planned, oracle)
    check(planned)
    assert used > 30 and set(planned.writes) == {torch.Size(shape) for shape in shapes}


@pytest.mark.parametrize("next_obs", ["exact", "full"])
def test_plans_are_dropped_where_the_ring_changes(next_obs):
    """Rows overwritten, cleared, told apart by other keys or loaded between two writes of one form."""
    rng = np.random.default_rng(1)
    planned = Ring(LazyTensorStorage(50), next_obs=next_obs)
    oracle = plain(Ring(LazyTensorStorage(50), next_obs=next_obs))
    for turn in range(24):
        batch, single = play(rng, (17,)), play(rng, (2,))
        for ring in (planned, oracle):
            ring.extend(batch)
            if turn % 6 == 1:
                ring.overwrite(np.array([3, 5]), single)
            elif turn % 6 == 2:
                ring.clear(fields=turn % 4 == 0)
                ring.extend(batch)
            elif turn % 6 == 3:
                ring.use_markers(end_keys=[("next", "done")] if turn % 4 else [("aux", "end")][:0])
            elif turn % 6 == 4:
                rows = {key: ring.storage.column(key)[: len(ring)].clone() for key in ring.storage.fields}
                ring.take_over(ring.read_state(ring.state_dict()))
                ring.storage.write(0, rows)
        assert_same(planned, oracle)
        check(planned)


def other_forms():
    """One form, and batches of the same batch size that are written too, but have another."""
    rng = np.random.default_rng(2)
    base = play(rng, (12,))
    strided = base.clone()
    strided["observation"] = torch.zeros(12, 6)[:, ::2]
    order = TensorDict({key: base[key] for key in reversed(list(base.keys()))}, [12])
    graph = base.clone()
    graph["observation"] = base["observation"].clone().requires_grad_()
    parameter = base.clone()
    parameter._tensordict["observation"] = torch.nn.Parameter(base["observation"].clone())
    return base, {"strided": strided, "another order": order, "a graph": graph, "a parameter": parameter}


@pytest.mark.parametrize("name", other_forms()[1])
def test_a_batch_of_another_form_is_written_plainly(name):
    base, others = other_forms()
    planned, oracle = Ring(LazyTensorStorage(40)), plain(Ring(LazyTensorStorage(40)))
    for batch in (base, base, others[name], base, others[name], base):
        assert planned.extend(batch).tolist() == oracle.extend(batch).tolist()
        assert_same(planned, oracle)


def wrong_batches(base):
    yield base.exclude("action")
    yield base.clone().set("more", torch.zeros(12))
    yield base.clone().set("action", base["action"].int())
    yield base.clone().set("action", base["action"][:, :4])
    yield base.clone().set("note", "a word")
    nested = base.clone()
    nested["aux", "deep", "y"] = torch.zeros(12)
    yield nested


def test_what_was_refused_before_a_plan_is_refused_with_one():
    base = other_forms()[0]
    planned, oracle = Ring(LazyTensorStorage(40)), plain(Ring(LazyTensorStorage(40)))
    for ring in (planned, oracle):
        ring.extend(base)
    assert planned.writes
    for batch in wrong_batches(base):
        said = []
        for ring in (planned, oracle):
            with pytest.raises(ArgumentError) as caught:
                ring.extend(batch)
            said.append(str(caught.value))
        assert said[0] == said[1]
        assert_same(planned, oracle)


def test_only_plain_rows_in_plain_memory_are_planned(tmp_path):
    base = play(np.random.default_rng(0), (12,))
    for ring in (
        Ring(LazyMemmapStorage(40, scratch_dir=tmp_path)),
        Ring(LazyTensorStorage(40), codes=True),
        Ring(LazyTensorStorage(11)),  # longer than the ring: it goes in pieces
    ):
        ring.extend(base)
        ring.extend(base)
        assert not ring.writes or not ring.packs
        check(ring)


@pytest.mark.parametrize("change", [torch.conj, lambda x: torch.conj(x).imag])
def test_what_is_conjugated_or_negated_lazily_is_stored_as_it_reads(change):
    ring = Ring(LazyTensorStorage(20))
    for _ in range(3):
        wave = torch.randn(4, 3, dtype=torch.complex64)
        rows = ring.extend(TensorDict({"wave": change(wave)}, [4]))
        assert torch.equal(ring.columns(rows)["wave"], change(wave))


def test_samplers_see_planned_writes():
    rng = np.random.default_rng(5)
    buffers = []
    for _ in range(2):
        buffers.append(
            TensorDictReplayBuffer(
                storage=LazyTensorStorage(90),
                sampler=SliceSampler(slice_len=3, strict_length=False, seed=3),
                batch_size=12,
            )
        )
    plain(buffers[1].ring)
    for _ in range(20):
        batch = play(rng, (11,))
        rows = [buffer.extend(batch) for buffer in buffers]
        assert torch.equal(*rows)
        same(*(buffer.sample() for buffer in buffers))
    assert buffers[0].ring.writes


def test_memory_that_runs_out_is_said_before_anything_is_written(monkeypatch):
    ring = Ring(LazyTensorStorage(4000), next_obs="exact")
    rng = np.random.default_rng(0)
    ring.extend(play(rng, (100,), many=0.0))
    ring.extend(play(rng, (100,), many=0.0))
    before, column = ring.state_dict(), ring.storage.column("observation").clone()

    def full():
        raise MemoryError("no more")

    monkeypatch.setattr(ring.index, "grow", full)
    with pytest.raises(ResourceError) as caught:
        ring.extend(play(rng, (100,), many=1.0))
    assert "no memory to index 100 more rows" in str(caught.value)
    same(ring.state_dict() | {"index": 0}, before | {"index": 0})
    assert ring.cursor == 200 and torch.equal(ring.storage.column("observation"), column)


def facts(x):
    if type(x) is not torch.Tensor or x.layout is not torch.strided:
        return (type(x),)
    flags = (x.requires_grad, x.is_conj(), x.is_neg(), x.is_inference(), x.is_nested)
    return (torch.Tensor, x.dtype, x.device, x.shape, x.stride(), flags)


def test_tensors_of_one_dtype_device_shape_and_strides_are_alike():
    base = torch.zeros(4, 3)
    others = [
        torch.ones(4, 3), torch.zeros(4, 3, dtype=torch.float64), torch.zeros(4, 4), torch.zeros(4, 6)[:, ::2],
        torch.zeros(5, 3)[1:], torch.zeros(3, 4).T, torch.zeros(4, 3, requires_grad=True), torch.zeros(12),
        torch.nn.Parameter(torch.zeros(4, 3)), torch.zeros(4, 3, device="meta"), torch.zeros(4, 3).to_sparse(), None,
    ]  # fmt: skip
    for one in (base, base.requires_grad_(False).T, torch.zeros(0, 3)):
        for other in others:
            assert alike([one, base])(other, base) == (facts(one) == facts(other)), (one.shape, other)
    with torch.inference_mode():
        inference = torch.zeros(4, 3)
    assert not alike([base])(inference) and facts(base) != facts(inference)


def test_a_form_is_of_plain_tensors_only():
    batch = TensorDict({"x": torch.zeros(3), "y": {"z": torch.zeros(3, 1)}}, [3])
    keys, tensors = form_of(batch)
    assert keys == ["x", ("y", "z")]
    assert [x is y for x, y in zip(tensors(batch), (batch["x"], batch["y", "z"]), strict=True)] == [True, True]
    assert tensors(batch.clone().set("w", torch.zeros(3))) is None
    assert tensors(batch.clone().set(("y", "w"), torch.zeros(3))) is None
    assert tensors(TensorDict({"x": torch.zeros(3), "y": torch.zeros(3, 1)}, [3])) is None
    assert form_of(batch.clone().set("word", "a word")) is None
    assert form_of(TensorDict.lazy_stack([batch, batch])) is None
