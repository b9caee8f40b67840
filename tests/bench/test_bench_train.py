"""What `rlcli bench train` says of returns."""

import pytest
from face import refused

from rlcli.bench import BENCHES
from rlcli.bench.train import OURS, SB3, _figures
from rlcli.errors import ConfigError


def said(ours, theirs, env="CartPole-v1"):
    sides = {OURS: ours} | ({} if theirs is None else {SB3: theirs})
    return {
        figure.name.split(",")[0] + "," * (SB3 in figure.name): figure for figure in _figures({"env.id": env}, sides)
    }


def test_four_of_five_runs_must_solve_the_env():
    found = said([500.0] * 4 + [474.9], [500.0] * 3 + [100.0, 475.0])
    solved, peers = found["runs that return 475 or more"], found["runs that return 475 or more,"]
    assert (solved.value, solved.met, peers.value, peers.met) == (80, True, 80, None)
    assert not said([500.0] * 3 + [474.9] * 2, None)["runs that return 475 or more"].met
    assert said([-200.0, -150.0], None, "Pendulum-v1")["runs that return -200 or more"].value == 100


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("algo=dqn env.id=Pendulum-v1", "Box"),
        ("algo=sac env.id=CartPole-v1", "Discrete"),
        ("algo=ppo env.id=Blackjack-v1", "Tuple"),
    ],
)
def test_an_env_that_one_side_does_not_take_is_refused_before_anything_is_run(monkeypatch, words, why):
    monkeypatch.setattr("rlcli.bench.train.interleave", lambda *_, **__: pytest.fail("it was run"))
    refused(ConfigError, f"algo= {why}", lambda: BENCHES.measure("train", words.split()))


def test_returns_are_compared_pair_by_pair():
    pairs = "pairs of runs in which ours returns more (ties half)"
    assert said([500.0, 500.0], [500.0, 500.0])[pairs].value == 50
    assert said([500.0, 100.0], [200.0, 90.0])[pairs].value == 75
    worse = said([10.0, 20.0], [15.0, 30.0], "Acrobot-v1")
    assert list(worse) == [pairs] and worse[pairs].value == 25 and worse[pairs].met
    assert not said([10.0, 9.0], [15.0, 10.0])[pairs].met
    assert said([1.0], None, "Acrobot-v1") == {}
