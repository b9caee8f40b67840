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
    from rlcli.report.facts import Expected
    from rlcli.report.ledger import Ledger
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


def memory(
    ledger: Ledger,
    process: tuple[int, int],
    devices: Mapping[str, int] | None = None,
    expected: Expected | None = None,
    values: int | None = None,
) -> dict:
    """The ledger for the summary: every entry, sums by component, the process, and what the plan said of it.

    Parameters
    ----------
    process : (int, int)
        Resident bytes now and at the peak.
    devices : mapping from device to bytes, optional
        The most each has held.
    values : int, optional
        What the value stage was seen to hold for a moment.
    """
    planned = {} if expected is None else {"planned": expected.total, "imported": expected.imported}
    stage = {"planned": None if expected is None else expected.values, "measured": values}
    return {
        "entries": [entry.as_dict() for entry in ledger.entries],
        "components": {
            name: {
                "bytes": total.bytes,
                "peak": total.peak,
                "per_frame": total.per_frame,
                "saved": total.saved,
            }
            for name, total in ((name, ledger.component(name)) for name in ledger.components())
        },
        "saved": ledger.saved,
        **({"value_stage": stage} if any(x is not None for x in stage.values()) else {}),
        "process": {"now": process[0], "peak": process[1]} | planned,
        "devices": dict(devices or {}),
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
