"""The bench of memory counts bytes of what comes back as it was collected."""

import pytest
from face import refused

from rlcli.errors import ConfigError
from tests.bench.settings import BENCHES


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("memory", "recipes=ppo_exact,ppo_nothing", "ppo_nothing"),
        ("memory", "recipes=collect_random", "collect"),
        ("memory", "games=Pong,Pnog recipes=", "ALE/Pnog-v5"),
        ("actors", "envpool=NoSuchEnv-v0", "NoSuchEnv-v0"),
    ],
)
def test_a_mistake_is_answered_before_anything_is_measured(monkeypatch, name, words, said):
    pytest.importorskip({"games": "ale_py", "envpool": "envpool"}.get(words.partition("=")[0], "torch"))
    for part in ("memory._cartpole", "actors._recurrent"):
        monkeypatch.setattr(f"tests.bench.{part}", lambda *_, **__: pytest.fail("it was measured"))
    refused(ConfigError, said, lambda: BENCHES.measure(name, words.split()))


def test_memory_counts_rows_and_compares_what_comes_back():
    pytest.importorskip("ale_py")
    result = BENCHES.measure(
        "memory", ["games=Pong", "frames=1000", "recipes=", "calls=1", "batch_size=8", "trained=false"]
    ).as_dict()
    figures = {figure["name"]: figure["value"] for figure in result["figures"]}
    pong = [figures[f"ALE/Pong-v5, {tier}"] for tier in ("compressed", "exact, each frame once", "exact, stacks whole")]
    assert sorted(pong) == pong and pong[1] < 8000 and pong[2] < 30_000
    assert figures["CartPole row, exact, packed"] < figures["CartPole row, exact"] < 60
    assert "rows of ALE/Pong-v5" in result["checks"]
