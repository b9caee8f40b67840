"""Transforms one after the other, and which of them run inside the collector's loop, on which rows.

A transform is worth a call per step only if something in the loop (the policy, the env, a later transform that runs
there) uses what it writes; otherwise one vectorised pass after the loop gives the same bits for almost nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from tensordict import TensorDictBase
from torch import nn

from rlcli.errors import ArgumentError
from rlcli.keys import DONE, NEXT, RAW, TERMINATED, TRUNCATED, Key, as_tuple, show
from rlcli.specs.composite import returned_by
from rlcli.specs.field import Field, Fields
from rlcli.transforms.base import RowOp, Rows, Transform, planned

FLAGS = {DONE, TERMINATED, TRUNCATED}  # always final when a batch pass reads them


def by_name(transforms: Iterable[Transform]) -> dict[str, Transform]:
    """Transforms under the names that their states are saved by: the class, and a number from its second one on."""
    named: dict[str, Transform] = {}
    counts: Counter[str] = Counter()
    for transform in transforms:
        kind = type(transform).__name__
        counts[kind] += 1
        named[kind if counts[kind] == 1 else f"{kind} {counts[kind]}"] = transform
    return named


def _one_by_one(name: str, order: Callable[[list[Any]], Iterable[Any]] = iter) -> Any:
    """Return a method that hands its last argument to that of each transform, and one's result to the next."""

    def method(self: Compose, *given: Any) -> Any:
        *others, value = given
        for transform in order(list(self)):
            out = getattr(transform, name)(*others, value)
            value = returned_by(transform, name, out) if isinstance(value, TensorDictBase) else out
        return value

    return method


class Compose(Transform):
    """Apply `transforms` in order. `inv` runs backwards: what left last comes back first.

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
        for i, part in enumerate(parts_of(transform), slice(index, None).indices(len(self))[0]):
            self.transforms.insert(i, part)
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

    def promoted(self, tensordict, following):
        for transform in self:
            transform.promoted(tensordict, following)

    def bind_buffer(self, ring):
        for transform in self:
            transform.bind_buffer(ring)

    def sampled(self, tensordict, rows):
        for transform in self:
            tensordict = transform.sampled(tensordict, rows)
        return tensordict

    _step, _reset = _one_by_one("_step"), _one_by_one("_reset")
    forward, inv = _one_by_one("__call__"), _one_by_one("inv", reversed)
    transform_fake_tensordict = _one_by_one("transform_fake_tensordict")
    transform_observation_spec = _one_by_one("transform_observation_spec")
    transform_reward_spec = _one_by_one("transform_reward_spec")
    transform_state_spec = _one_by_one("transform_state_spec")
    transform_action_spec = _one_by_one("transform_action_spec")
    transform_done_spec = _one_by_one("transform_done_spec")


Compose.stepping = dir(Compose)  # of no other moment either: one that does more than its parts is no list of them


def parts_of(transform: Transform) -> list[Transform]:
    """Return a `Compose`'s transforms; itself, of any other transform or where user code overrides its methods."""
    if not isinstance(transform, Transform):
        raise ArgumentError("this is no transform of an env", why=f"got {transform!r}")
    if not isinstance(transform, Compose):
        return [transform]
    return [transform] if transform.own_methods else list(transform)


# ---- in the loop, or after it ----------------------------------------------------------------------------------------
@dataclass
class Faces:
    """The plan that `choose_faces` made."""

    inside: list[Transform]  # run in the loop, in this order
    after: list[Transform]  # their `batch_pass` is called after the loop, in this order, on the final done flags
    # every key that needs T + 1 rows: what the env writes, what those inside add, and, as `("_raw", key)`, what a key
    # was before one of them changed its shape or dtype; carried to the next batch, a raw key has no column
    rows: Fields
    columns: Fields  # root keys that those of `after` add as whole columns
    env_keys: dict[Any, Any]  # where the env writes each of its keys: `key` itself or `("_raw", *key)`
    needs: set[Any]  # what those inside read; with `("next", "reward")` among them the loop must fill reward rows
    _views: list[dict[Any, Any]]

    def bind(self, rows: Rows, n: int) -> list[RowOp]:
        """The row ops on one batch buffer, in order; see `Transform.bind` for `rows` and `n`."""
        ops = []
        for transform, names in zip(self.inside, self._views, strict=True):
            beside = {key: row for key, row in rows.items() if as_tuple(key)[0] != RAW}
            view = beside | {seen: rows[name] for seen, name in names.items()}
            op = transform.bind(view, n)
            if op is not None:  # else it does nothing to steps
                ops.append(op)
        return ops


def choose_faces(
    transforms: Transform | Iterable[Transform], schema: Mapping[Key, Field], live: Iterable[Key]
) -> Faces:
    """Sort transforms, in order, into those that run in the loop and those that run after it.

    `schema`: one env's observation keys, and `("next", "reward")`; `live`: what policy and env read in the loop.
    """
    transforms = list(Compose(transforms) if isinstance(transforms, Transform) else transforms)
    schema = {key: Field(*pair) for key, pair in schema.items()}
    schemas = list(accumulate(transforms, lambda now, transform: now | planned(transform, now), initial=schema))
    read: set[Any] = set(live)
    written: set[Any] = set()
    needs: set[Any] = set()
    inside: list[Transform] = []
    after: list[Transform] = []
    for transform, before in zip(reversed(transforms), schemas[-2::-1], strict=True):
        reads, writes = set(transform.reads(before)) - FLAGS, set(transform.writes(before))
        # A pass after the loop also sees what later transforms in the loop made of a key, so it must not be
        # one that reads or writes such a key itself.
        needed = writes & read or (reads | writes) & written
        if transform.ends_episodes or needed or not transform.has_batch_pass:
            if transform.batch_only:
                keys = ", ".join(sorted(map(show, needed)))
                raise ArgumentError(
                    f"{type(transform).__name__} works on whole batches, but {keys} is used while collecting",
                    fix="Put the transform that reads it before this one, or let the policy not read it.",
                )
            inside.append(transform)
            read |= reads
            needs |= reads
            written |= writes
        else:
            after.append(transform)
    rows = {key: kind for key, kind in schema.items() if as_tuple(key)[0] != NEXT}
    plan = Faces(inside[::-1], after[::-1], rows, {}, {key: key for key in rows}, needs, [])
    if inside:
        _name_versions(plan, schema)
    now = {**schema, **{key: kind for key, kind in plan.rows.items() if as_tuple(key)[0] != RAW}}
    for transform in plan.after:
        plan.columns.update(planned(transform, {**now, **plan.columns}))
    return plan


def _name_versions(plan: Faces, schema: Mapping[Key, Field]) -> None:
    """Name the rows of every version of a key: `("_raw", *key)`, `("_raw", *key, "1")`, ..., `key`, in words."""
    versions: dict[Any, list[Field]] = {key: [kind] for key, kind in plan.rows.items()}
    seen: list[dict[Any, int]] = []  # for each transform, the version of each key after it
    changed: list[set[Any]] = []
    recalled: set[Any] = set()  # keys whose newest version must not be written again
    for transform in plan.inside:
        now = {**schema, **{key: kinds[-1] for key, kinds in versions.items()}}
        new = planned(transform, now)
        new |= {key: now[key] for key in transform.writes(now) if key in recalled and key not in new}
        changed.append({key for key in new if key in versions})
        for key, kind in new.items():
            versions.setdefault(key, []).append(kind)
        seen.append({key: len(kinds) - 1 for key, kinds in versions.items()})
        recalled = recalled - set(new) | set(transform.recalls())

    def name(key: Any, version: int) -> Any:
        if version == len(versions[key]) - 1:
            return key
        return (RAW, *as_tuple(key), str(version)) if version else (RAW, *as_tuple(key))

    for after_it, keys in zip(seen, changed, strict=True):
        view = {key: name(key, version) for key, version in after_it.items()}
        view |= {(RAW, key): name(key, after_it[key] - 1) for key in keys}
        plan._views.append(view)
    plan.env_keys = {key: name(key, 0) for key in schema if key in versions}
    plan.rows = {name(key, i): kind for key, kinds in versions.items() for i, kind in enumerate(kinds)}
