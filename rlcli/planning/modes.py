"""What each way to keep the next observation would take, and where the chosen one costs more than it saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rlcli.collectors.row_fields import RowSchema
from rlcli.config.schemas import CollectConfig
from rlcli.data.fields import Field
from rlcli.keys import Key, show
from rlcli.planning.plan import Mode
from rlcli.planning.tensors import buffer_bytes, planned_batch

MODES = ("full", "exact", "compact", "delta")
SMALL_SAVING = 0.05


def modes_of(
    cfg: CollectConfig, rows: RowSchema, estimates: Callable[[str], tuple[Mapping[Key, Field], bool]], given: int = 0
) -> list[Mode]:
    """The batch and the buffer, which begins with `given` rows, under every way to keep the next observation.

    Parameters
    ----------
    estimates : callable
        Mode -> what the value stage adds to a batch, and whether it keeps the index of next observations.
    """
    found = []
    for name in MODES:
        added, index = estimates(name)
        entries = planned_batch(rows, name, added=added, index=index)
        others = sum(field.width for field in {**rows.fields, **rows.copies, **added}.values()) * rows.frames
        if name == "compact":
            others -= sum(field.width for field in rows.copies.values()) * rows.frames
        whole, n = sum(entry.bytes for entry in entries), max(rows.frames, 1)
        found.append(Mode(name, whole / n, (whole - others) / n, whole, buffer_bytes(cfg, rows, name, given)))
    full = found[0]
    return [Mode(m.name, m.per_frame, m.next_obs, m.bytes, m.buffer, _against(rows, m, full)) for m in found]


def _against(rows: RowSchema, mode: Mode, full: Mode) -> str:
    """Why this mode is a bad choice for these rows."""
    if mode.name == "full" or not rows.successors:
        return ""
    if (mode.buffer or mode.bytes) >= (full.buffer or full.bytes):
        return "takes no less than full"
    whole = [key for key in rows.successors if key in rows.stored("delta")]
    if mode.name == "delta" and whole:
        return f"saves nothing on {', '.join(map(show, whole))}"
    saved = 1 - mode.per_frame / full.per_frame
    if mode.name == "compact" and saved < SMALL_SAVING:
        return f"saves {100 * saved:.0f} %: other keys dominate"
    return ""


def warnings_for(cfg: CollectConfig, rows: RowSchema, modes: Sequence[Mode]) -> list[str]:
    """Where the chosen mode, one of `modes`, costs more than it saves."""
    return list(_warnings(cfg, rows, modes))


def _warnings(cfg: CollectConfig, rows: RowSchema, modes: Sequence[Mode]) -> Iterator[str]:
    mode = cfg.memory.next_obs
    note = next(m.note for m in modes if m.name == mode)
    if note:
        yield f"memory={mode} {note}; use memory={'exact' if mode == 'delta' else 'full'}"
    width = sum(field.width for field in rows.successors.values())
    limit = _limit(cfg)
    if mode == "exact" and limit and not note:
        ends = 1 / rows.steps + 1 / limit
        if ends * (width + 4) + 4 >= width > 0:
            yield (
                f"memory=exact costs more than it saves here: episodes are at most {limit} steps long, so at least "
                f"{100 / limit:.0f} % of the rows keep their next observation apart; use memory=full"
            )
        elif 1 / limit > 0.25:
            share = f"{100 / limit:.0f} %"
            yield f"memory=exact keeps at least {share} of the next observations: episodes end within {limit} steps"
    if mode == "compact":
        yield "memory=compact approximates the values of rows whose successor is not kept; memory=exact does not"


def _limit(cfg: CollectConfig) -> int | None:
    """The longest an episode can be, where that is known."""
    limits = [cfg.env.max_episode_steps, cfg.collector.max_frames_per_traj]
    if not cfg.env.max_episode_steps and cfg.env.kind in ("gym", "mujoco"):
        from gymnasium.envs.registration import registry

        spec = registry.get(cfg.env.id)
        limits.append(None if spec is None else spec.max_episode_steps)
    known = [limit for limit in limits if limit]
    return min(known, default=None)
