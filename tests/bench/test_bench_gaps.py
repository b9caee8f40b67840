"""The bench of pauses between orders: envs in processes are given the same actions whatever the pause is."""

import numpy as np

from tests.bench import gaps
from tests.bench.settings import BENCHES


def test_a_step_is_timed_at_every_pause(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["env.num=2", "cost=20", "workers=1", "gaps=[0,200]", "steps=8", "rounds=7", "seconds=0.001"]
    result = BENCHES.measure("gaps", words).as_dict()
    alone, at_once, later = (side["median"] for side in result["sides"])
    assert 0 < alone < at_once < later and later > 2e-4
    assert [figure["name"].partition(",")[0] for figure in result["figures"]] == [
        "a step beyond the envs' own", "a step beyond the envs' own", "a step more than with 0 us",
    ]  # fmt: skip


def test_a_pause_changes_nothing_but_the_time():
    ended = []
    for gap in (0.0, 1e-4):
        with gaps.envs_in_processes(2, gaps.env_of(1)[0], workers=1) as given:
            assert given.vec_env.parts == [range(1), range(1, 2)]
            ended.append(given.steps(250, gap))
    assert np.array_equal(*ended) and ended[0].sum() == 2
