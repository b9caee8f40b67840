"""`storage.init_from`: rows that an off-policy run begins with, out of a collection, a dump or another run's buffer.

They are copied before the first frame, compared with what the run itself will store, and counted apart from the frames
it collects. From then on they are rows of its buffer like others: its checkpoints hold them, and the source is needed
no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from rlcli.build.collector import differences
from rlcli.collectors.schema import row_specs
from rlcli.config.choices import collect, learn
from rlcli.config.option import as_choice
from rlcli.config.schemas import Config
from rlcli.data import ReplayBuffer, TensorDictReplayBuffer, open_buffer
from rlcli.data.fields import columns_of
from rlcli.data.next_obs.modes import KEEPS
from rlcli.data.stored import Place, copy_rows, find, holds_differences
from rlcli.envs import EnvBase
from rlcli.errors import ConfigError
from rlcli.jobs.init_policy import InitRows
from rlcli.keys import Key, show, under_next
from rlcli.specs.field import CODED, NONE, Field
from rlcli.transforms import NextObservationDelta

# of an env, what decides observations and rewards; statistics that run along are never the same
SAME = ("kwargs", "frame_stack", "reward_scale", "atari", "wrappers", "transforms")
RUNNING = ("normalize_observation", "normalize_reward")


def copy_init_rows(cfg: Config, buffer: ReplayBuffer, collector: Any, env: EnvBase) -> InitRows:
    """Copy the newest rows that fit into a run's empty buffer."""
    path = Path(str(cfg.storage.init_from))
    place = find(path)
    other = [*_other_env(cfg, place)]
    _refuse(path, [*(other or _other_specs(env, place)), *_unknown_successors(place)])
    source = open_buffer(path)
    try:
        wanted = collector.rows().stored("full")
        _refuse(path, _other_keys(wanted, source))
        _refuse(path, _other_lanes(cfg, source))
        rounded = holds_differences(source.ring)
        coder = NextObservationDelta(**differences(cfg))

        def read(rows: np.ndarray) -> TensorDictBase:
            batch = source[torch.from_numpy(rows)].select(*wanted)
            if rounded:
                _follow(source, rows, batch)
            return coder.compress(batch) if KEEPS[cfg.memory.next_obs] == CODED else batch

        taken = copy_rows(source, buffer, read)
    finally:
        source.close()
    buffer.ring.index.cut()  # the run's own episodes begin anew
    return InitRows(str(path), taken, place.rows)


def _follow(source: TensorDictReplayBuffer, rows: np.ndarray, batch: TensorDictBase) -> None:
    """Next observations that were rounded, where the row that follows has the true one."""
    after = source.ring.index.successors(rows)
    known = np.flatnonzero(after >= 0)
    fields = source.ring.fields
    keys = [key for key in batch.keys(True, True) if under_next(key) in batch.keys(True, True) and key in fields]
    for key, value in source.ring.columns(after[known], keys).items():
        batch.get(under_next(key))[torch.from_numpy(known)] = value


def count_init_rows(cfg: Any) -> int:
    """Count the rows that a run will begin with; nothing of them is read."""
    storage = getattr(cfg, "storage", None)
    if storage is None or storage.init_from is None:
        return 0
    return min(find(storage.init_from).rows, storage.max_size)


def _refuse(path: Path, differences: list[str]) -> None:
    if differences:
        raise ConfigError(
            "the run cannot begin with these rows", where=f"storage.init_from={path}", why="; ".join(differences),
            fix="Make both alike, or leave out storage.init_from.",
        )  # fmt: skip


# ---- what must be the same -----------------------------------------------------------------------------------------
def _other_env(cfg: Config, place: Place) -> Iterator[str]:
    theirs = place.about.get("env")
    if theirs is not None and theirs != cfg.env.id:
        yield f"they are of env.id={theirs}, this run is of env.id={cfg.env.id}"
        return
    env = (place.about.get("config") or {}).get("env", {})
    default = collect.AtariOptions()
    for name in SAME:
        mine = getattr(cfg.env, name, default.atari)
        mine = vars(mine) if name == "atari" else mine
        other = vars(default.atari) | env.get(name, {}) if name == "atari" else env.get(name, getattr(default, name))
        if env and mine != other:
            yield f"they were made with env.{name}={other}, here it is {mine}"
    for name in RUNNING:
        if getattr(cfg.env, name) or env.get(name):
            yield f"env.{name} scales by statistics of one run, and rows of another were scaled otherwise or not at all"


def _other_specs(env: EnvBase, place: Place) -> Iterator[str]:
    mine = row_specs(env)
    for key, theirs in place.about.get("specs", {}).items():
        if key in mine and mine[key] != theirs:
            yield f"{key} is {theirs} there, {mine[key]} here"


def _unknown_successors(place: Place) -> Iterator[str]:
    if KEEPS.get(place.about.get("next_obs", "")) == NONE:
        yield (
            "they were collected with memory=compact, which keeps no next observation where an episode ends, and this "
            "loss reads every row's: collect with memory=exact"
        )


def _other_keys(wanted: dict[Key, Field], source: TensorDictReplayBuffer) -> list[str]:
    found = {key: Field.of(column) for key, column in columns_of(source[[0]]).items()}
    missing = [show(key) for key in wanted if key not in found]
    differences = [f"they lack {', '.join(missing)}, and hold {', '.join(map(show, found))}"] if missing else []
    for key, field in wanted.items():
        if key in found and found[key] != field:
            differences.append(f"{show(key)} is {found[key]} a row there, {field} here")
    return differences


def _other_lanes(cfg: Config, source: TensorDictReplayBuffer) -> list[str]:
    ndim = as_choice(learn.TensorOptions, cfg.storage).ndim
    if ndim == 1 or source.ring.lanes == cfg.env.num:
        return []
    lanes = (
        f"{source.ring.lanes} envs side by side" if source.storage.ndim > 1 else "one row of a flat storage at a time"
    )
    return [f"they lie {lanes}, and storage.ndim={ndim} wants {cfg.env.num} (storage.ndim=1 takes any)"]
