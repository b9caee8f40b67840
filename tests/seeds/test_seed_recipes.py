"""The two whole recipes of the memory tutorial, and the blocks that only build what they show: built, then run."""

from __future__ import annotations

import pytest
import torch
from seed_blocks import Block, run

NETWORKS = """
import torch
from tensordict.nn import TensorDictModule
from rlcli.envs import GymEnv
from rlcli.modules import MLP, OneHotCategorical, ProbabilisticActor, ValueOperator
from rlcli.objectives import ClipPPOLoss
torch.manual_seed(0)
env_maker = base_env_maker = lambda: GymEnv("Acrobot-v1")
actor = policy = ProbabilisticActor(
    TensorDictModule(MLP(6, 3, (16,)), in_keys=["observation"], out_keys=["logits"]),
    in_keys=["logits"], distribution_class=OneHotCategorical, return_log_prob=True,
)
critic = ValueOperator(MLP(6, 1, (16,)))
"""
RECIPES = {
    "A": Block("004", "collector = Collector(", after="Recipe A", preamble=NETWORKS),
    "B": Block("004", "env_maker_delta = lambda", after="Recipe B", preamble=NETWORKS),
}
PLACEMENT = Block("004", "collector = Collector(", after="Knob 8", preamble=NETWORKS)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_collects_estimates_and_learns(name):
    names = run(RECIPES[name]).names
    collector, rb, loss = names["collector"], names["rb"], names["loss"]
    torch.manual_seed(0)
    data = collector.next()
    collector.shutdown()
    assert len(data) == 1024 and ("next", "observation") not in data.keys(True)
    rb.extend(data)
    sample = names["advantage"](rb.sample())
    assert sample["advantage"].isfinite().all()
    out = loss(sample)
    sum(x for key, x in out.items() if key.startswith("loss_")).backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in loss.parameters())


def test_seed_004_each_stage_on_its_own_device():
    collector = run(PLACEMENT).names["collector"]
    try:
        assert collector.next()["observation"].device.type == "cpu"
    finally:
        collector.shutdown()
