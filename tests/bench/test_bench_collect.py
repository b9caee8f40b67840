"""What the hand-written collectors of the benches of collectors store."""

import pytest
import torch

from rlcli.vec_envs.make import GymRecipe
from tests.bench import actors as by_hand


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


def test_the_recurrent_loop_stores_the_state_that_each_step_began_with():
    torch.manual_seed(0)
    encoder, cell, head = torch.nn.Linear(4, 8), torch.nn.GRUCell(8, 8), torch.nn.Linear(8, 2)
    collect = by_hand.recurrent(GymRecipe("CartPole-v1").make, 3, 40, encoder, cell, head)
    before, stored = collect(), collect()
    rows = {key: torch.cat((before[key], stored[key])) for key in stored}
    over = rows["terminated"] | rows["truncated"]
    with torch.no_grad():
        written = cell(encoder(rows["obs"].flatten(0, 1)), rows["state"].flatten(0, 2)).view(80, 3, 1, 8)
    expected = torch.where(over[..., None, None], 0.0, written)[:-1]
    assert over.any() and torch.allclose(rows["state"][1:], expected, atol=1e-6)
    assert not rows["state"][0].any()
