"""`Collector.faces()` says which part runs where, and names what made it so."""

from __future__ import annotations

import pytest
from user_parts import Policy, Recipe, Rewards, World

from rlcli.collectors import Collector

HALVED = ((Rewards, ("moved", "new", "float32")),)


def faces(recipe: Recipe, **options):
    env = recipe.env()
    with Collector(env, recipe.policy.make(recipe.world, recipe.env().reset()), frames_per_batch=6, **options) as made:
        return made.faces()


def test_parts_of_ours_run_on_columns_in_the_loop_or_after_it():
    found = faces(Recipe(World(3, "gym"), ("StepCounter(3)", "RewardSum", "CatFrames"), Policy("actor")))
    assert [face.runs for face in found] == [
        "columns", "columns, in the loop", "columns, after the batch", "columns, in the loop",
        "columns, in numpy", "columns, drawn in numpy", "one stream per env, from the run's seed",
    ]  # fmt: skip


def test_the_stages_of_a_policy_are_named():
    found = {face.name: face.runs for face in faces(Recipe(World(0, "gym"), policy=Policy("hooked actor")))}
    assert found["observation -> logits"] == "columns, called every step"


@pytest.mark.parametrize(
    ("world", "transforms", "why"),
    [
        (World(3, "own step"), (), "OwnStep has its own _step"),
        (World(0, "own object"), (), "GymEnv has its own _step"),
        (World(0, "by hand"), (), "ByHand steps TensorDicts"),
        (World(3, "transformed inside"), (), "OwnTransformed has its own _step"),
        (World(3, "gym"), (HALVED, "RewardSum"), "Own on it may read any key"),
    ],
)
def test_an_env_on_tensordicts_says_why(world, transforms, why):
    env, *rest = faces(Recipe(world, transforms, Policy("module")))
    assert (env.part, env.runs, env.why) == ("env", "TensorDicts", why)
    assert all("TensorDicts" in face.runs for face in rest if face.part in ("transform", "policy"))
    assert rest[-1].part == "noise" and "torch" in rest[-1].runs


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (Policy("function"), "no module that can be copied"),
        (Policy("module", input="in place"), "it writes to its input, observation"),
        (Policy("module"), "more than a plain TensorDictModule"),
    ],
)
def test_a_policy_that_is_called_as_it_is_says_why(policy, why):
    face = next(face for face in faces(Recipe(World(3, "gym"), policy=policy)) if face.part == "policy")
    assert face.runs == "TensorDicts, called every step" and why in face.why


def test_noise_is_named_by_the_stream_it_comes_from():
    hooked = faces(Recipe(World(0, "gym"), policy=Policy("hooked actor")))
    assert [face.name for face in hooked if face.part == "noise"] == [
        "the policy's draws",
        "the policy's called stages",
    ]
    with Collector(Recipe(World(0, "by hand")).env(), frames_per_batch=6) as made:
        assert [face.name for face in made.faces() if face.part == "noise"] == ["random actions", "the env"]
