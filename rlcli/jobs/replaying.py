"""Open episodes after a stop: whether they can be replayed, and remembering what that takes."""

from __future__ import annotations

from rlcli.collectors import Collector

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
