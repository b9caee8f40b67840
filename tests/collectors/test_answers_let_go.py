"""The thread that looks after collections keeps nothing of one that has ended."""

import gc
import time
import weakref

from rlcli.collectors.answers import EVERY, answering


class _Lanes:
    """What a collection's watch reads of lanes."""

    step_timeout, ends_what_hangs = None, False

    def __init__(self):
        self.clock, self.episodes = [0.0], [0]
        self.outcome = type("Outcome", (), {"rewards": []})()


def test_lanes_are_let_go_while_the_thread_sleeps():
    lanes = _Lanes()
    with answering(lanes) as _:
        time.sleep(1.5 * EVERY)  # one look at least
    gone = weakref.ref(lanes)
    del lanes
    gc.collect()
    assert gone() is None
