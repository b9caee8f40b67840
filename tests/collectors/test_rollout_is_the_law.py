"""`EnvBase.rollout` is the law: a collector's batches are the rollout of the same parts, whatever parts a user writes.

A recipe is built anew for the rollout, for one batch, and for three batches of uneven length, with one seed for the env
and one for torch's stream.  An actor that was taken apart draws in numpy: its rollout is given the actions it drew.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from face import FastActor
from hypothesis import given, reject, settings
from tensordict.nn import InteractionType, set_interaction_type
from user_parts import ACTORS, Adds, Policy, Recipe, Rewards, Shows, World, recipes

import rlcli
from rlcli.collectors import Collector
from rlcli.errors import RlcliError

STEPS, UNEVEN = 8, (3, 4, 1)
MODE, RANDOM = InteractionType.DETERMINISTIC, InteractionType.RANDOM

GYM, HAND = World(3, "gym"), World(0, "by hand")
# what no batch can hold, each with the words that say so; there is no other reason
REFUSALS = {
    "the env's reward is not one number a step": Recipe(GYM, (((Rewards, ("two", "new", "float32")),),)),
    "a key of dtype torch.bfloat16 cannot be collected": Recipe(
        GYM, (((Adds, ("added", "both", (1,), "bfloat16", False, False)),),)
    ),
    "the env did not write .*its spec promises it": Recipe(GYM, (((Shows, ("twice", "renamed", False)),),)),
    "is not finite": Recipe(GYM, (((Adds, ("added", "both", (7,), "float32", True, False)),),)),
    "nothing carries its state unknown": Recipe(GYM, policy=Policy("function", memory="nowhere")),
    "writes next.observation, which .* writes": Recipe(GYM, policy=Policy("function", memory="the env's")),
    "overwrites h, the state that it reads": Recipe(HAND, policy=Policy("module", memory="primed, overwritten")),
    "the policy's words is no tensor": Recipe(HAND, policy=Policy("object", memory="words")),
}
assert len(REFUSALS) <= 8


def shown(recipe: Recipe):
    env = recipe.env()
    env.set_seed(3)
    return env.reset()


def rolled_out(recipe: Recipe, first, mode=MODE, drawn=None):
    """The rollout; of the actions `drawn` where some are given."""
    env = recipe.env()
    env.set_seed(3)
    policy = recipe.policy.make(recipe.world, first)
    called = policy if drawn is None else recorded(policy, drawn)
    torch.default_generator.manual_seed(5)
    with set_interaction_type(mode):
        return env.rollout(STEPS, called, break_when_any_done=False)


def recorded(policy, drawn):
    actions = iter(drawn["action"].unbind(drawn.ndim - 1))

    def act(td):
        out = policy(td)
        out["action"] = next(actions)
        return out.set("sample_log_prob", policy.get_dist(out).log_prob(out["action"]))

    return act


def collected(recipe: Recipe, first, cuts, mode=MODE):
    env = recipe.env()
    env.set_seed(3)
    policy = recipe.policy.make(recipe.world, first)
    collector = Collector(
        env, policy, frames_per_batch=8, next_obs="full", track_traj_ids=False, exploration_type=mode,
        auto_register_policy_transforms=False,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(5)
        collector._engine.stream.load_state_dict({"torch": torch.get_rng_state(), "cuda": []})
    with collector:
        batch = torch.cat([collector.rollout(steps) for steps in cuts], -1)
    return batch, isinstance(collector._engine.actor, FastActor)


def differences(expected, found, close=()) -> list[str]:
    """What is not the same, bit for bit."""
    expected, found = (dict(td.exclude("collector").items(True, True)) for td in (expected, found))
    told = [f"only in the rollout: {key}" for key in expected.keys() - found.keys()]
    told += [f"only in the batch: {key}" for key in found.keys() - expected.keys()]
    for key in expected.keys() & found.keys():
        x, y = expected[key], found[key]
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            told.append(f"{key}: {tuple(x.shape)} {x.dtype}, in the batch {tuple(y.shape)} {y.dtype}")
        elif not (torch.allclose(x, y, rtol=1e-4, atol=1e-4) if key in close else torch.equal(x, y)):
            first = (x != y).nonzero()[0].tolist()
            told.append(f"{key} differs first at {first}: {x[tuple(first)]} {y[tuple(first)]}")
    return sorted(told)


def compare(recipe: Recipe, first) -> str:
    """How the collector ran it: an actor taken apart, or otherwise."""
    expected = rolled_out(recipe, first)
    for cuts in ((STEPS,), UNEVEN):
        assert not differences(expected, collected(recipe, first, cuts)[0]), cuts
    if recipe.policy.form in ACTORS and hasattr(recipe.policy.make(recipe.world, first), "get_dist"):
        batch, lowered = collected(recipe, first, UNEVEN, RANDOM)
        if lowered:
            assert not differences(rolled_out(recipe, first, drawn=batch), batch, close=["sample_log_prob"])
            return "taken apart"
        assert not differences(rolled_out(recipe, first, RANDOM), batch)
    return "as it is"


def check(draws: int) -> None:
    ended = Counter()

    @settings(max_examples=draws)
    @given(recipes)
    def one(recipe):
        try:
            first = shown(recipe)
        except (KeyError, RlcliError):  # parts that do not fit each other make no env
            reject()
        try:
            ended[compare(recipe, first)] += 1
        except RlcliError as error:
            reason = next((words for words in REFUSALS if re.search(words, str(error))), None)
            if reason is None:
                raise
            ended["refused"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of observations out of bounds
        one()
    drawn = sum(ended.values())
    assert drawn >= draws / 2 and ended["refused"] <= 0.1 * drawn and ended["taken apart"] >= 0.02 * drawn, ended


def test_a_batch_is_the_rollout_of_whatever_parts_a_user_writes():
    check(200)


@pytest.mark.slow
def test_a_batch_is_the_rollout_of_whatever_parts_a_user_writes_at_length():
    check(3000)


@pytest.mark.parametrize("words", REFUSALS)
def test_what_no_batch_can_hold_is_refused_with_a_way_out(words):
    recipe = REFUSALS[words]
    with pytest.raises(RlcliError, match=words) as caught:
        collected(recipe, shown(recipe), UNEVEN)
    assert caught.value.why and caught.value.fix


def test_a_rollout_shares_no_code_with_the_columns():
    root = Path(rlcli.__file__).parent
    todo, seen = ["envs/base.py"], set()
    while todo:
        name = todo.pop()
        seen.add(name)
        for node in ast.walk(ast.parse((root / name).read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("rlcli."):
                continue
            path = node.module.removeprefix("rlcli.").replace(".", "/")
            file = f"{path}.py" if (root / f"{path}.py").exists() else f"{path}/__init__.py"
            if file not in seen:
                todo.append(file)
    assert {name.split("/")[0] for name in seen} <= {
        "arguments.py",
        "envs",
        "errors.py",
        "exports.py",
        "keys.py",
        "recognise.py",
        "specs",
    }, seen
