"""Several buffers sampled as one: one per worker or per source, each written by itself.

```
member 0   a0 a1 a2 ...  \
member 1   b0 b1 b2 ...   >   sample [members, rows of each], or end to end where their numbers differ
member 2   c0 c1 c2 ...  /
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import Tensor

from rlcli import arguments
from rlcli.data.buffer.replay_buffer import ReplayBuffer
from rlcli.data.buffer.saving import no_copy, shallow
from rlcli.data.buffer.stream import Gate, Prefetcher, Sampled
from rlcli.data.buffer.tensordict_buffer import TensorDictReplayBuffer
from rlcli.data.buffer.transforms import Transforms
from rlcli.data.index import RandomStream
from rlcli.data.samplers.sampler import learned_from
from rlcli.data.shared import RegionWriter
from rlcli.data.storages.list_storage import collate
from rlcli.errors import ArgumentError, MissingKeyError
from rlcli.keys import INDEX, show

BUFFER_IDS = "buffer_ids"


class ReplayBufferEnsemble:
    """Members keep their own rows, trajectories, samplers and transforms.

    Parameters
    ----------
    *buffers : ReplayBuffer
    batch_size : int, optional
        Rows of a sample, divided evenly among the members that are drawn.
    sample_from_all : bool
        Every sample has rows of every member.
    p : sequence of float, optional
        Otherwise, each member's chance to be drawn; all alike by default.
    num_buffer_sampled : int, optional
        How many members are drawn for a sample, with replacement; as many as there are by default.
    layout : "stack" or "cat", optional
        Samples ``[members, rows]``, or ``[rows]`` end to end. By default stacked, unless a member's sampler may give
        fewer rows than asked for.
    transform : callable, optional
        Of whole samples.
    prefetch : int, optional
        Samples that a thread makes ahead; those that are not handed out are drawn again, and with them what somebody
        else drew from a member since. Threads of members then make none, and what they had ready comes first.
    seed : int, optional
        Of the choice of members.

    Raises
    ------
    ArgumentError
        There is no member, or settings exclude each other.
    """

    def __init__(
        self,
        *buffers: ReplayBuffer,
        batch_size: int | None = None,
        sample_from_all: bool = False,
        p: Sequence[float] | Tensor | None = None,
        num_buffer_sampled: int | None = None,
        layout: str | None = None,
        transform: Callable[[Any], Any] | None = None,
        prefetch: int | None = None,
        seed: int | None = None,
    ) -> None:
        if not buffers or not all(isinstance(buffer, ReplayBuffer) for buffer in buffers):
            raise ArgumentError("an ensemble is made of buffers", fix="ReplayBufferEnsemble(buffer, buffer, ...).")
        if sample_from_all and (p is not None or num_buffer_sampled is not None):
            raise ArgumentError(
                "sample_from_all=True leaves nothing to choose", fix="Leave out p and num_buffer_sampled."
            )
        self.buffers, self.sample_from_all = buffers, sample_from_all
        self.batch_size = None if batch_size is None else arguments.count("batch_size", batch_size)
        self.drawn = (
            len(buffers) if num_buffer_sampled is None else arguments.count("num_buffer_sampled", num_buffer_sampled)
        )
        self._layout = arguments.choice("layout", layout, (None, "stack", "cat"))
        self._chances = _checked(p, len(buffers))
        sums = np.cumsum(self._chances)
        self._below = sums[:-1] / sums[-1]  # of each but the first, the chance of those before it
        self.random = RandomStream(seed)
        self._lock = Gate()
        self._transforms = Transforms()
        self._ahead: Prefetcher | None = None
        if prefetch:
            self._ahead = Prefetcher(
                self._draw, arguments.count("prefetch", prefetch), lambda sampled: self._take_back(*sampled.position)
            )
        if transform is not None:
            self._transforms.append(transform)

    @classmethod
    def per_worker(
        cls, workers: int, make: Callable[[], ReplayBuffer], *, batch_size: int | None = None, **options: Any
    ) -> ReplayBufferEnsemble:
        """One buffer for each worker, which writes it alone: `rb.extend(batch, buffer=worker)`.

        Samples hold rows of every worker. Workers in other processes write buffers that are made with `shared=True`,
        each by its `rb.writer(worker)`.
        """
        members = [make() for _ in range(arguments.count("workers", workers))]
        return cls(*members, batch_size=batch_size, **{"sample_from_all": True, **options})

    @property
    def layout(self) -> str:
        """How samples of members are joined; where it was not given, the samplers that they have now say it."""
        return self._layout or ("cat" if any(buffer.sampler.ragged for buffer in self.buffers) else "stack")

    # ---- members -----------------------------------------------------------------------------------------------
    def __getitem__(self, member: int | slice) -> Any:
        """One of the buffers, or an ensemble of some of them that is sampled like this one, without its transform."""
        if isinstance(member, slice):
            chosen = self.buffers[member]
            options: dict[str, Any] = {"sample_from_all": True}
            if not self.sample_from_all:
                drawn = None if self.drawn == len(self.buffers) else self.drawn
                options = {"p": self._chances[member], "num_buffer_sampled": drawn}
            return ReplayBufferEnsemble(*chosen, batch_size=self.batch_size, layout=self._layout, **options)
        if (
            isinstance(member, bool)
            or not isinstance(member, int)
            or not -len(self.buffers) <= member < len(self.buffers)
        ):
            raise ArgumentError("no such member", why=f"got {member!r}, there are {len(self.buffers)}")
        return self.buffers[member]

    def __len__(self) -> int:
        """Rows of all members."""
        return sum(len(buffer) for buffer in self.buffers)

    def extend(self, batch: TensorDictBase, *, buffer: int | None = None) -> Tensor:
        """Store a batch in one of the members; where its rows lie there."""
        return self[self._named(buffer)].extend(batch)

    def add(self, step: TensorDictBase, *, buffer: int | None = None) -> int | Tensor:
        """Store one step in one of the members."""
        return self[self._named(buffer)].add(step)

    def writer(self, member: int) -> RegionWriter:
        """The end of a shared member that another process writes, see `ReplayBuffer.writer`."""
        return self[member].writer()

    def _named(self, buffer: int | None) -> int:
        if buffer is None:
            raise ArgumentError(
                "an ensemble does not know which member a batch belongs to",
                fix="Say it: rb.extend(batch, buffer=worker), or extend the member: rb[worker].extend(batch).",
            )
        return buffer

    def empty(self, *, fields: bool = False) -> None:
        """Forget all rows of all members."""
        with self._stopped():
            for buffer in self.buffers:
                buffer.empty(fields=fields)

    # ---- samples -----------------------------------------------------------------------------------------------
    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """A new batch.

        Parameters
        ----------
        batch_size : int, optional
            Of this sample; the ensemble's by default.
        return_info : bool
            Also give a dict with the `index` of its rows and the `buffer_ids` of the members they are of.

        Returns
        -------
        TensorDict ``[members, rows]`` or ``[rows]``
            From `TensorDictReplayBuffer`s, ``("index", "buffer_ids")`` and ``("index", "index")`` say where rows lie.

        Raises
        ------
        ArgumentError
            A member that was drawn is empty, no batch size is known, or it cannot be divided.
        """
        drawn = self._next(batch_size)
        return (drawn.batch, drawn.info) if return_info else drawn.batch

    def __iter__(self) -> Iterator[Any]:
        """Samples until a member's epoch ends, which all begin here; without end where all draw with replacement."""
        with self._stopped():
            for buffer in self.buffers:
                buffer.restart()
        last = False
        while not last:
            sampled = self._next(None)
            last = sampled.last
            yield sampled.batch

    def _next(self, batch_size: int | None) -> Sampled:
        size = self.batch_size if batch_size is None else arguments.count("batch_size", batch_size)
        if size is None:
            raise ArgumentError("the ensemble was given no batch size", fix="Use ReplayBufferEnsemble(batch_size=...).")
        if size % self.drawn:
            raise ArgumentError(
                "a batch is divided evenly among the buffers that are drawn", why=f"{size} rows, {self.drawn} buffers",
                fix=f"Use batch_size={-(-size // self.drawn) * self.drawn}.",
            )  # fmt: skip
        return self._draw(size) if self._ahead is None else self._ahead.next(size)

    def _draw(self, size: int) -> Sampled:
        with self._lock:
            random = self.random.state.copy()
            members: Any = range(len(self.buffers))
            if not self.sample_from_all:
                members = np.searchsorted(self._below, self.random.random(self.drawn), side="right")
        self._transforms.need_order(*(buffer.sampler for buffer in self.buffers))
        drawn: list[tuple[int, Sampled]] = []
        try:
            for member in map(int, members):
                drawn.append((member, self._part(member, size // self.drawn)))
            batch, info = self._joined(drawn)
            batch = self._transforms.read(batch)
        except BaseException:
            self._take_back(random, drawn)
            raise
        last = any(part.last for _, part in drawn)
        if self._ahead is None:
            return Sampled(batch, info, last)
        again = [(i, part._replace(batch=None, info={})) for i, part in drawn]
        return Sampled(batch, info, last, (random, again))

    def _joined(self, drawn: Sequence[tuple[int, Sampled]]) -> tuple[Any, dict[str, Tensor]]:
        """Return the samples of members as one, and what is known beside it."""
        parts = [self._with_member(member, part) for member, part in drawn]
        index = [part.info[INDEX] for _, part in drawn]
        ids = [torch.full_like(rows, member) for rows, (member, _) in zip(index, drawn, strict=True)]
        join: Callable[[list[Any]], Any] = torch.stack if self.layout == "stack" else torch.cat
        if join is torch.stack and len({len(rows) for rows in index}) > 1:
            raise ArgumentError(
                "samples of different sizes cannot be stacked", where="layout",
                why=f"members gave {', '.join(str(len(rows)) for rows in index)} rows",
                fix='Use layout="cat", or samplers with drop_last=True or strict_length=True.',
            )  # fmt: skip
        if any(isinstance(part, list | LazyStackedTensorDict) for part in parts):  # objects, not alike
            join = torch.cat
            items = [item for part in parts for item in (part if isinstance(part, list) else part.unbind(0))]
            batch: Any = collate(items)
        else:
            keys = {tuple(sorted(part.keys())) for part in parts if isinstance(part, TensorDictBase)}
            if len(keys) > 1:
                raise ArgumentError(
                    "members of an ensemble give samples of other keys",
                    why="; ".join(", ".join(names) for names in sorted(keys)),
                    fix="Store the same keys in all of them, and draw from all with samplers of one kind.",
                )
            batch = join(parts)
        return batch, {INDEX: join(index), BUFFER_IDS: join(ids)}

    def _take_back(self, random: np.ndarray, drawn: Sequence[tuple[int, Sampled]]) -> None:
        """Take back what was drawn last, when the choice of members stood at `random`."""
        for member, part in reversed(drawn):
            self.buffers[member].stream.take_back(part)
        with self._lock:
            self.random.state[:] = random

    def _part(self, member: int, size: int) -> Sampled:
        """Return a sample of a member."""
        buffer = self.buffers[member]
        if not len(buffer):
            raise ArgumentError(f"buffer {member} of the ensemble is empty", fix="Extend every member before sampling.")
        return buffer.drawn(size, ahead=self._ahead is None)

    def _with_member(self, member: int, part: Sampled) -> Any:
        """Return a sample of a member that says which one it is of."""
        batch = part.batch
        if part.drawn:  # a buffer's own `sample` may keep what it gave
            batch = batch.copy()
        if isinstance(self.buffers[member], TensorDictReplayBuffer) and isinstance(batch, TensorDictBase):
            for each in batch.tensordicts if isinstance(batch, LazyStackedTensorDict) else [batch]:
                index = each.get(INDEX)
                places = {BUFFER_IDS: torch.full_like(index, member), INDEX: index}
                each.set(INDEX, TensorDict(places, batch_size=each.batch_size))
        return batch

    def append_transform(self, transform: Callable[[Any], Any]) -> ReplayBufferEnsemble:
        """Add a transform of whole samples; returns the ensemble."""
        with self._stopped():
            self._transforms.append(transform)
        return self

    def set_seed(self, seed: int) -> None:
        """Start all random streams anew, each from a seed of its own."""
        with self._stopped():
            self.random.seed(seed)
            for offset, buffer in enumerate(self.buffers, 1):
                buffer.set_seed(seed + offset)

    def _stopped(self) -> AbstractContextManager[None]:
        """Stop inside: nothing is ready and nobody makes any."""
        return nullcontext() if self._ahead is None else self._ahead.stopped()

    # ---- priorities --------------------------------------------------------------------------------------------
    def update_tensordict_priority(self, sample: TensorDictBase) -> None:
        """Give the rows of a sample the priorities that it now holds, each in its own buffer.

        Raises
        ------
        MissingKeyError
            It holds no priorities, or does not say where its rows lie.
        """
        index = sample.get((INDEX, INDEX), None)
        if index is None:
            raise MissingKeyError(
                "priorities cannot be updated without (index, index)",
                fix="Make the ensemble of TensorDictReplayBuffers.",
            )
        ids, learned = sample.get((INDEX, BUFFER_IDS)).reshape(-1), learned_from(sample)
        found: list[tuple[ReplayBuffer, Tensor, Tensor]] = []
        for member in ids.unique().tolist():
            buffer = self.buffers[member]
            key = buffer.priority_key  # type: ignore[attr-defined]
            priority = sample.get(key, None)
            if priority is None:
                raise MissingKeyError(f"priorities cannot be updated without {show(key)}", why="the loss writes it")
            mine = ids == member if learned is None else (ids == member) & learned.reshape(-1)
            priority = priority.reshape(index.numel(), *priority.shape[index.ndim :])
            buffer.sampler.check_priority(priority[mine])
            found.append((buffer, index.reshape(-1)[mine], priority[mine]))
        for buffer, rows, priorities in found:  # all of them, or none
            buffer.update_priority(rows, priorities)

    # ---- checkpoints -------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Rows and all that decides later samples; samples that were made ahead are made anew."""
        with self._stopped():
            return {
                "random": self.random.state_dict(),
                "transforms": self._transforms.state_dict(),
                "buffers": [buffer.state_dict() for buffer in self.buffers],
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over `state_dict`'s answer, of an ensemble that was made alike."""
        if not {"random", "transforms", "buffers"} <= state.keys():
            raise ArgumentError(
                "this is no state of an ensemble", why=f"it holds {', '.join(map(str, state)) or 'nothing'}"
            )
        if len(state["buffers"]) != len(self.buffers):
            raise ArgumentError(
                "this state is of another ensemble", why=f"expected {len(self.buffers)}, got {len(state['buffers'])}"
            )
        with self._stopped():
            for buffer, saved in zip(self.buffers, state["buffers"], strict=True):
                buffer.need_fit(saved)  # all of them before the first one changes
            self._transforms.load_state_dict(state["transforms"])
            self.random.load_state_dict(state["random"])
            for buffer, saved in zip(self.buffers, state["buffers"], strict=True):
                buffer.load_state_dict(saved)

    # ---- the end -----------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Close every member; see `ReplayBuffer.close`."""
        if self._ahead is not None:
            self._ahead.close()
        for buffer in self.buffers:
            buffer.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise no_copy("an ensemble of buffers")

    def __copy__(self) -> Any:
        return shallow(self)

    def __enter__(self) -> ReplayBufferEnsemble:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ReplayBufferEnsemble({', '.join(map(repr, self.buffers))}, batch_size={self.batch_size})"


def _checked(p: Sequence[float] | Tensor | None, count: int) -> np.ndarray:
    try:
        chances = np.ones(count) if p is None else np.array(p, np.float64)
    except (TypeError, ValueError):
        chances = np.empty(0)
    if chances.shape != (count,) or not (chances >= 0).all() or not 0 < chances.sum() < np.inf:
        raise ArgumentError(
            "p has a chance for every buffer, from 0 on", where="p",
            why=f"got {p if p is None or isinstance(p, str) else list(p)} for {count}",
        )  # fmt: skip
    return chances
