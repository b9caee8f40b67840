"""What workers wrote, put together: one `Filled` of all their lanes, from which the parent makes a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlcli.collectors.batch import Finals
from rlcli.collectors.finish import Filled, Seconds
from rlcli.collectors.worker import Part
from rlcli.errors import ArgumentError
from rlcli.keys import DONE, Key, show
from rlcli.lanes.bounds import Worst, sentence


class Outside:
    """Observations outside their declared bounds, of all workers together, whichever processes they were.

    Parameters
    ----------
    figures : mapping, optional
        Of an earlier one, to go on from.
    """

    def __init__(self, figures: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._found = {key: dict(entry) for key, entry in (figures or {}).items()}
        self._fresh: dict[str, int] = {}

    def add(self, news: Mapping[str, Mapping[str, Any]]) -> None:
        """What one worker found since it was asked last, in the form of `figures`."""
        for key, entry in news.items():
            known = self._found.setdefault(key, {"observations": 0, "worst": entry["worst"]})
            known["observations"] += entry["observations"]
            known["worst"] = max(known["worst"], entry["worst"], key=lambda worst: worst["excess"])
            self._fresh[key] = self._fresh.get(key, 0) + entry["observations"]

    def news(self) -> list[tuple[str, str, int]]:
        """See `Bounds.news`."""
        fresh, self._fresh = self._fresh, {}
        return [(key, sentence(key, Worst(**self._found[key]["worst"])), count) for key, count in fresh.items()]

    def figures(self) -> dict[str, dict[str, Any]]:
        """See `Bounds.figures`."""
        return {key: dict(entry) for key, entry in self._found.items()}


def merged(parts: Sequence[Part], memory: Mapping[Key, np.ndarray]) -> Filled:
    """The rows of workers that took the same steps, as those of one collector of all their lanes.

    Parameters
    ----------
    parts : sequence of Part
        In the order of their lanes.
    memory : mapping
        Key -> array `[N, T, *]`: what all of them wrote to.

    Raises
    ------
    ArgumentError
        Their batches do not hold the same keys.
    """
    first = parts[0]
    _check_alike(parts)
    steps = first.steps
    columns = {}
    for key in first.keys:
        if any(key in part.columns for part in parts):
            columns[key] = np.concatenate([_column(part, memory, key, at) for part, at in _placed(parts)])
        else:
            whole = memory[key]
            columns[key] = whole if whole.shape[1] == steps else np.ascontiguousarray(whole[:, :steps])
    late = {key: torch.cat([part.late[key] for part in parts]) for key in first.late}
    carrier = {key: np.concatenate([part.carrier[key] for part in parts]) for key in first.carrier}
    lanes = sum(part.lanes for part in parts)
    raw = None if first.raw_reward is None else np.concatenate([p.raw_reward for p in parts])  # type: ignore[misc]
    done = columns.get(DONE) if first.done is None else np.concatenate([p.done for p in parts])  # type: ignore[misc]
    schema = dataclasses.replace(first.schema, lanes=lanes)
    return Filled(columns, late, carrier, _finals(parts), schema, (lanes, steps), raw, _seconds(parts), done)


def _placed(parts: Sequence[Part]) -> list[tuple[Part, int]]:
    """Each part with its first lane."""
    before = np.cumsum([0, *(part.lanes for part in parts)]).tolist()
    return list(zip(parts, before, strict=False))


def _column(part: Part, memory: Mapping[Key, np.ndarray], key: Key, at: int) -> np.ndarray:
    own = part.columns.get(key)
    return memory[key][at : at + part.lanes, : part.steps] if own is None else own


def _check_alike(parts: Sequence[Part]) -> None:
    first = {*parts[0].keys, *parts[0].late}
    for index, part in enumerate(parts):
        if differing := first ^ {*part.keys, *part.late}:
            raise ArgumentError(
                "the workers' batches do not hold the same keys", where=f"workers 0 and {index}",
                why=f"only one of them has {', '.join(sorted(map(show, differing)))}",
                fix="Give all workers envs and hooks of one kind.",
            )  # fmt: skip


def _finals(parts: Sequence[Part]) -> Finals:
    """In (t, lane) order, as one collector keeps them."""
    places = [(t, lane + at) for part, at in _placed(parts) for t, lane in part.places]
    order = sorted(range(len(places)), key=places.__getitem__)
    keys = next((part.finals.keys() for part in parts if part.places), ())
    values = {key: np.concatenate([part.finals[key] for part in parts if part.places])[order] for key in keys}
    return Finals.of([places[i] for i in order], values)


def _seconds(parts: Sequence[Part]) -> Seconds | None:
    """Of the worker that took longest."""
    timed = [part.seconds for part in parts if part.seconds is not None]
    return max(timed, key=lambda seconds: seconds.total, default=None)
