"""The closing report: one summary as plain values, and the files that it is written to.

summary.json is the source; the table and report.md are two spellings of it and hold nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.errors import ResourceError
from rlcli.report.closing_view import to_markdown
from rlcli.report.whole_file import write_whole

if TYPE_CHECKING:  # `rlcli ls` reads summaries, and must not wait for torch
    from rlcli.report.stages import Spent

SUMMARY, REPORT = "summary.json", "report.md"


def throughput(spent: Spent) -> dict:
    """Seconds by stage for the summary; `stages` adds up to `seconds`."""
    return {
        "frames": spent.frames,
        "seconds": spent.seconds,
        "frames_per_second": spent.rate,
        "stages": {name: {"seconds": seconds, "parts": spent.parts(name)} for name, seconds in spent.stages().items()},
    }


def write(folder: Path | str, summary: Mapping) -> None:
    """Write summary.json and report.md, each whole or not at all.

    Raises
    ------
    ResourceError
        The folder is gone or full; older reports in it stay as they were.
    """
    folder = Path(folder)
    contents = {SUMMARY: json.dumps(summary, indent=2, allow_nan=False) + "\n", REPORT: to_markdown(summary)}
    for path, text in ((folder / name, text) for name, text in contents.items()):
        try:
            write_whole(path, text)
        except OSError as error:
            raise ResourceError(
                "cannot write the closing report",
                where=str(path),
                why=error.strerror or str(error),
                fix="The run itself is saved: `rlcli eval` and `rlcli resume` work once the folder can be written.",
            ) from error
