"""Every TensorDict operation on an `exact` batch gives what `full` gives, or is refused; all in a child process."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
import warnings

import numpy as np
import pytest
import torch
from batches import same, twins
from tensordict import LazyStackedTensorDict, TensorDict, pad

from rlcli.data import CompressedStorage, LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from rlcli.data.next_obs import ReadOnlyRowsError, Rows, pack, unpack
from rlcli.transforms import NextObservationDelta

PLACES = torch.tensor([[0, 2, 1], [4, 0, 3]])
NEXT = ("next", "observation")


def mask(td):
    return (torch.arange(td.numel()) % 3 == 0).reshape(td.shape)


def memmap(td):
    with tempfile.TemporaryDirectory() as folder:
        return td.memmap(folder).clone()


def reversed_lanes(td):
    return torch.stack([td[i] for i in range(td.shape[0])][::-1])


def saved(td, weights_only=False):
    file = io.BytesIO()
    torch.save(td, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def through_files(td):
    with tempfile.TemporaryDirectory() as folder:
        td.save(folder)
        return TensorDict.load(folder).clone()


def put(td, place, value):
    td[place] = value
    return td


def into_plain(td):
    return td.clone().zero_().copy_(td)


LAZY = {
    "index": lambda td: td[1],
    "index two": lambda td: td[1, 2],
    "slice": lambda td: td[:, 1:4],
    "stride": lambda td: td[:, ::2],
    "ellipsis": lambda td: td[..., -1],
    "none": lambda td: td[None],
    "none inside": lambda td: td[:, None, 2],
    "mask": lambda td: td[mask(td)],
    "fancy": lambda td: td[PLACES[0], PLACES[1]],
    "fancy apart": lambda td: td[None, PLACES[0]],
    "list": lambda td: td[[0, 2]],
    "permutation": lambda td: td.reshape(-1)[torch.arange(td.numel()).flip(0)],
    "reshape": lambda td: td.reshape(5, 3),
    "reshape flat": lambda td: td.reshape(-1),
    "view": lambda td: td.view(-1),
    "flatten": lambda td: td.flatten(0, 1),
    "unflatten": lambda td: td.reshape(-1).unflatten(0, (5, 3)),
    "transpose": lambda td: td.transpose(0, 1),
    "transpose reshape": lambda td: td.transpose(0, 1).reshape(-1),
    "unsqueeze": lambda td: td.unsqueeze(0),
    "unsqueeze last": lambda td: td.unsqueeze(-1),
    "split": lambda td: td.split(2, 1),
    "split sizes": lambda td: td.split([1, 2], 0),
    "chunk": lambda td: td.chunk(2, 1),
    "unbind": lambda td: td.unbind(0),
    "shallow clone": lambda td: td.clone(recurse=False),
    "copy": lambda td: td.copy(),
    "detach": lambda td: td.detach(),
    "data": lambda td: td.data,
    "contiguous": lambda td: td.contiguous(),
    "to same device": lambda td: td.to("cpu"),
    "share memory": lambda td: td.share_memory_(),
    "select": lambda td: td.select(NEXT, "observation"),
    "exclude": lambda td: td.exclude("observation"),
    "flatten keys": lambda td: td.flatten_keys("."),
    "to dict": lambda td: td.to_dict(),
    "lock": lambda td: td.lock_(),
    "update": lambda td: TensorDict({}, td.batch_size).update(td),
    "update some keys": lambda td: TensorDict({}, td.batch_size).update(td, keys_to_update=[NEXT]),
    "rename key": lambda td: td.rename_key_(NEXT, ("next", "seen")),
    "rename root": lambda td: td.rename_key_("observation", "looked"),
    "replace": lambda td: td.replace({"reward": td.get(("next", "reward"))}),
    "flatten and unflatten keys": lambda td: td.flatten_keys(".").unflatten_keys("."),
    "split keys": lambda td: list(td.split_keys([NEXT])),
    "separates": lambda td: td.copy().separates(NEXT),
    "get at": lambda td: td.get_at(NEXT, 1),
    "get sub tensordict": lambda td: td.get("next"),
    "pop": lambda td: [td.pop(NEXT), td],
    "delete another key": lambda td: td.del_("observation"),
    "index select": lambda td: td[:, torch.tensor([4, 0, 0])],
    "slice empty": lambda td: td[:, 5:],
    "tensor split": lambda td: list(torch.split(td, [1, 4], 1)),
    "unbind time": lambda td: td.unbind(1),
    "mask of a flat batch": lambda td: td.reshape(-1)[mask(td).reshape(-1)],
    "named": lambda td: td.refine_names("env", "time"),
    "view time first": lambda td: td.transpose(0, 1)[1:3].transpose(0, 1),
    "sorted keys": lambda td: td.copy().update({}).lock_().unlock_(),
    "filter": lambda td: td.filter_empty_(),
    "named apply that moves rows": lambda td: td.named_apply(lambda name, x: x[:2], batch_size=[2, 5]),
    "items": lambda td: dict(td.items(True, True)),
    "values": lambda td: list(td.values(True, True)),
    "shuffle": lambda td: td.reshape(-1)[torch.randperm(td.numel(), generator=torch.Generator().manual_seed(0))],
}  # fmt: skip
GATHERED = {
    "permute": lambda td: td.permute(1, 0),
    "squeeze": lambda td: td.unsqueeze(1).squeeze(1),
    "expand": lambda td: td.expand(2, *td.shape),
    "stack of slices": reversed_lanes,
    "cat of slices": lambda td: torch.cat([td[:, 3:], td[:, :3]], 1),
    "maybe dense stack": lambda td: LazyStackedTensorDict.maybe_dense_stack(list(td.unbind(1)), 1),
    "lazy stack read": lambda td: LazyStackedTensorDict(*td.unbind(0), stack_dim=0)[:, 1],
    "squeeze all": lambda td: td[:1].unsqueeze(-1).squeeze(),
    "movedim": lambda td: td.permute(1, 0).unsqueeze(0),
    "unbind and stack": lambda td: torch.stack(list(td.unbind(1)), 1),
    "pickle": lambda td: pickle.loads(pickle.dumps(td)),
    "deepcopy": copy.deepcopy,
    "clone": lambda td: td.clone(),
    "memmap": memmap,
    "consolidate": lambda td: td.consolidate(),
    "where": lambda td: td.where(mask(td), td * 0),
    "pad": lambda td: pad(td, [1, 0, 0, 2], value=1.0),
    "dtype cast": lambda td: td.to(torch.float64),
    "half": lambda td: td.half(),
    "apply": lambda td: td.apply(lambda x: x + 1),
    "arithmetic": lambda td: td * 2 + td,
    "masked fill": lambda td: td.masked_fill(mask(td), 7),
    "gather": lambda td: td.gather(1, torch.tensor([[0, 1], [4, 4], [2, 0]])),
    "cat of batches": lambda td: torch.cat([td, td.clone()], 1),
    "stack of batches": lambda td: torch.stack([td, td.clone()], 0),
    "setitem into a plain batch": lambda td: into_plain(td),
    "update_ of a plain batch": lambda td: into_plain(td).update_(td),
    "mean over time": lambda td: td.float().mean(dim=1),
    "sum": lambda td: td.float().sum(),
    "all": lambda td: (td == td).all(),
    "isfinite": lambda td: td.isfinite(),
    "new zeros": lambda td: torch.zeros_like(td),
    "ones like": lambda td: torch.ones_like(td),
    "numpy": lambda td: td.numpy(),
    "tolist": lambda td: td.tolist(),
    "roll by apply": lambda td: td.apply(lambda x: x.roll(1, 0)),
    "state dict": lambda td: td.state_dict(),
    "torch.save": lambda td: saved(td),
    "torch.load, weights only": lambda td: saved(td, weights_only=True),
    "memmap like": lambda td: td.memmap_like().copy_(td.clone()),
    "save and load": lambda td: through_files(td),
    "masked select": lambda td: td.masked_select(mask(td)),
    "repeat": lambda td: td.repeat(2, 1),
    "repeat interleave": lambda td: td.repeat_interleave(2, dim=1),
    "to meta": lambda td: [(x.shape, x.dtype, x.device.type) for x in td.to("meta").values(True, True)],
    "to integer": lambda td: td.to(torch.int32),
    "view as bytes": lambda td: td.get(NEXT).contiguous().view(torch.uint8),
    "vmap": lambda td: torch.vmap(lambda row: row.apply(lambda x: x * 2))(td),
    "vmap over time": lambda td: torch.vmap(lambda row: row.get(NEXT).float().sum(), (1,))(td),
    "apply of two": lambda td: td.apply(lambda x, y: x + y, td),
    "apply with another batch size": lambda td: td.apply(lambda x: x.sum(1, dtype=x.dtype), batch_size=[3]),
    "multithreaded apply": lambda td: td._fast_apply(lambda x: x * 2, num_threads=2),
    "map of leaves": lambda td: torch.utils._pytree.tree_map(lambda x: x + 0, td),
    "comparison": lambda td: td == td.clone(),
    "addition of batches": lambda td: td.add(td.clone()),
    "clamp": lambda td: td.clamp(0, 3),
    "norm": lambda td: td.float().norm(),
    "maximum": lambda td: td.maximum(td * 0),
    "std over time": lambda td: td.float().std(dim=1),
    "to tensordict": lambda td: td.to_tensordict(),
    "dense stack": lambda td: LazyStackedTensorDict(*td.unbind(0), stack_dim=0).contiguous(),
    "struct array": lambda td: td.to_struct_array() if hasattr(td, "to_struct_array") else None,
    "padded nested": lambda td: torch.nested.as_nested_tensor(list(td.get(NEXT).float())).to_padded_tensor(0.0),
    "reduce": lambda td: td.float().sum(dim="feature"),
    "share a clone": lambda td: td.clone().share_memory_(),
    "pin or not": lambda td: td.pin_memory() if torch.cuda.is_available() else td.clone(),
    "from dict": lambda td: TensorDict(td.to_dict(), td.batch_size).clone(),
    "empty like": lambda td: torch.empty_like(td).zero_(),
    "full like": lambda td: torch.full_like(td, 2),
    "update at of a plain batch": lambda td: into_plain(td).update_at_(td[1], 0),
    "set at of a plain batch": lambda td: into_plain(td).set_at_(NEXT, td.get(NEXT)[0], 2),
    "setitem by mask": lambda td: put(into_plain(td), mask(td), td[mask(td)]),
}
REFUSED = {
    "zero_": lambda td: td.zero_(),
    "fill_": lambda td: td.fill_(NEXT, 3),
    "set_": lambda td: td.set_(NEXT, td.get("observation")),
    "set_at_": lambda td: td.set_at_(NEXT, td.get("observation")[0], 0),
    "update_": lambda td: td.update_({"next": {"observation": td.get("observation")}}),
    "copy_": lambda td: td.copy_(td.clone()),
    "setitem": lambda td: td.__setitem__(0, td[1]),
    "masked_fill_": lambda td: td.masked_fill_(mask(td), 7),
    "apply_": lambda td: td.apply_(lambda x: x.add_(1)),
    "update_at_": lambda td: td.update_at_(td[1].select(NEXT), 0),
    "setitem by mask": lambda td: td.__setitem__(mask(td), td[mask(td)]),
    "key setitem in place": lambda td: td.get("next").get("observation").__setitem__(0, 1),
    "add_": lambda td: td.add_(1),
    "mul_": lambda td: td.mul_(2),
    "gather out": lambda td: td.gather(1, torch.zeros(3, 5, dtype=torch.long), out=twins(1)[0]),
    "stack out": lambda td: torch.stack([td[0], td[1], td[2]], 0, out=twins(1)[0]),
    "multithreaded in place": lambda td: td._fast_apply(lambda x: x.zero_(), num_threads=2),
    "load in place": lambda td: td.load_state_dict(td.clone().state_dict(), assign=False),
}


def compare(name, dtype, lazy):
    warnings.simplefilter("ignore")
    operation = (LAZY if lazy else GATHERED)[name]
    exact, full = twins(dtype=dtype)
    ours, theirs = operation(exact), operation(full)
    same(ours, theirs)
    if lazy and hasattr(ours, "get") and ours.get(NEXT, None) is not None and ours.get(NEXT).numel():
        assert isinstance(ours.get(NEXT), Rows)


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
@pytest.mark.parametrize("name", LAZY)
def test_operation_that_only_moves_rows_equals_full_and_stays_lazy(child, name, dtype):
    # dicts, flattened keys and unpickled parts are compared by value alone
    child(compare, name, dtype, True)


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
@pytest.mark.parametrize("name", GATHERED)
def test_operation_that_needs_values_equals_full(child, name, dtype):
    child(compare, name, dtype, False)


def refused(name):
    exact, _ = twins()
    with pytest.raises((ReadOnlyRowsError, ValueError)) as caught:
        REFUSED[name](exact)
    reasons, error = [], caught.value
    while error is not None:  # tensordict wraps what a leaf raises
        reasons.append(error)
        error = error.__cause__ or error.__context__
    assert any(isinstance(reason, ReadOnlyRowsError) and ".full()" in str(reason) for reason in reasons)


@pytest.mark.parametrize("name", REFUSED)
def test_operation_that_writes_next_observations_is_refused_with_the_way_out(child, name):
    child(refused, name)


def test_a_single_env_batch_works_the_same_way():
    exact, full = twins(batched=False, steps=9, ends=3)
    for operation in (
        lambda td: td[2:7],
        lambda td: td[[0, 8, 8]],
        lambda td: td.reshape(3, 3),
        lambda td: td * 2,
    ):
        same(operation(exact), operation(full))


@pytest.mark.parametrize("seed", range(20))
def test_random_chains_of_operations_never_give_a_wrong_row(seed):
    rng = np.random.default_rng(seed)
    exact, full = twins(
        seed, lanes=int(rng.integers(1, 5)), steps=int(rng.integers(1, 9)), ends=int(rng.integers(0, 6))
    )
    moves = [
        lambda td: td.reshape(-1),
        lambda td: td.transpose(0, -1),
        lambda td: td[torch.arange(td.shape[0]).flip(0)],
        lambda td: td.unsqueeze(int(td.ndim > 1)),
        lambda td: torch.cat([td, td]),
        lambda td: torch.stack([td, td], td.ndim),
        lambda td: td[: max(1, td.shape[0] - 1)],
        lambda td: td.split(1, -1)[0],
        lambda td: td.clone(),
        lambda td: td[mask(td)],
    ]
    for pick in rng.integers(0, len(moves), 6):
        exact, full = moves[pick](exact), moves[pick](full)
        same(exact, full)


@pytest.mark.parametrize("join", [torch.cat, torch.stack])
def test_joining_batches_of_different_collections_never_mixes_their_rows(join):
    exact, full = zip(*(twins(seed) for seed in range(3)), strict=True)
    same(join(exact, 1), join(full, 1))
    same(join([td.get(NEXT) for td in exact], 0), join([td.get(NEXT) for td in full], 0))
    same(join([exact[0].get(NEXT), full[1].get(NEXT)]), join([full[0].get(NEXT), full[1].get(NEXT)]))


def read_in_another_process(batches, queue):
    queue.put([{key: x.numpy().tobytes() for key, x in batch.items(True, True)} for batch in batches])


def test_a_spawned_process_reads_what_full_holds():
    exact, full = twins()
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    batches = (exact, packed_batch(exact), exact.reshape(-1)[3:7])
    child = context.Process(target=read_in_another_process, args=(batches, queue))
    child.start()
    whole, packed, part = queue.get()
    assert whole == packed == {key: x.numpy().tobytes() for key, x in full.items(True, True)}
    assert part == {key: x.numpy().tobytes() for key, x in full.reshape(-1)[3:7].items(True, True)}
    child.join()
    assert child.exitcode == 0


class packed_batch:
    """A batch that travels taken apart."""

    def __init__(self, batch):
        self.batch = batch

    def __reduce__(self):
        return unpack, (pack(self.batch),)


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("tier", ["tensor", "memmap", "compressed"])
def test_extending_dumping_and_loading_gives_what_full_gives(tmp_path, tier, ndim, dtype):
    kinds = {"tensor": LazyTensorStorage, "memmap": LazyMemmapStorage, "compressed": CompressedStorage}
    rings = [ReplayBuffer(storage=kinds[tier](24, ndim=ndim), batch_size=7) for _ in range(2)]
    for seed in range(6):
        pair = twins(seed, dtype=dtype)
        for move in (lambda td: td, lambda td: td[:, :3], lambda td: td.reshape(-1)[: 3 * 2].reshape(3, 2)):
            for buffer, td in zip(rings, pair, strict=True):
                buffer.extend(move(td))
            same(rings[0][:], rings[1][:])
    for buffer, name in zip(rings, "ab", strict=True):
        buffer.dumps(tmp_path / name)
    loaded = [ReplayBuffer(storage=LazyTensorStorage(24, ndim=ndim), batch_size=7) for _ in range(2)]
    for buffer, name in zip(loaded, "ab", strict=True):
        buffer.loads(tmp_path / name)
    same(loaded[0][:], rings[1][:])
    restored = ReplayBuffer(storage=LazyTensorStorage(24, ndim=ndim), batch_size=7)
    restored.load_state_dict(rings[0].state_dict())
    same(restored[:], loaded[1][:])


def test_rows_written_over_by_rows_of_an_exact_batch_are_those_of_full():
    rings = [ReplayBuffer(storage=LazyTensorStorage(30), batch_size=7) for _ in range(2)]
    for seed in range(3):
        for buffer, td in zip(rings, twins(seed), strict=True):
            buffer.extend(td)
            if seed:
                buffer[torch.tensor([3, 1, 14])] = td.reshape(-1)[[4, 9, 14]]
                buffer[5] = td.reshape(-1)[2]
        same(rings[0][:], rings[1][:])


def test_a_difference_of_a_batch_in_files_is_that_of_the_batch():
    _, full = twins()
    with tempfile.TemporaryDirectory() as folder:
        same(NextObservationDelta().compress(full.memmap(folder)), NextObservationDelta().compress(full))
