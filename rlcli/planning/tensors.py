"""The tensors that a run will hold, key by key: the run's own ledger, read off tensors without memory.

A batch is laid out as the run lays it out, modules are copied to the meta device, parameters and all, so that a batch
or a net of any size costs nothing here.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from rlcli.collectors.schema import RowSchema
from rlcli.data.fields import width_of
from rlcli.data.next_obs import Rows
from rlcli.data.next_obs.modes import KEEPS, counts_of, shared
from rlcli.data.next_obs.rows import Successors
from rlcli.keys import APPROXIMATED, SHIFTED_VALID, Key, as_tuple, show, unravel
from rlcli.learning.optimizer import FlatOptimizer, spans_of
from rlcli.objectives.reduction import MASK_KEYS
from rlcli.report.ledger import BUFFER, FEW_ROWS, PRIORITIES, Claims, LedgerEntry, batch_entries, summed_entries
from rlcli.specs.dtypes import dtype_name
from rlcli.specs.field import NONE, SHARED, Field

if TYPE_CHECKING:
    from rlcli.data.codes import CodedRows
    from rlcli.data.storages import Storage
    from rlcli.envs import EnvBase
    from rlcli.objectives.value.estimator import ValueEstimator

Module = TypeVar("Module", bound=nn.Module)
META = torch.device("meta")
SPARE = "further batches"  # in the ledger
POINTER = 4  # bytes of an int32: where an end, or a successor, lies
EPISODE = 100  # steps of an episode: what is not known before a run


def copied_to(device: torch.device, module: Module) -> Module:
    """Return a copy with gradients that are there already; on the meta device parameters and buffers have no memory."""
    memo: dict[int, Any] = {}
    for p in module.parameters():
        memo[id(p)] = nn.Parameter(_copied(p, device), requires_grad=p.requires_grad)
        memo[id(p)].grad = torch.empty_like(p, device=device) if p.requires_grad else None
    for b in module.buffers():
        memo[id(b)] = _copied(b, device)
    return copy.deepcopy(module, memo)


def _copied(x: Tensor, device: torch.device) -> Tensor:
    new = torch.empty_like(x, device=device, requires_grad=False)
    return new if device == META else new.copy_(x.detach())


# ---- batches -----------------------------------------------------------------------------------------------------
def written_by(estimator: ValueEstimator, mode: str) -> dict[Key, Field]:
    """Return what a value estimator adds to a batch."""
    dtype = next((p.dtype for p in estimator.parameters()), torch.float32)
    number, flag = Field((1,), dtype), Field((), torch.bool)
    written: dict[Key, Field] = {key: flag if key == SHIFTED_VALID else number for key in estimator.out_keys}
    return written | ({APPROXIMATED: flag} if KEEPS[mode] == NONE and estimator.value_network is not None else {})


def trial_batch(
    rows: RowSchema, mode: str, added: Mapping[Key, Field] | None = None, device: torch.device = META
) -> TensorDict:
    """Return a batch `[lanes, steps]` of zeros whose episodes end at each last step, on `meta` by default."""
    shape = torch.Size((rows.lanes, rows.steps))
    fields = rows.stored(mode) | dict(added or {})

    def column(field: Field, value: float = 0, count: int = rows.frames) -> Tensor:
        return field.empty(count, device).fill_(value) if device != META else field.empty(count, device)

    columns: dict[Key, Tensor] = {
        key: column(field, key in MASK_KEYS).view(*shape, *field.shape) for key, field in fields.items()
    }
    if following := shared(rows.fields, mode):
        last = torch.empty(rows.lanes, dtype=torch.int32, device=device)
        if device != META:
            torch.arange(rows.steps - 1, rows.frames, rows.steps, out=last)
        ends = Successors(shape, last)
        for key, field in following.items():
            columns[key] = Rows.from_ends(columns[before(key)], ends, column(field, count=rows.lanes))
    overflows, states = rows.overflows(mode), rows.states
    if overflows or states:
        from rlcli.data.next_obs.sparse import Sparse, sparse_rows
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    for key, field in overflows.items():  # a column is there before anything overflows
        columns[key] = sparse_rows(shape, Sparse(nothing, field.empty(0, device)))
    kept = torch.empty(rows.kept_states if states else 0, dtype=torch.int64, device=device)
    for key, field in states.items():
        columns[key] = sparse_rows(shape, Sparse(kept, column(field, count=len(kept)), math.nan))
    batch = TensorDict({}, batch_size=shape, device=device)
    for key, x in columns.items():
        batch.set(key, x)
    return batch


def planned_batch(
    rows: RowSchema, mode: str, *, added: Mapping[Key, Field] | None = None, index: bool = False, device: str = "cpu"
) -> list[LedgerEntry]:
    """Return the ledger of one batch; `index`: an `exact` batch is asked where successors lie."""
    batch = trial_batch(rows, mode, added)
    lazy = [value for key in rows.successors if isinstance(value := batch.get(key, None), Rows)]
    if index and lazy:
        _ = lazy[0].index  # is built, and shared by all keys
    claims = Claims(foretold=True)
    found = {entry.key: entry for entry in batch_entries(batch, map(before, rows.successors), claims=claims)}
    fields = {**rows.stored(mode), **(added or {}), **rows.successors, **rows.states}
    order = [show(key) for key in (*fields, *rows.overflows(mode))]
    lead = rows.lanes, rows.steps
    shapes = {show(key): ((*lead, *field.shape), dtype_name(field.dtype)) for key, field in fields.items()}
    entries = []
    for entry in (found[key] for key in order):
        shape, dtype = (entry.shape, entry.dtype) if entry.dtype else shapes[entry.key]
        entries.append(replace(entry, shape=shape, dtype=dtype, device=device, peak=entry.bytes))
    return entries


def before(key: Key) -> Key:
    """Return the observation that a next one belongs to."""
    return unravel(as_tuple(key)[1:])


def per_end(rows: RowSchema, mode: str) -> int:
    """Return the bytes of one more end in a batch: a next observation in `exact`, and a first state."""
    kept = shared(rows.fields, mode)
    return sum(field.width for field in (*kept.values(), *rows.states.values())) + (POINTER if kept else 0)


def out_of_step(rows: RowSchema) -> int:
    """Return bytes that a batch may hold more once episodes have ended: its rows of kept states lie anywhere then."""
    return (rows.most_kept_states - rows.kept_states) * width_of(rows.states)


# ---- learning ----------------------------------------------------------------------------------------------------
def planned_learner(
    policy: nn.Module, loss: nn.Module, optimizer: str, options: Mapping[str, Any], device: str = "cpu"
) -> list[LedgerEntry]:
    """Return the ledger of what a loss trains as one flat tensor, read off tensors without memory."""
    trained = [p for p in loss.parameters() if p.requires_grad]
    probe = nn.Parameter(torch.zeros(1, dtype=trained[0].dtype if trained else torch.float32))
    probe.grad = torch.zeros_like(probe)
    stepped = FlatOptimizer(optimizer, probe, 0.0, **options)  # its state for one number, for all of them as long
    stepped.step()
    elements = spans_of(trained)[1]
    state = {
        key: torch.empty(elements if x.ndim else (), dtype=x.dtype, device=META)
        for key, x in stepped.state_dict().items()
    }
    together = nn.ModuleList([policy, loss])
    held = {"parameters": together.parameters(), "gradients": trained, "buffers": together.buffers()}
    kinds = {kind: [torch.empty_like(x, device=META) for x in tensors] for kind, tensors in held.items()}
    entries = summed_entries(kinds | {"optimizer": [*state.values()]}, Claims(foretold=True))
    return [replace(entry, device=device, peak=entry.bytes) for entry in entries]


def bytes_held(columns: Mapping[Key, Tensor]) -> int:
    """Return the bytes of columns that share no memory, sparse ones among them."""
    return sum(x.nbytes_held if isinstance(x, Rows) else x.nbytes for x in columns.values())


def spare_entry(rows: RowSchema, mode: str, device: str, count: int = 1) -> LedgerEntry:
    """Return the batch before, which is alive while the next one is collected; or as many as workers write ahead."""
    nbytes = count * sum(entry.bytes for entry in planned_batch(rows, mode))
    what = "the previous one, while the next is collected" if count == 1 else f"{count} written ahead by workers"
    return LedgerEntry(SPARE, what, nbytes, device=device, peak=nbytes)


CLUSTER = REMOTE_WORKER = int(0.4 * 2**30)  # of Ray on this machine; of a process that imports all by itself


@dataclass(frozen=True)
class RunEnvs:
    """The envs of a run: how many there are, which process steps them, and how more like them are made."""

    num: int
    in_process: int  # of them, those that the run's own process steps
    evaluated: int  # what an evaluation makes in that process, beside them
    workers: int  # processes that step the others
    processes: int  # of these and those of an evaluation, as many as there are at a time
    apart: int  # envs in them
    collecting: bool  # whether those collect
    remote: int | None  # bytes of workers of another framework that are here; None: they are processes of ours
    make: Callable[[int], EnvBase]  # so many in this process
    make_one: Callable[[], EnvBase]  # as a collecting worker has it
    make_apart: Callable[[], EnvBase]  # stepped by a worker


@dataclass(frozen=True)
class RunStorage:
    """The storage of a run before it is made."""

    kind: type[Storage]
    max_size: int
    ndim: int
    rows: int  # of the whole run, however many are kept
    codes: bool
    stacks: Mapping[Key, int]  # frames in a stack, where one is stored a row
    priorities: bool
    device: str = "cpu"  # where columns lie, if not on a disk

    @property
    def on_disk(self) -> bool:
        return self.kind.medium == "disk"


# ---- buffers -----------------------------------------------------------------------------------------------------
def planned_buffer(storage: RunStorage | None, rows: RowSchema, mode: str) -> list[LedgerEntry]:
    """Return the columns of a storage once it holds all rows of the run; empty without one."""
    if storage is None:
        return []
    away = storage.device != "cpu"
    device = storage.device if away else storage.kind.medium
    count = min(storage.max_size, storage.rows)
    fields = rows.stored(mode)
    stacks = storage.stacks if KEEPS[mode] == SHARED else {}
    held = fields | {key: Field(fields[key].shape[1:], fields[key].dtype) for key in stacks}  # one frame a row
    coded = _packed(storage.codes and not away, rows, held, stacks)
    widths = {key: held[key].width if (width := coded.width(key)) is None else width for key in fields}
    reserved = storage.kind.planned_rows(math.ceil(sum(widths.values())), storage.max_size, count)
    reserved = storage.max_size if away else reserved
    # a ring that goes round drops a file once its last row is gone
    goes_round = device == "disk" and storage.rows > count
    columns = []
    for key, field in fields.items():
        width, note = storage.kind.planned_width(field, widths[key], key in stacks)
        if not note:
            note = "packed" if coded.width(key) is not None else "one frame per row" if key in stacks else ""
        dtype, shape = dtype_name(field.dtype), (count, *field.shape)
        note = "; ".join(filter(None, (note, "approximate: whole files" if goes_round else "")))
        nbytes = round(reserved * width)
        columns.append(LedgerEntry(BUFFER, show(key), nbytes, shape, dtype, device, nbytes, width, note=note))
    for key, field in shared(rows.fields, mode).items():  # found in the row that follows, and the index
        shape, dtype = (count, *field.shape), dtype_name(field.dtype)
        columns.append(LedgerEntry(BUFFER, show(key), 0, shape, dtype, device, note="exact"))
    for key, field in rows.states.items():  # beside the storage, each with its number and place; zeros are places alone
        kept = min(count, math.ceil(count * rows.share_of_kept_states))
        from rlcli.data.next_obs.sparse import sparse_bytes

        nbytes = sparse_bytes(kept, field)
        shape, dtype, note = (count, *field.shape), dtype_name(field.dtype), f"about; {FEW_ROWS}"
        columns.append(LedgerEntry(BUFFER, show(key), nbytes, shape, dtype, "cpu", nbytes, nbytes / count, note=note))
    index = _index_bytes(storage, rows, mode, count) + rows.lanes * sum(fields[key].width for key in stacks)
    about = f"about; episodes of {EPISODE} steps"
    columns.append(LedgerEntry(BUFFER, "index", index, device="cpu", peak=index, per_frame=index / count, note=about))
    if storage.priorities:
        from rlcli.kernels.sum_tree import tree_bytes

        nbytes = tree_bytes(storage.max_size)
        columns.append(LedgerEntry(BUFFER, PRIORITIES, nbytes, device="cpu", peak=nbytes, per_frame=nbytes / count))
    return columns


def _index_bytes(storage: RunStorage, rows: RowSchema, mode: str, count: int) -> int:
    """Return the bytes of what says which rows belong together, and in `exact` of next observations without a row.

    A flat storage holds the rows of several envs one batch after another: each lane of a batch is a run of its own, and
    where rows have no ids a trajectory of its own, whose last next observation no row stands for.
    """
    from rlcli.data.index.arrays import bytes_for
    from rlcli.data.ring.layout import Markers

    ids = Markers.among(rows.stored(mode)).traj_key is not None
    pieces = count // rows.steps if storage.ndim == 1 and rows.lanes > 1 else 0
    episodes = count // EPISODE + rows.lanes
    runs = pieces + episodes * (rows.steps - 1) // rows.steps if pieces else episodes  # some end with their piece
    trajectories = episodes if ids else runs
    apart = width_of(following) if (following := shared(rows.fields, mode)) else None
    return bytes_for(storage.max_size, runs, trajectories, ids=ids, apart=apart)


def _packed(codes: bool, rows: RowSchema, fields: Mapping[Key, Field], stacks: Mapping[Key, int]) -> CodedRows:
    """Return how a buffer packs these rows."""
    from rlcli.data.codes import CodedRows, choose
    from rlcli.data.ring.layout import Markers

    traj_key = Markers.among(fields).traj_key
    return CodedRows(fields, choose(fields, counts_of(rows.fields), apart=stacks, traj_key=traj_key) if codes else ())
