"""The next batch of a training loop, and now and then a look at where its time goes."""

from __future__ import annotations

from tensordict import TensorDictBase

from rlcli.collectors import Collector
from rlcli.report.stages import Clock
from rlcli.training.threads import one_thread

TIMED_EVERY = 16  # one batch in so many is timed step by step, to divide the collector's time


def collect(collector: Collector, clock: Clock, iteration: int) -> TensorDictBase:
    """One raw batch, cut to what is left of the run; every 16th is timed from within."""
    with one_thread():  # a few rows a step: a second thread costs more than it gives, and would change bits
        batch = collector.rollout(collector.steps_left(), timed=iteration % TIMED_EVERY == 0)
    seconds = collector.last_seconds
    if seconds is not None:
        parts = {
            "env": seconds.env,
            "policy": seconds.policy,
            "store": seconds.total - seconds.env - seconds.policy,
        }
        clock.split("collect", of=seconds.total, **parts)
    return batch
