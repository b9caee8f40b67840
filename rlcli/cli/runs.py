"""The run that a command names, checked before torch is loaded."""

from __future__ import annotations

from pathlib import Path

from rlcli.config.suggest import did_you_mean
from rlcli.errors import ConfigError


def run_folder(text: str | None, verb: str) -> str:
    """The folder of a run.

    Raises
    ------
    ConfigError
        If none was given or it is not there; names the nearest runs.
    """
    if text is None:
        raise ConfigError(f"{verb} needs a run folder", fix=f"Write rlcli {verb} RUN; rlcli ls runs lists them.")
    if Path(text).is_dir():
        return text
    known = [str(path.parent) for path in Path("runs").glob("**/config.json")]
    hint = did_you_mean(text, known) or "rlcli ls runs lists them"
    raise ConfigError(f"no run folder {text!r}; {hint}")
