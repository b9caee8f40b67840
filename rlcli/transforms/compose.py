"""Transforms one after the other. `inv` runs backwards: what left last comes back first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn

from rlcli.transforms.base import Transform


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
        A Compose among them is taken as its parts.
    """

    def __init__(self, *transforms: Transform) -> None:
        super().__init__()
        self.transforms = nn.ModuleList()
        for transform in transforms:
            self.append(transform)

    def append(self, transform: Transform) -> Compose:
        """Add one at the end; returns itself."""
        parts = transform if isinstance(transform, Compose) else [transform]
        self.transforms.extend(parts)
        return self

    def insert(self, index: int, transform: Transform) -> Compose:
        """Add one before position `index`; returns itself."""
        self.transforms.insert(index, transform)
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
