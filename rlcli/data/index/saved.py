"""Whether the arrays of a saved index lead where there is something: compiled passes follow them without asking."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlcli.data.typed_tensors import between, tensor
from rlcli.kernels.index import layout
from rlcli.typed import MOST, Misfit, record

_STATE = record(
    scalars=tensor(torch.int64, layout.SCALARS),
    lanes=tensor(torch.int64, 2, None),
    runs=tensor(torch.int64, 5, None),
    trajs=tensor(torch.int64, 5, None),
)


def check(state: Any, lanes: int, slots: int | None = None) -> None:
    """Refuse a state that is none of an index of so many lanes.

    Parameters
    ----------
    slots : int, optional
        Of the side pool.

    Raises
    ------
    Misfit
        See the module.
    """
    _STATE(state)
    scalars, ends, runs, trajs = (state[name].numpy() for name in ("scalars", "lanes", "runs", "trajs"))
    between(state["scalars"], -1, MOST, "scalars")
    high, cursor, used = (int(scalars[at]) for at in (layout.TRAJ_HIGH, layout.CURSOR, layout.SLOT_HIGH))
    if scalars[layout.STEPS] < 1 or cursor < 0 or high != trajs.shape[1] or scalars[layout.SLOT_FREE]:
        raise Misfit(
            f"cursor {cursor}, {scalars[layout.STEPS]} steps, {high} of {trajs.shape[1]} trajectories", "index"
        )
    if slots is not None and used != slots:
        raise Misfit(f"{used} slots are in use, and there are {slots}")
    between(state["lanes"], 0, MOST, "lanes")
    sizes = ends[layout.TAIL] - ends[layout.HEAD]
    if ends.shape[1] != lanes or (sizes < 0).any() or sizes.sum() != runs.shape[1] or (sizes > 0).any() != (cursor > 0):
        raise Misfit(f"{runs.shape[1]} runs in lanes {sizes.tolist()[:9]}, {lanes} lanes and cursor {cursor}", "lanes")
    between(state["runs"][layout.POS], 0, MOST, "runs")
    between(state["runs"][layout.TRAJ], 0, high - 1, "runs")
    between(state["runs"][layout.WHERE], layout.LINKED, used - 1, "runs")
    held = runs[layout.WHERE][runs[layout.WHERE] >= 0]
    if len(np.unique(held)) < len(held):
        raise Misfit("two runs have the same slot", "runs")
    base, taken = max(0, cursor - int(scalars[layout.STEPS])), 0
    for lane, size in enumerate(sizes.tolist()):
        _check_lane(runs[:, taken : taken + size], int(ends[layout.HEAD, lane]), base, cursor)
        taken += size
    _check_trajectories(trajs, ends, scalars)


def _check_lane(runs: np.ndarray, head: int, base: int, cursor: int) -> None:
    """Runs ascend from the oldest live step to the newest, and each goes on in a later one or nowhere."""
    if cursor == 0:
        return
    last, following = runs[layout.END], runs[layout.NXT]
    if not len(last) or last[0] < base or last[-1] != cursor - 1 or (np.diff(last) <= 0).any():
        raise Misfit(f"runs end at {last[:9].tolist()}, and steps {base} to {cursor} are live", "runs")
    numbers = np.arange(head, head + len(last))
    if not ((following == -1) | ((following > numbers) & (following <= numbers[-1]))).all():
        raise Misfit("a run goes on in one that is not after it", "runs")


def _check_trajectories(trajs: np.ndarray, ends: np.ndarray, scalars: np.ndarray) -> None:
    """Each begins and ends in a run of its lane; the freed ones are one chain."""
    state, lane = trajs[layout.STATE], trajs[layout.LANE]
    live = state != layout.FREE
    if ((state < layout.FREE) | (state > layout.PARKED)).any() or live.sum() != scalars[layout.TRAJ_LIVE]:
        raise Misfit(f"{live.sum()} are live, {scalars[layout.TRAJ_LIVE]} were counted", "trajs")
    if (lane[live] < 0).any() or (lane[live] >= ends.shape[1]).any():
        raise Misfit("one is in no lane", "trajs")
    low, high = ends[layout.HEAD, lane[live]], ends[layout.TAIL, lane[live]]
    for at in (layout.FIRST, layout.LAST):
        if ((trajs[at, live] < low) | (trajs[at, live] >= high)).any():
            raise Misfit("one begins or ends in a run that is not there", "trajs")
    free, seen = int(scalars[layout.TRAJ_FREE]), 0
    while free >= 0:
        if free >= len(state) or live[free] or seen >= len(state):
            raise Misfit("freed ones are no chain", "trajs")
        free, seen = int(trajs[layout.FIRST, free]), seen + 1
    if seen != len(state) - live.sum():
        raise Misfit(f"{seen} of {len(state) - live.sum()} freed ones are in the chain", "trajs")
