"""Options of a collector that contradict each other: refused before anything is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlcli.collectors.assemble import MODES
from rlcli.collectors.trajectories import CompleteTrajectories
from rlcli.errors import ArgumentError
from rlcli.keys import DONE, TRAJ_IDS, Key, show, unravel


def next_obs_mode(next_obs: str | None, compact_obs: bool, delta: bool = False) -> str:
    """How next observations are kept: `full` unless something else is asked for.

    Parameters
    ----------
    delta : bool
        Whether the env brings a `NextObservationDelta`.

    Raises
    ------
    ArgumentError
        An unknown mode, or two that contradict each other.
    """
    if delta:
        asked = "compact" if compact_obs else next_obs
        if asked not in (None, "delta"):
            raise ArgumentError(
                f"the env has a NextObservationDelta, and next_obs='{asked}' keeps next observations another way",
                fix="Leave out one of them.",
            )
        return "delta"
    if compact_obs and next_obs not in (None, "compact"):
        raise ArgumentError(f"compact_obs=True and next_obs='{next_obs}' contradict each other")
    mode = next_obs or ("compact" if compact_obs else "full")
    if mode not in MODES:
        raise ArgumentError(f"unknown next_obs '{mode}'", fix=f"Use one of {', '.join(MODES)}.")
    return mode


def check_split(split_trajs: bool, trajs_per_batch: int | None, track_traj_ids: bool, extend_buffer: bool) -> None:
    """Refuse `split_trajs` where it cannot be done."""
    if not split_trajs:
        return
    if trajs_per_batch is not None:
        raise ArgumentError("split_trajs and trajs_per_batch both cut trajectories", fix="Give one of them.")
    if not track_traj_ids:
        raise ArgumentError("split_trajs=True needs track_traj_ids=True")
    if not extend_buffer:
        raise ArgumentError(
            "extend_buffer=False adds steps, and split_trajs=True makes padded trajectories", fix="Give one of them."
        )


def whole_trajectories(
    per_batch: int | None,
    *,
    layout: str | None,
    deliver_leftovers: bool,
    keep_keys: Sequence[Key] | None,
    track_traj_ids: bool,
    cut_by_batch: bool,
    replay_buffer: Any,
) -> CompleteTrajectories | None:
    """What `trajs_per_batch` and the options beside it ask for; None where batches are delivered as they are.

    Parameters
    ----------
    per_batch : int, optional
    layout : str, optional
        "padded" by default, "cat" for a buffer.
    cut_by_batch : bool
        Whether every batch flags its last step truncated although its trajectories go on.

    Raises
    ------
    ArgumentError
        Naming what is missing or what contradicts it.
    """
    if per_batch is None:
        for name, given in (("traj_format", layout is not None), ("deliver_leftovers", deliver_leftovers)):
            if given:
                raise ArgumentError(f"{name} has no meaning without trajs_per_batch")
        return None
    if not track_traj_ids:
        raise ArgumentError("trajs_per_batch needs track_traj_ids=True", why="a reset from outside shows in the ids")
    missing = [show(key) for key in (DONE, TRAJ_IDS) if keep_keys is not None and key not in map(unravel, keep_keys)]
    if missing:
        raise ArgumentError(f"trajs_per_batch needs {' and '.join(missing)} among keep_keys")
    if cut_by_batch:
        raise ArgumentError(
            "set_truncated=True ends every trajectory with its batch, and trajs_per_batch asks for whole ones",
            fix="Give one of them, or reset_at_each_iter=True as well.",
        )
    if replay_buffer is not None and layout == "padded":
        raise ArgumentError("a replay buffer takes rows, not padding", fix="Leave out traj_format='padded'.")
    return CompleteTrajectories(per_batch, layout or ("padded" if replay_buffer is None else "cat"), deliver_leftovers)
