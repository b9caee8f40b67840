"""What the hand-written collectors of `rlcli bench collect` store."""

import pytest
import torch

from rlcli.bench import collect_loops as by_hand


def test_rows_that_envpool_spends_on_resets_are_not_counted():
    pytest.importorskip("envpool")
    collect = by_hand.pooled("CartPole-v1", 8, 100, torch.nn.Linear(4, 2))
    collect()
    before, stored = collect(), collect()
    assert torch.equal(stored["counted"][0], ~before["done"][-1])
    assert torch.equal(stored["counted"][1:], ~stored["done"][:-1])
    assert torch.equal(stored["counted"], stored["reward"] == 1)  # a reset pays nothing
    assert (~stored["counted"]).sum() > 10
    assert (stored["next_obs"][~stored["counted"]].abs() <= 0.05).all()  # what CartPole's resets show
