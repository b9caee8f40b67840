"""What a resumed run would do otherwise than the run that was saved, and whether that may be.

Two descriptions are compared key by key: the configuration and the surroundings (versions, devices, threads) that were
sealed with the last state, and those that are in force now. Nothing is built or loaded for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlcli.config import registry
from rlcli.config.resolved import from_dict, to_dict
from rlcli.config.schemas import CollectConfig
from rlcli.errors import ConfigError
from rlcli.runs.folder import Run, note_resume
from rlcli.runs.provenance import decides_bits, surroundings
from rlcli.typed import held, text

# what may change without changing what the remaining frames would have been
HARMLESS = (
    "total_frames", "run", "console", "logger", "env.out_of_bounds", "env.step_timeout", "env.workers",
    "env.start_method",
)  # fmt: skip
AROUND = "with/"  # before the names of what is no setting: `with/torch` beside `optim.lr`

Pair = tuple[Any, Any]
_COUNT = text(r"\d{1,6}")


@dataclass(frozen=True)
class Changes:
    """What differs since a state was saved.

    Attributes
    ----------
    frames : int
        At which it was saved.
    harmless, breaking : dict
        Key -> (was, now).
    versions : dict
        What the run computes with now.
    overrides : list of str
        As they were typed.
    """

    frames: int
    harmless: dict[str, Pair]
    breaking: dict[str, Pair]
    versions: dict[str, str]
    overrides: list[str] = field(default_factory=list)

    def check(self, run: Run, *, force: bool) -> None:
        """Refuse what would make it another run, unless it is forced or was forced before.

        Raises
        ------
        ConfigError
            Every such difference is listed.
        """
        forced = [record.get("changed", {}) for record in self._since(run) if record.get("forced")]
        new = {key: pair for key, pair in self.breaking.items() if not _holds(forced, key, pair)}
        if force or not new:
            return
        raise ConfigError(
            f"{_spelled(new)} would make this another run",
            where=str(run.path),
            why=f"a resumed run is exact; only {_may_change()} may change",
            fix="Take the change back, add --force to make it all the same, or start a new run.",
        )

    def note(self, run: Run, cfg: CollectConfig, *, force: bool) -> Run:
        """Write the changes into the run folder, once; the run, read anew."""
        known = [record.get("changed", {}) for record in self._since(run)]
        all_of_them = {**self.breaking, **self.harmless}
        new = {key: list(pair) for key, pair in all_of_them.items() if not _holds(known, key, pair)}
        if not new:
            return run
        said = _spelled({key: (was, now) for key, (was, now) in new.items()})
        record = {"frames": self.frames, "overrides": self.overrides, "changed": new, "forced": force, "said": said}
        return note_resume(run, to_dict(cfg), record)

    def _since(self, run: Run) -> list[dict[str, Any]]:
        """What was noted after the state was saved: the run was killed before the next."""
        return [record for record in run.info.get("resumed", []) if record.get("frames", 0) >= self.frames]

    def lines(self) -> list[str]:
        """Lines for the terminal and the report."""
        lines = []
        if self.breaking:
            lines.append(f"forced: {_spelled(self.breaking)}; from here on this is another run than the one begun")
        if self.harmless:
            lines.append(f"changed since {self.frames:,} frames: {_spelled(self.harmless)}")
        return lines


def changes(
    run: Run,
    cfg: CollectConfig,
    *,
    frames: int,
    config: Mapping[str, Any],
    versions: Mapping[str, str],
    devices: Sequence[object],
    overrides: Sequence[str] = (),
) -> Changes:
    """Compare what was sealed with a state with what is in force.

    Parameters
    ----------
    run : Run
    cfg : CollectConfig
        In force now: config.json, and the overrides of this command.
    frames : int
        At which the state was saved.
    config, versions : mapping
        Sealed with it. No versions, no comparison of them.
    devices : sequence
        Where the run's stages would be now.
    """
    verb = str(run.info["verb"])
    before = dict(_flat(to_dict(from_dict(verb, config, [*_as_typed(config)], where="the saved state"))))
    after = dict(_flat(to_dict(cfg)))
    if versions:
        what = "what was sealed with a run's state is damaged"
        for name in ("threads", "cores"):
            held(_COUNT, versions.get(name), f"{run.path}, {name}", what=what)
    threads = _threads(cfg, versions) if versions else None
    now = surroundings(threads or 1, devices, registry.imported, versions)
    different = {
        key: (before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    }
    around = {
        AROUND + name: (versions[name], now.get(name)) for name in sorted(versions) if versions[name] != now.get(name)
    }
    if threads is not None and threads == int(versions["threads"]):
        different.pop("threads", None)  # spelled otherwise, and the same number
    breaking = {
        key: pair for key, pair in different.items() if not any(f"{key}.".startswith(f"{name}.") for name in HARMLESS)
    }
    breaking |= {key: pair for key, pair in around.items() if decides_bits(key.removeprefix(AROUND), *pair)}
    harmless = {key: pair for key, pair in {**different, **around}.items() if key not in breaking}
    return Changes(frames, harmless, breaking, now, list(overrides))


def _as_typed(config: Mapping[str, Any]) -> Iterator[str]:
    """An env id with a colon was allowed because it was typed; the seal says that it was."""
    env = config.get("env")
    if isinstance(env, Mapping) and ":" in str(env.get("id")):
        yield f"env.id={env['id']}"


def _threads(cfg: CollectConfig, versions: Mapping[str, str]) -> int:
    """Threads that `auto` would choose now, from what it chose then: one, or all cores."""
    if isinstance(cfg.threads, int):
        return cfg.threads
    then, cores = int(versions["threads"]), int(versions["cores"])
    return (os.cpu_count() or 1) if then == cores > 1 else then


def _holds(records: Iterable[Mapping[str, Any]], key: str, pair: Pair) -> bool:
    return any(record.get(key) == list(pair) for record in records)


def _may_change() -> str:
    names = [f"{name}.*" if name == "run" else name for name in HARMLESS]
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _spelled(pairs: Mapping[str, Pair], most: int = 12) -> str:
    said = [f"{key.removeprefix(AROUND)} {_value(key, was)} -> {_value(key, now)}" for key, (was, now) in pairs.items()]
    return ", ".join(said[:most]) + (f" and {len(said) - most} more" if len(said) > most else "")


def _value(key: str, value: Any) -> str:
    return str(value or "absent") if key.startswith(AROUND) else repr(value)


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
