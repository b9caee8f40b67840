"""The plan of a run: the ledger it will show, what its process holds beside it, and what fits where.

Plain values, a policy's layers among them; `rlcli.jobs.plan` works them out and `view` prints them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn

from rlcli.keys import show, unravel
from rlcli.planning.forecast import Peak, at_peak
from rlcli.report.ledger import LedgerEntry


@dataclass(frozen=True)
class Mode:
    """The memory that one way to keep the next observation takes, in bytes.

    `per_frame`: of a frame, all keys together; `next_obs`: of them for next observations.
    `bytes`: of one batch; `buffer`: of the full buffer, 0 without one.
    `note`: why one would not want it here; "" where nothing speaks against it.
    """

    name: str
    per_frame: float
    next_obs: float
    bytes: int
    buffer: int = 0
    note: str = ""


@dataclass(frozen=True)
class MemoryFit:
    """Bytes that a run needs of one memory: "RAM", "disk", "scratch disk" or "cuda:0"."""

    name: str
    need: int
    free: int
    total: int

    @property
    def fits(self) -> bool:
        return self.need <= self.free


@dataclass(frozen=True)
class Plan:
    """The answer of `rlcli plan`: `frames` of one batch from `lanes` envs, next observations kept by `next_obs`.

    `entries`: every tensor that stays, by component; those of "rollout" and "params+optim" are the very bytes that the
    run's own ledger will show, as long as no episode has ended inside a batch. Of recurrent states that few rows keep a
    batch may hold a row fewer for each env, where batches are no multiple of the stride.
    `per_end`: bytes that each episode ending inside a batch adds: its next observation in `exact`, a recurrent state of
    which few rows are kept.
    `out_of_step`: bytes that a batch may hold more once episodes have ended: of recurrent states that few rows keep, as
    they are kept every so many steps of an episode.
    `process`: part -> bytes: "after imports" and what is loaded and made after that; measured in this process.
    `workers`: bytes of the processes that step the envs and of the one that they are forked from, their envs included;
    those of `process` apart. `worker`: of them, of each worker without its envs.
    `env_bytes`: of one more env, wherever it is stepped, without the rows that are collected from it.
    `networks`: what the policy is made of, layer by layer.
    """

    verb: str
    title: str
    env: str
    frames: int
    lanes: int
    total_frames: int
    next_obs: str
    entries: Sequence[LedgerEntry]
    per_end: int
    out_of_step: int
    peaks: Sequence[Peak]
    process: dict[str, int]
    workers: int = 0
    worker: int = 0
    env_bytes: int = 0
    modes: Sequence[Mode] = ()
    places: Sequence[MemoryFit] = ()
    advice: Sequence[str] = ()
    warnings: Sequence[str] = field(default=())
    networks: Sequence[NetworkLayer] = ()

    @property
    def own(self) -> int:
        """Bytes in RAM beyond the process after its imports, at the peak."""
        return self.total - self.process.get("after imports", 0)

    @property
    def total(self) -> int:
        """Bytes of the process in RAM at its peak."""
        return at_peak(self.process, self.entries, self.peaks)

    @property
    def fits(self) -> bool:
        return all(place.fits for place in self.places)

    def component(self, name: str) -> int:
        """Return the bytes of one component."""
        return sum(entry.bytes for entry in self.entries if entry.component == name)

    def as_dict(self) -> dict:
        """Everything as JSON-ready values."""
        data = asdict(self) | {"entries": [entry.as_dict() for entry in self.entries]}
        data["places"] = [asdict(place) | {"fits": place.fits} for place in self.places]
        return data | {"own": self.own, "total": self.total, "fits": self.fits}


# ---- layers ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class NetworkLayer:
    """One layer of a `network`, "actor" or "critic".

    `reads`: the keys that a stage reads, at its first layer; "" at the others.
    `layer`: its class with what it was made with: `Linear(in_features=4, out_features=64, bias=True)`.
    `parameters`: its own; 0 where it is `shared`, listed before: a trunk that actor and critic have in common.
    """

    network: str
    reads: str
    layer: str
    parameters: int
    shared: bool = False


def layers(policy: Any) -> list[NetworkLayer]:
    """Return the layers of an `ActorCritic`, actor first; none of a policy that has no networks."""
    found: list[NetworkLayer] = []
    seen: set[int] = set()
    for name in ("actor", "critic"):
        net = getattr(policy, name, None)
        if net is not None:
            found += _of(name, net, seen)
    return found


def _of(name: str, net: nn.Module, seen: set[int]) -> Iterator[NetworkLayer]:
    reads = ""
    for module in net.modules():
        if isinstance(module, TensorDictModule):
            reads = ", ".join(show(unravel(key)) for key in module.in_keys)
        own = list(module.parameters(recurse=False))
        if not own and (isinstance(module, TensorDictModuleBase) or next(module.children(), None) is not None):
            continue
        shared = id(module) in seen
        seen.add(id(module))
        yield NetworkLayer(
            name,
            reads,
            f"{type(module).__name__}({module.extra_repr()})",
            0 if shared else sum(p.numel() for p in own),
            shared,
        )
        reads = ""
