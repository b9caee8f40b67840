"""Batches that workers wrote: one `Filled` of all their rows, in memory that they share or that is made for it.

Where one took fewer steps than others, zeros follow its rows (as ids, -1), and its last row keeps its true successor:

```
worker 0   a0 a1 a2 a3    next  a1 a2 a3 a4        mask  1 1 1 1
worker 1   b0 b1 .  .           b1 b2 .  .               1 1 0 0
```
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rlcli.collectors.batch import Finals, Kept
from rlcli.collectors.finish import Filled, Seconds
from rlcli.collectors.workers.each import alike
from rlcli.collectors.workers.worker import WorkerBatch
from rlcli.keys import DONE, TRAJ_IDS, Key, show


def merged(parts: Sequence[WorkerBatch], memory: Mapping[Key, np.ndarray]) -> Filled:
    """Join the workers' batches (in the order of their envs) to one in `memory` `[N, T, *]`."""
    first = parts[0]
    alike([{*part.keys, *part.late} for part in parts], "the workers' batches do not hold the same keys",
          lambda *keys: f"only one of them has {', '.join(sorted(map(show, set.symmetric_difference(*keys))))}",
          "Give all workers envs and hooks of one kind.")  # fmt: skip
    steps = max(part.steps for part in parts)
    columns = {}
    for key in first.keys:
        if any(key in part.columns for part in parts):
            columns[key] = _stacked([_column(part, memory, key, at) for part, at in _placed(parts)], steps)
        else:
            whole = memory[key]
            # of a part a copy, in any case: it must not look like memory that nobody holds
            columns[key] = whole if whole.shape[1] == steps else whole[:, :steps].copy()
        for part, at in _placed(parts):
            columns[key][at : at + part.lanes, part.steps :] = -1 if key == TRAJ_IDS else 0
    late = {key: torch.cat([_longer(part.late[key], steps) for part in parts]) for key in first.late}
    carrier = {  # of a worker with fewer rows, `_finals` has it
        key: np.concatenate([part.carrier[key] * (part.steps == steps) for part in parts]) for key in first.carrier
    }
    lanes = sum(part.lanes for part in parts)
    raw = None if first.raw_reward is None else _stacked([p.raw_reward for p in parts], steps)  # type: ignore[misc]
    done = columns.get(DONE) if first.done is None else _stacked([p.done for p in parts], steps)  # type: ignore[misc]
    schema = dataclasses.replace(first.schema, lanes=lanes)
    return Filled(
        columns, late, carrier, _finals(parts, steps), schema, (lanes, steps), raw, _seconds(parts), done,
        states=_states(parts),
        ends=sorted(end._replace(lane=at + end.lane) for part, at in _placed(parts) for end in part.ends),
    )  # fmt: skip


def _states(parts: Sequence[WorkerBatch]) -> Kept:
    """Return the states that all of them kept, in (lane, t) order."""
    return {
        key: (
            np.concatenate([part.states[key][0] + (0, at) for part, at in _placed(parts)]),
            np.concatenate([part.states[key][1] for part in parts]),
        )
        for key in parts[0].states
    }


def _longer(x: torch.Tensor, steps: int) -> torch.Tensor:
    return x if x.shape[1] == steps else torch.cat([x, x.new_zeros(len(x), steps - x.shape[1], *x.shape[2:])], 1)


def _stacked(rows: Sequence[np.ndarray], steps: int) -> np.ndarray:
    """Return the arrays `[N, t, *]`, t <= steps, as one `[sum of N, steps, *]`; zeros where there is none."""
    if all(x.shape[1] == steps for x in rows):
        return np.concatenate(rows)
    stacked = np.zeros((sum(map(len, rows)), steps, *rows[0].shape[2:]), rows[0].dtype)
    at = 0
    for x in rows:
        stacked[at : at + len(x), : x.shape[1]] = x
        at += len(x)
    return stacked


def _placed(parts: Sequence[WorkerBatch]) -> list[tuple[WorkerBatch, int]]:
    """Pair each part with its first env's index."""
    before = np.cumsum([0, *(part.lanes for part in parts)]).tolist()
    return list(zip(parts, before, strict=False))


def _column(part: WorkerBatch, memory: Mapping[Key, np.ndarray], key: Key, at: int) -> np.ndarray:
    apart = part.columns.get(key)
    return memory[key][at : at + part.lanes, : part.steps] if apart is None else apart


def _finals(parts: Sequence[WorkerBatch], steps: int) -> Finals:
    """Return the final observations in (t, env) order, as one collector keeps them."""
    pairs = [(at, *_followed(part, steps)) for part, at in _placed(parts)]
    places = [(t, lane + at) for at, rows, _ in pairs for t, lane in rows]
    order = sorted(range(len(places)), key=places.__getitem__)
    of = [values for _, rows, values in pairs if rows]
    keys = of[0].keys() if of else ()
    values = {key: np.concatenate([each[key] for each in of])[order] for key in keys}
    return Finals([places[i] for i in order], values)


def _followed(part: WorkerBatch, steps: int) -> Finals:
    """Return the rows of a part that are not followed by their successors in a batch of so many steps, and those."""
    if part.steps == steps:
        return Finals(part.finals.places, {key: x for key, x in part.finals.values.items() if key in part.carrier})
    last, (places, finals) = part.steps - 1, part.finals
    ended = {lane for t, lane in places if t == last}
    cut = [lane for lane in range(part.lanes) if lane not in ended]
    ends = {key: [finals[key]] if places else [] for key in part.carrier}
    values = {key: np.concatenate([*ends[key], rows[cut]]) for key, rows in part.carrier.items()}
    return Finals([*places, *((last, lane) for lane in cut)], values)


def _seconds(parts: Sequence[WorkerBatch]) -> Seconds | None:
    timed = [part.seconds for part in parts if part.seconds is not None]
    return max(timed, key=lambda seconds: seconds.total, default=None)
