"""Open episodes after a stop: whether they can be replayed, remembering what that takes, and giving up the rest."""

from __future__ import annotations

from collections.abc import Sequence

from rlcli.collectors import Collector
from rlcli.report.reporter import Reporter

NOTICE = "this env's episodes cannot be replayed: a resumed run begins new ones"
LOST = "{} open episodes could not be brought back and count as truncated"


def remember_episodes(collector: Collector, longest: int) -> bool:
    """Keep the actions of open episodes, where replaying them gives the same again.

    Parameters
    ----------
    longest : int
        Steps of the longest episode that is replayed (`run.max_replay_steps`); 0 replays none.
    """
    lanes = collector.lanes
    if not longest or not lanes.is_replayable():
        return False
    lanes.history_limit = longest
    return True


def lose(reporter: Reporter, lanes: Sequence[int]) -> None:
    """Tell of the episodes in these lanes that could not be brought back, and count them no further."""
    if lanes:
        reporter.episodes.forget_open(lanes)
        reporter.warn("replay", LOST.format(len(lanes)), len(lanes))
