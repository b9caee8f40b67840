"""Transforms one after the other. `inv` runs backwards: what left last comes back first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import takewhile

from torch import nn

from rlcli.transforms.base import Transform, is_ours


def by_name(transforms: Iterable[Transform]) -> dict[str, Transform]:
    """Transforms under the names that their states are saved by: the class, and a number from its second one on."""
    found: dict[str, Transform] = {}
    counts: Counter[str] = Counter()
    for transform in transforms:
        kind = type(transform).__name__
        counts[kind] += 1
        found[kind if counts[kind] == 1 else f"{kind} {counts[kind]}"] = transform
    return found


class Compose(Transform):
    """Apply `transforms` in order.

    Parameters
    ----------
    *transforms : Transform
        A Compose among them is taken as its parts (see `parts_of`).
    """

    def __init__(self, *transforms: Transform) -> None:
        super().__init__()
        self.transforms = nn.ModuleList()
        for transform in transforms:
            self.append(transform)

    def append(self, transform: Transform) -> Compose:
        """Add one at the end; returns itself."""
        self.transforms.extend(parts_of(transform))
        return self

    def insert(self, index: int, transform: Transform) -> Compose:
        """Add one before position `index`; returns itself."""
        for place, part in enumerate(parts_of(transform), slice(index, None).indices(len(self))[0]):
            self.transforms.insert(place, part)
        return self

    def __iter__(self) -> Iterator[Transform]:
        return iter(self.transforms)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.transforms)

    def __getitem__(self, index: int) -> Transform:
        return self.transforms[index]  # type: ignore[return-value]

    @property
    def ends_episodes(self) -> bool:  # type: ignore[override]
        return any(transform.ends_episodes for transform in self)

    @property
    def outside_batches(self) -> bool:  # type: ignore[override]
        return any(transform.outside_batches for transform in self)

    @property
    def has_columns(self) -> bool:
        """It has none: its parts have. One that is not taken as its parts is stepped on tensordicts."""
        return False

    def forward(self, tensordict):
        for transform in self:
            tensordict = transform(tensordict)
        return tensordict

    def _step(self, tensordict, next_tensordict):
        for transform in self:
            next_tensordict = transform._step(tensordict, next_tensordict)
        return next_tensordict

    def _reset(self, tensordict, reset_tensordict):
        for transform in self:
            reset_tensordict = transform._reset(tensordict, reset_tensordict)
        return reset_tensordict

    def inv(self, tensordict):
        for transform in reversed(list(self)):
            tensordict = transform.inv(tensordict)
        return tensordict

    def promoted(self, tensordict, following):
        for transform in self:
            transform.promoted(tensordict, following)

    def transform_fake_tensordict(self, tensordict):
        for transform in self:
            tensordict = transform.transform_fake_tensordict(tensordict)
        return tensordict

    def bind_buffer(self, ring):
        for transform in self:
            transform.bind_buffer(ring)

    def sampled(self, tensordict, rows):
        for transform in self:
            tensordict = transform.sampled(tensordict, rows)
        return tensordict

    def transform_observation_spec(self, spec):
        for transform in self:
            spec = transform.transform_observation_spec(spec)
        return spec

    def transform_reward_spec(self, spec):
        for transform in self:
            spec = transform.transform_reward_spec(spec)
        return spec

    def transform_state_spec(self, spec):
        for transform in self:
            spec = transform.transform_state_spec(spec)
        return spec

    def transform_action_spec(self, spec):
        for transform in self:
            spec = transform.transform_action_spec(spec)
        return spec

    def transform_done_spec(self, spec):
        for transform in self:
            spec = transform.transform_done_spec(spec)
        return spec


_FREE = {"__init__", "__repr__", "extra_repr"}


def parts_of(transform: Transform) -> list[Transform]:
    """What a `Compose` is made of; itself, of any other transform and where the user's code overrides its methods."""
    if not isinstance(transform, Compose):
        return [transform]
    kinds = takewhile(lambda kind: not is_ours(kind), type(transform).__mro__)
    own = {name for part in (transform, *kinds) for name in vars(part)} - _FREE
    ours = [getattr(Compose, name, None) for name in own]
    return [transform] if any(callable(x) or isinstance(x, property) for x in ours) else list(transform)
