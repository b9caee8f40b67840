"""An option that nothing reads is refused where it was typed, and said where a recipe sets it."""

import dataclasses
import warnings

import pytest
from face import VERBS, Config, configure, find_recipes, leaves, refused

from rlcli.config import registry
from rlcli.config.choices import CHOICES
from rlcli.config.option import REGISTERED
from rlcli.config.schemas import CollectConfig, read_with, unread
from rlcli.errors import ConfigError

STORED = ["storage=tensor", "sampler=random", "collector.frames_per_batch=64"]
REINFORCE = ["loss=reinforce", "value=td1", "optim.epochs=1"]
DQN, SAC = ["loss=dqn", *STORED], ["loss=sac", "env.id=Pendulum-v1", *STORED]


@pytest.mark.parametrize(
    ("words", "option", "why"),
    [
        ([], "loss.tau=1.0", "with loss=ppo_clip; use loss=dqn | sac, or leave it out"),
        ([], "policy.eps_end=0.05", "with loss=ppo_clip; use loss=dqn"),
        ([], "optim.updates_per_frame=0.5", "with loss=ppo_clip"),
        ([], "sampler.alpha=0.6", "with sampler=minibatch; use sampler=prioritized"),
        ([], "value.rho_thresh=2", "with value=gae; use value=vtrace"),
        (["value=td0"], "value.lmbda=0.9", "with value=td0; use value=gae | td_lambda"),
        (["value.average=false"], "value.average_over=batch", "with value.average=false; use value.average=true"),
        ([], "value.shifted_budget=2", "with value.shifted=false"),
        ([], "loss.kl_target=0.02", "with loss=ppo_clip; use loss=ppo_kl"),
        (["loss=ppo_kl"], "loss.clip_epsilon=0.2", "with loss=ppo_kl; use loss=ppo_clip"),
        (["loss=a2c", "optim.epochs=1"], "loss.target_kl=0.1", "with loss=a2c"),
        (REINFORCE, "loss.clip_value=0.2", "with loss=reinforce; use loss=ppo_clip | ppo_kl | a2c"),
        ([*REINFORCE, "loss.baseline=false"], "loss.critic_coeff=0.3", "with loss.baseline=false; use"),
        (DQN, "optim.epochs=10", "with loss=dqn; use loss=ppo_clip | ppo_kl | a2c | reinforce"),
        (DQN, "value.lmbda=0.95", "with loss=dqn"),
        (DQN, "value=td0", "with loss=dqn"),
        (DQN, "loss.clip_epsilon=0.2", "with loss=dqn"),
        (DQN, "value.num_chunks=2", "with loss=dqn"),
        (DQN, "policy.init_std=0.5", "with loss=dqn"),
        (DQN, "loss.alpha=0.2", "with loss=dqn; use loss=sac"),
        (SAC, "policy.dueling=true", "with loss=sac"),
        ([*SAC, "loss.alpha=0.1"], "loss.alpha_init=0.5", "with loss.alpha=0.1; use loss.alpha=auto"),
        (["optim=sgd"], "optim.eps=1e-8", "with optim=sgd"),
        ([], "optim.momentum=0.9", "with optim=adam; use optim=rmsprop | sgd"),
        ([], "storage.max_size=1000", "with storage=none"),
        ([], "env.atari.noop_max=3", "with env=gym; use env=atari"),
        ([], "memory.delta_dtype=int8", "with memory=exact; use memory=delta"),
        (["memory=compact"], "memory.fill_value=0", "for rlcli train; leave it out"),
    ],
)
def test_an_option_that_nothing_reads_is_refused_where_it_is_typed(words, option, why):
    name = option if option == "value=td0" else option.partition("=")[0]
    with pytest.raises(ConfigError) as refused:
        configure("train", [*words, option])
    assert f"{name} has no meaning {why}" in str(refused.value)
    configure("train", words)


@pytest.mark.parametrize("option", ["policy.eps_end=0.1", "policy.dueling=true"])
def test_collecting_reads_no_option_of_a_loss(option):
    with pytest.raises(ConfigError, match="has no meaning for rlcli collect; leave it out"):
        configure("collect", ["policy=mlp", option])
    configure("collect", ["policy=mlp", "policy.init_std=0.5", "policy.shared=true"])
    with pytest.raises(ConfigError, match=r"policy\.hidden has no meaning with policy=random; use policy=mlp"):
        configure("collect", ["policy=random", "policy.hidden=[8]"])


@pytest.mark.parametrize(
    "option",
    ["run.keep=2", "run.checkpoint_every=1", "run.eval_every=1", "run.eval_episodes=0", "run.eval_max_steps=9",
     "device.train_device=cpu", "memory.frame_stack=auto"],
)  # fmt: skip
def test_collecting_reads_no_option_of_training(option):
    key = option.partition("=")[0]
    with pytest.raises(ConfigError, match=f"{key} has no meaning for rlcli collect; leave it out"):
        configure("collect", [option])
    configure("collect", ["run.max_replay_steps=3", "device.storing_device=cpu"])


@pytest.mark.parametrize(
    "option", ["policy.exploration=mode", "collector.init_random_frames=8", "policy.distribution=normal"]
)
def test_a_policy_that_draws_at_random_reads_no_option_of_one_that_chooses(option):
    key = option.partition("=")[0]
    with pytest.raises(ConfigError, match=f"{key} has no meaning with policy=random; use policy=mlp"):
        configure("collect", ["policy=random", option])
    configure("collect", ["policy=mlp", option])


def test_a_registered_policy_is_explored_with_like_ours(monkeypatch):
    monkeypatch.setitem(registry._users["policy"], "mine", object)
    configure("collect", ["policy=mine", "policy.exploration=mode"])
    with pytest.raises(ConfigError, match=r"policy\.hidden has no meaning with policy=mine; use policy=mlp"):
        configure("collect", ["policy=mine", "policy.hidden=[8]"])


def test_what_a_verb_reads_an_option_with_is_said_in_words():
    assert {key: read_with(Config, leaves(Config)[key]) for key in ("seed", "run.keep", "loss.kl_target")} == {
        "seed": "", "run.keep": "", "loss.kl_target": "with loss=ppo_kl"
    }  # fmt: skip
    assert read_with(Config, leaves(Config)["loss.alpha_init"]) == "with loss=sac"
    assert read_with(Config, leaves(Config)["memory.fill_value"]) is None
    table = leaves(CollectConfig)
    assert read_with(CollectConfig, table["run.keep"]) is read_with(CollectConfig, table["policy.dueling"]) is None
    assert read_with(CollectConfig, table["policy.init_std"]) == "with policy=mlp | cnn | dict | gru | lstm | auto"
    assert read_with(CollectConfig, table["policy.exploration"]) == "not with policy=random"


def test_the_default_is_as_much_refused_as_any_other_value():
    """Whether a value was typed decides, not what it is."""
    for option in ("optim.epochs=10", "optim.epochs=11"):
        with refused(ConfigError, "optim.epochs loss=dqn"):
            configure("train", [*DQN, option])


def test_what_a_recipe_sets_for_nothing_is_said():
    with pytest.warns(UserWarning) as said:
        cfg = configure("train", ["recipe=ppo_exact", *DQN])
    texts = [str(warning.message) for warning in said]
    assert texts == [
        "recipe ppo_compact sets what has no meaning with loss=dqn: value.lmbda, loss.entropy_coeff, "
        "loss.clip_epsilon, optim.epochs"
    ]
    assert cfg.loss.kind == "dqn"


@pytest.mark.parametrize("name", sorted(find_recipes()))
def test_our_recipes_set_nothing_for_nothing(name):
    recipe = find_recipes()[name]
    words = ["policy.path=."] if name == "collect_policy" else []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        configure(recipe.verb, [f"recipe={name}", *words])


def test_options_are_read_by_choices_that_there_are_in_the_order_of_the_tables():
    names = {group: [*choices, REGISTERED] for group, choices in {**CHOICES, "verb": VERBS}.items()}
    for key, leaf in {**leaves(Config), **leaves(CollectConfig)}.items():
        by = leaf.option.read_by
        assert list(by) == [group for group in names if group in by], key
        assert all(list(choices) == [name for name in names[group] if name in choices] for group, choices in by.items())


def test_what_an_option_is_read_by_is_its_own_and_that_of_its_group():
    table = leaves(Config)
    assert table["weights.swap"].option.read_by == {"collector": ("multi_async", "async"), "verb": ("train",)}
    assert table["env.atari.noop_max"].option.read_by == {"env": ("atari",)}
    assert table["env.num"].option.read_by == {}


def test_a_default_run_reads_what_its_choices_say():
    without = unread(Config())
    assert {"loss.tau", "sampler.alpha", "policy.eps_init", "storage.ndim"} <= without.keys()
    assert not {"loss.clip_epsilon", "optim.epochs", "value.lmbda", "policy.hidden", "env.num"} & without.keys()
    compact = dataclasses.replace(Config(), memory=dataclasses.replace(Config().memory, kind="delta", next_obs="delta"))
    assert "memory.delta_dtype" in without and "memory.delta_dtype" not in unread(compact)
