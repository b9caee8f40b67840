"""The bench of clusters compares sides that collect the same frames; that is tested, and times are not."""

import pytest
from face import refused

from rlcli.bench.harness import Report
from rlcli.errors import NumericsError
from tests.bench import cluster, cluster_sides
from tests.bench.settings import BENCHES

QUICK = ["part=cartpole", "frames=[64]", "round=64", "rounds=7", "peers=false"]


class Stub:
    """A side that collects frames of this sum."""

    def __init__(self, total: float) -> None:
        self.total = total

    def cpu(self) -> dict[int, float]:
        return {}

    def call(self, name: str, *given: int) -> float:
        return self.total


@pytest.mark.slow
def test_workers_elsewhere_are_compared_with_those_of_this_machine(monkeypatch):
    monkeypatch.setattr(cluster, "KINDS", [cluster.LOCAL, cluster_sides.GLOO])
    result = BENCHES.measure("cluster", QUICK).as_dict()
    assert [ratio["bar"] for ratio in result["ratios"]] == ["", ""]
    assert len(result["sides"]) == 4 and "CartPole, 64: frames of local, gloo" in result["checks"]


def test_sides_that_collect_other_frames_are_refused():
    report = Report("cluster", {"round": 64, "rounds": 7}, "frame")
    sides = {cluster.LOCAL: Stub(1.0), cluster.RAY: Stub(1.0), cluster_sides.GLOO: Stub(2.0)}
    refused(NumericsError, "CartPole", lambda: cluster._compare(report, "CartPole", sides, 64))


@pytest.mark.slow
@pytest.mark.parametrize("part", ["bytes", "weights"])
def test_what_travels_meets_its_bars(part):
    pytest.importorskip("ray")
    result = BENCHES.measure("cluster", [f"part={part}", "calls=1"])
    assert all(figure.met for figure in result.figures) and "NOT empty" not in result.checks.values()
