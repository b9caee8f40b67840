"""One `Rows` as a tensor: every operation equals the plain twin's or is refused, and none reads missing memory."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from batches import same, twins
from face import refusals, refused
from torch import nn

from rlcli.data.next_obs import ReadOnlyRowsError, Rows, full_next_obs, pack, unpack
from rlcli.errors import ArgumentError

NEXT = ("next", "observation")
IMAGE = torch.arange(15).reshape(3, 5)

VALUES = {
    "add": lambda x: x + 1,
    "reversed subtract": lambda x: 3 - x,
    "compare": lambda x: x > 100,
    "matmul": lambda x: x.float() @ torch.ones(4, 2),
    "linear": lambda x: nn.functional.linear(x.float(), torch.ones(2, 4)),
    "sum": lambda x: x.float().sum(1),
    "max": lambda x: list(x.max(-1)),
    "argsort": lambda x: x.argsort(-1),
    "cumsum": lambda x: x.cumsum(1),
    "roll": lambda x: x.roll(1, 1),
    "flip time": lambda x: x.flip(1),
    "flip features": lambda x: x.flip(-1),
    "feature": lambda x: x[..., 2],
    "feature slice": lambda x: x[:, :, 1:3],
    "feature and batch": lambda x: x[1, :, 0],
    "mask over everything": lambda x: x[x > 100],
    "masked select": lambda x: x.masked_select(x > 50),
    "index with features": lambda x: x[[0, 1], [2, 3], [1, 0]],
    "gather": lambda x: x.gather(2, torch.zeros(3, 5, 1, dtype=torch.long)),
    "take": lambda x: x.take(IMAGE),
    "view across features": lambda x: x.view(3, 20),
    "view with -1 in features": lambda x: x.view(15, -1),
    "view with -1 in front": lambda x: x.view(-1, 4),
    "view as bytes": lambda x: x.view(torch.uint8),
    "unflatten features": lambda x: x.unflatten(-1, (2, 2)),
    "transpose features": lambda x: x.transpose(1, 2),
    "mT": lambda x: x.mT,
    "permute features": lambda x: x.permute(2, 0, 1),
    "movedim": lambda x: x.movedim(0, 1),
    "swap and index": lambda x: x.transpose(0, 1)[4],
    "expand features": lambda x: x.unsqueeze(-1).expand(3, 5, 4, 2),
    "repeat": lambda x: x.repeat(2, 1, 1),
    "repeat interleave": lambda x: x.repeat_interleave(2, 1),
    "unfold": lambda x: x.unfold(1, 2, 1),
    "as strided": lambda x: x.as_strided((5, 2), (4, 1), 3),
    "split features": lambda x: list(x.split(3, -1)),
    "tensor split": lambda x: list(x.tensor_split(2, 1)),
    "cat with plain": lambda x: torch.cat([x, torch.zeros_like(x)], 0),
    "cat features": lambda x: torch.cat([x, x], -1),
    "stack features": lambda x: torch.stack([x, x], -1),
    "where": lambda x: torch.where(x > 100, x, torch.zeros_like(x)),
    "index_put into plain": lambda x: torch.zeros(3, 5, 4, dtype=x.dtype).index_put((torch.tensor([0]),), x[1]),
    "copy_ into plain": lambda x: torch.zeros(3, 5, 4, dtype=x.dtype).copy_(x),
    "setitem into plain": lambda x: torch.zeros(6, 5, 4, dtype=x.dtype).__setitem__(slice(0, 3), x),
    "equal": lambda x: torch.equal(x, x.clone()),
    "isnan": lambda x: x.isnan(),
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.unique(),
    "einsum": lambda x: torch.einsum("ntf,ntf->nt", x.float(), x.float()),
    "sort": lambda x: list(x.sort(1)),
    "to list": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": np.asarray,
    "array of float64": lambda x: np.array(x, dtype=np.float64),
    "item": lambda x: x[0, 0, 0].item(),
    "iterate": list,
    "len": len,
    "from dlpack": torch.from_dlpack,
    "numpy from dlpack": np.from_dlpack,
    "as tensor": torch.as_tensor,
    "new tensor": lambda x: x.new_tensor([1, 2]),
    "new empty": lambda x: x.new_empty(3).shape,
    "empty like": lambda x: torch.empty_like(x).shape,
    "type as": lambda x: x.type_as(torch.ones(1, dtype=torch.float64)),
    "contiguous": lambda x: x.contiguous(),
    "is shared": lambda x: x.share_memory_().is_shared(),
    "element size": lambda x: (x.element_size(), x.numel(), x.nbytes, x.ndim, x.dtype, tuple(x.stride())),
    "is pinned": lambda x: x.is_pinned(),
    "vmap": lambda x: torch.vmap(lambda row: row * 2)(x),
    "vmap over time": lambda x: torch.vmap(lambda row: row.float().sum(), in_dims=1)(x),
    "nested tensor": lambda x: torch.nested.nested_tensor([x[0], x[1, :2]]).unbind()[1],
    "torch.save": lambda x: torch.load(saved(x)),
    "multiprocessing pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "deepcopy": copy.deepcopy,
}  # fmt: skip

WRITES = {
    "add_": lambda x: x.add_(1),
    "iadd": lambda x: x.__iadd__(1),
    "zero_": lambda x: x.zero_(),
    "copy_": lambda x: x.copy_(torch.zeros(3, 5, 4)),
    "row": lambda x: x[0].zero_(),
    "row setitem": lambda x: x.__setitem__(0, 1),
    "feature setitem": lambda x: x.__setitem__((..., 0), 1),
    "mask setitem": lambda x: x.__setitem__(x > 100, 1),
    "out": lambda x: torch.add(x, 1, out=x),
    "index_fill_": lambda x: x.index_fill_(0, torch.tensor([0]), 1),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "resize_": lambda x: x.resize_(2, 2),
    "data": lambda x: setattr(x, "data", torch.zeros(3, 5, 4)),
    "foreach": lambda x: torch._foreach_add_([x], 1),
}


def saved(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return file


def compare(name, dtype):
    warnings.simplefilter("ignore")
    exact, full = (td.get(NEXT) for td in twins(dtype=dtype))
    same(VALUES[name](exact), VALUES[name](full))
    same(exact, full)


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
@pytest.mark.parametrize("name", VALUES)
def test_operation_equals_the_plain_tensors(child, name, dtype):
    child(compare, name, dtype)


def refuse(name):
    exact, full = (td.get(NEXT) for td in twins())
    with pytest.raises(ReadOnlyRowsError):
        WRITES[name](exact)
    same(exact, full)


@pytest.mark.parametrize("name", WRITES)
def test_write_in_place_is_refused_and_changes_nothing(child, name):
    child(refuse, name)


RAW = {
    "data_ptr": lambda x: x.data_ptr(),
    "to_dlpack": lambda x: torch.utils.dlpack.to_dlpack(x),
    "bytes": lambda x: bytes(x.untyped_storage()),
    "data_ptr of the storage": lambda x: x.untyped_storage().data_ptr(),
    "element of the storage": lambda x: x.storage()[0],
}


def raw_memory(name):
    exact, _ = twins()
    with pytest.raises(RuntimeError):
        RAW[name](exact.get(NEXT))


@pytest.mark.parametrize("name", RAW)
def test_asking_for_memory_that_is_not_there_is_an_error_not_a_segfault(child, name):
    child(raw_memory, name)


def compiled_alike(backend):
    exact, full = twins()
    compiled = torch.compile(lambda x: (x * 2).sum(-1) + x.reshape(-1, 4)[0, 0], backend=backend, fullgraph=True)
    same(compiled(exact.get(NEXT)), compiled(full.get(NEXT)))
    same(compiled(exact.get(NEXT)[:, 1:3]), compiled(full.get(NEXT)[:, 1:3]))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions_read_the_same_values(child, backend):
    child(compiled_alike, backend)


def test_gradients_of_a_network_and_of_the_rows_equal_the_plain_ones():
    exact, full = (td.get(NEXT) for td in twins())
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    grads = []
    for x in (exact, full):
        net.zero_grad()
        x.requires_grad_()
        (net(x / 100).square().sum() + net(x[1, 2:] / 100).sum()).backward()
        grads.append([x.grad, *(p.grad.clone() for p in net.parameters())])
    same(grads[0], grads[1])
    weight = torch.full((3, 5, 4), 2.0)
    exact.grad = None
    (exact.full() * weight).sum().backward()
    same(exact.grad, weight)


def test_change_of_observations_in_place_is_seen_when_rows_are_read():
    exact, _ = twins()
    part = exact.get(NEXT)[0]
    exact.get("observation").div_(255)
    for read in (
        exact.get(NEXT).full,
        part.full,
        lambda: part + 1,
        lambda: exact.clone(),
        lambda: pack(exact),
    ):
        with refused(ArgumentError, "full_next_obs"):
            read()
    same(exact.get(("next", "camera", "pixels")), twins()[1].get(("next", "camera", "pixels")))


def test_replacing_observations_changes_no_next_observation():
    exact, full = twins()
    for td in (exact, full):
        td.set("observation", td.get("observation") / 255)
    same(exact, full)


def test_write_into_a_gathered_view_is_not_lost_unseen():
    exact, _ = twins()
    exact.get(NEXT)[..., 0].add_(1)  # a temporary
    refused(ReadOnlyRowsError, "write lost", lambda: exact.get(NEXT).full())


def test_observations_made_in_inference_mode_have_no_counter_but_read_right():
    with torch.inference_mode():
        exact, full = twins()
        same(exact, full)
    same(exact, full)


def test_batch_bytes_can_be_counted_and_say_what_they_count():
    exact, _ = twins()
    rows = exact.get(NEXT)
    assert rows.nbytes_held == rows.extra.nbytes + rows.ends.nbytes
    index = rows.index
    assert rows.nbytes_held == rows.extra.nbytes + rows.ends.nbytes + index.nbytes
    assert exact.bytes() > 0  # tensordict counts the observations under the rows once more; the ledger does not


def test_keys_of_one_batch_share_one_index():
    exact, _ = twins()
    assert exact.get(NEXT).index is exact.get(("next", "camera", "pixels")).index


def test_minibatch_on_another_device_is_only_its_own_rows():
    exact, _ = twins(lanes=4, steps=100)
    part = exact.reshape(-1)[:3].get(NEXT).to("meta")
    assert not isinstance(part, Rows) and part.shape == (3, 4)


ELSEWHERE = """
import sys, torch
for known in (False, True):
    try:
        if known:
            import rlcli.data
        parts = torch.load(f"saved {known}.pt")
        assert ("rlcli" in sys.modules) == known
        read = [x if isinstance(x, torch.Tensor) else x["next"]["observation"] for x in parts]
        assert all(type(x) is torch.Tensor for x in read)
        torch.save(read, f"read {known}.pt")
    except Exception as error:
        open(f"error {known}.txt", "w").write(repr(error))
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Where a process that had not heard of rlcli, and then imported it, has written what it loaded."""
    folder, (exact, _) = tmp_path_factory.mktemp("elsewhere"), twins()
    torch.save([exact["next", "observation"], exact.to_dict()], folder / "saved False.pt")
    torch.save([exact], folder / "saved True.pt")
    subprocess.run([sys.executable, "-c", ELSEWHERE], check=True, cwd=folder)
    return folder


@pytest.mark.parametrize(("known", "parts"), [(False, 2), (True, 1)])
def test_what_torch_saved_is_loaded_elsewhere_by_default(elsewhere, known, parts):
    """By a process that never heard of rlcli; whole batches by one that imported it."""
    error = elsewhere / f"error {known}.txt"
    assert not error.exists(), error.read_text()
    read = torch.load(elsewhere / f"read {known}.pt")
    assert len(read) == parts
    for tensor in read:
        same(tensor, twins()[1]["next", "observation"])


def test_pickle_of_a_packed_batch_holds_observations_once():
    exact, full = twins(lanes=8, steps=200, shapes=((64,), (8, 8)))
    packed = pickle.dumps(pack(exact))
    assert len(packed) < 0.56 * len(pickle.dumps(full))
    back = unpack(pickle.loads(packed))
    same(back, full)
    assert isinstance(back.get(NEXT), Rows)
    assert len(pickle.dumps(exact)) < 1.01 * len(pickle.dumps(full))


def test_process_queue_carries_rows():
    exact, full = twins()
    queue = torch.multiprocessing.get_context("fork").SimpleQueue()
    queue.put(exact.get(NEXT))
    same(queue.get(), full.get(NEXT))


def test_plain_copy_of_a_batch_is_writable_and_independent():
    exact, full = twins()
    plain = full_next_obs(exact)
    plain.get(NEXT).zero_()
    same(exact, full)


@pytest.mark.parametrize(
    ("ends", "extra"),
    [([0, 2], 2), ([5, 2, 14], 3), ([2, 14], 3), ([-1, 14], 2), ([2, 2, 14], 3), ([], 0), ([15], 1)],
)
def test_ends_that_do_not_fit_are_refused(ends, extra):
    with refused(ArgumentError, "ends"):
        Rows.from_ends(torch.zeros(3, 5, 4), torch.tensor(ends, dtype=torch.int32), torch.zeros(extra, 4))


test_refused = refusals(
    ("observations with a graph are refused", ArgumentError, "detach",
     lambda: Rows(torch.zeros(3, 4, requires_grad=True), torch.zeros(1, 4), torch.tensor([1, 2, 3]))),
    ("observations out of order in memory are refused not copied", ArgumentError, "contiguous",
     lambda: Rows(torch.zeros(5, 3, 4).transpose(0, 1), torch.zeros(1, 4), torch.zeros(3, 5, dtype=torch.int32))),
)  # fmt: skip
