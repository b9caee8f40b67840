"""The plan of a run: the ledger it will show, what its process holds beside it, and what fits where.

Plain values, a policy's layers among them; `rlcli.build.plan` works them out and `view` prints them.
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
    """Hold the memory of one way to keep the next observation, in bytes."""

    name: str
    per_frame: float  # all keys together
    next_obs: float  # of `per_frame`, for next observations
    bytes: int  # of one batch
    buffer: int = 0  # of the full buffer, 0 without one
    note: str = ""  # why one would not want it here


@dataclass(frozen=True)
class MemoryFit:
    """Hold the bytes that a run needs of one memory: "RAM", "disk", "scratch disk" or "cuda:0"."""

    name: str
    need: int
    free: int
    total: int

    @property
    def fits(self) -> bool:
        return self.need <= self.free


@dataclass(frozen=True)
class Plan:
    """Hold the answer of `rlcli plan`, in bytes, of one batch of `frames` from `lanes` envs."""

    verb: str
    title: str
    env: str
    frames: int
    lanes: int
    total_frames: int
    next_obs: str
    entries: Sequence[LedgerEntry]  # every tensor that stays; those of the run are its ledger's, while no episode ends
    per_end: int  # each episode that ends inside a batch adds these
    out_of_step: int  # a batch may hold more once episodes have ended: kept states
    peaks: Sequence[Peak]
    process: dict[str, int]  # part -> bytes, measured in this process
    workers: int = 0  # processes that step the envs, and their fork server
    worker: int = 0  # of `workers`, each without its envs
    env_bytes: int = 0  # of one more env, without the rows collected from it
    modes: Sequence[Mode] = ()
    places: Sequence[MemoryFit] = ()
    advice: Sequence[str] = ()
    warnings: Sequence[str] = field(default=())
    networks: Sequence[NetworkLayer] = ()  # of the policy, layer by layer

    @property
    def own(self) -> int:
        """Return the bytes in RAM beyond the process after its imports, at the peak."""
        return self.total - self.process.get("after imports", 0)

    @property
    def total(self) -> int:
        """Return the bytes of the process in RAM at its peak."""
        return at_peak(self.process, self.entries, self.peaks)

    @property
    def fits(self) -> bool:
        return all(place.fits for place in self.places)

    def component(self, name: str) -> int:
        """Return the bytes of one component."""
        return sum(entry.bytes for entry in self.entries if entry.component == name)

    def as_dict(self) -> dict:
        """Return everything as JSON-ready values."""
        data = asdict(self) | {"entries": [entry.as_dict() for entry in self.entries]}
        data["places"] = [asdict(place) | {"fits": place.fits} for place in self.places]
        return data | {"own": self.own, "total": self.total, "fits": self.fits}


# ---- layers ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class NetworkLayer:
    """Describe one layer of a `network`, "actor" or "critic"."""

    network: str
    reads: str  # keys that a stage reads, at its first layer
    layer: str  # such as Linear(in_features=4, out_features=64, bias=True)
    parameters: int  # its own; 0 where it is `shared`
    shared: bool = False


def layers(policy: Any) -> list[NetworkLayer]:
    """Return the layers of an `ActorCritic`, actor first; none of a policy that has no networks."""
    layers: list[NetworkLayer] = []
    seen: set[int] = set()
    for name in ("actor", "critic"):
        net = getattr(policy, name, None)
        if net is not None:
            layers += _of(name, net, seen)
    return layers


def _of(name: str, net: nn.Module, seen: set[int]) -> Iterator[NetworkLayer]:
    reads = ""
    for module in net.modules():
        if isinstance(module, TensorDictModule):
            reads = ", ".join(show(unravel(key)) for key in module.in_keys)
        parameters = list(module.parameters(recurse=False))
        if not parameters and (isinstance(module, TensorDictModuleBase) or next(module.children(), None) is not None):
            continue
        shared = id(module) in seen
        seen.add(id(module))
        yield NetworkLayer(
            name,
            reads,
            f"{type(module).__name__}({module.extra_repr()})",
            0 if shared else sum(p.numel() for p in parameters),
            shared,
        )
        reads = ""
