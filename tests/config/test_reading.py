"""An option that nothing reads is refused where it was typed, and said where a recipe sets it."""

import re
import warnings

import pytest
from face import VERBS, Config, configure, find_recipes, from_dict, leaves, refused

from rlcli.config import registry
from rlcli.config.choices import CHOICES
from rlcli.config.compose import plan
from rlcli.config.option import REGISTERED, held
from rlcli.config.schemas import CollectConfig, idle, read_with
from rlcli.errors import ConfigError

STORED = ["storage=tensor", "sampler=random", "collector.frames_per_batch=64"]
REINFORCE = ["loss=reinforce", "value=td1", "optim.epochs=1"]
DQN, SAC = ["loss=dqn", *STORED], ["loss=sac", "env.id=Pendulum-v1", *STORED]


@pytest.mark.parametrize(
    ("words", "option", "made", "having"),
    [
        ([], "loss.tau=1.0", "loss=ppo_clip", "loss=dqn | sac"),
        ([], "sampler.alpha=0.6", "sampler=minibatch", "sampler=prioritized | prioritized_slice"),
        ([], "value.rho_thresh=2", "value=gae", "value=vtrace"),
        (["value=td0"], "value.lmbda=0.9", "value=td0", "value=gae | td_lambda"),
        ([], "loss.kl_target=0.02", "loss=ppo_clip", "loss=ppo_kl"),
        (["loss=ppo_kl"], "loss.clip_epsilon=0.2", "loss=ppo_kl", "loss=ppo_clip"),
        (["loss=a2c", "optim.epochs=1"], "loss.target_kl=0.1", "loss=a2c", "loss=ppo_clip | ppo_kl"),
        (REINFORCE, "loss.clip_value=0.2", "loss=reinforce", "loss=ppo_clip | ppo_kl | a2c"),
        (DQN, "loss.clip_epsilon=0.2", "loss=dqn", "loss=ppo_clip"),
        (DQN, "loss.alpha=0.2", "loss=dqn", "loss=sac"),
        (["optim=sgd"], "optim.eps=1e-8", "optim=sgd", "optim=adam | adamw | rmsprop"),
        ([], "optim.momentum=0.9", "optim=adam", "optim=rmsprop | sgd"),
        ([], "storage.max_size=1000", "storage=none", "storage=tensor | memmap | compressed | a registered one"),
        ([], "env.atari.noop_max=3", "env=gym", "env=atari"),
        ([], "+env.atari={noop_max:30}", "env=gym", "env=atari"),
        ([], "memory.delta_dtype=int8", "memory=exact", "memory=delta"),
    ],
)
def test_an_option_of_another_choice_is_an_unknown_key_and_the_choice_that_has_it_is_named(words, option, made, having):
    """Its default is refused as any other value."""
    with pytest.raises(ConfigError) as refused:
        configure("train", [*words, option])
    name = option.lstrip("+").replace("={noop_max:", ".noop_max=").partition("=")[0]
    assert str(refused.value) == f"unknown key {name!r} with {made}; it is an option of {having}"
    configure("train", words)


@pytest.mark.parametrize(
    ("words", "option", "why"),
    [
        ([], "policy.eps_end=0.05", "with loss=ppo_clip; use loss=dqn"),
        ([], "optim.updates_per_frame=0.5", "with loss=ppo_clip"),
        (["value.average=false"], "value.average_over=batch", "with value.average=false; use value.average=true"),
        ([], "value.shifted_budget=2", "with value.shifted=false"),
        ([*REINFORCE, "loss.baseline=false"], "loss.critic_coeff=0.3", "with loss.baseline=false; use"),
        (DQN, "optim.epochs=10", "with loss=dqn; use loss=ppo_clip | ppo_kl | a2c | reinforce"),
        (DQN, "value.lmbda=0.95", "with loss=dqn"),
        (DQN, "value=td0", "with loss=dqn"),
        (DQN, "value.num_chunks=2", "with loss=dqn"),
        (DQN, "policy.init_std=0.5", "with loss=dqn"),
        (SAC, "policy.dueling=true", "with loss=sac"),
        ([*SAC, "loss.alpha=0.1"], "loss.alpha_init=0.5", "with loss.alpha=0.1; use loss.alpha=auto"),
        (["memory=compact"], "memory.fill_value=0", "for rlcli train; leave it out"),
    ],
)
def test_an_option_that_nothing_reads_is_refused_where_it_is_typed(words, option, why):
    name = option if option == "value=td0" else option.partition("=")[0]
    with pytest.raises(ConfigError) as refused:
        configure("train", [*words, option])
    assert f"{name} has no meaning {why}" in str(refused.value)
    configure("train", words)


def test_a_sweep_over_choices_names_the_jobs_that_lack_an_option():
    words = ["loss=dqn,ppo_clip,a2c", "seed=1,2", "optim.epochs=1,2", "loss.double=true"]
    with pytest.raises(ConfigError) as refused:
        plan("train", words, multirun=True)
    lines = str(refused.value).splitlines()[1:]
    assert "  - jobs 4, 5, 6, 7: unknown key 'loss.double' with loss=ppo_clip; it is an option of loss=dqn" in lines
    assert "  - jobs 8, 9, 10, 11: unknown key 'loss.double' with loss=a2c; it is an option of loss=dqn" in lines
    assert any(line.startswith("  - jobs 0, 1, 2, 3: optim.epochs has no meaning with loss=dqn") for line in lines)
    plan("train", ["loss=dqn", "seed=1,2", "loss.double=true"], multirun=True)


def test_options_of_another_choice_are_told_in_one_order():
    """Whatever the hashes of their names are in this process."""
    given = {"kl_target": 0.1, "anneal_clip": "true", "tau": 0.5, "double": "true", "clip_epsilon": 0.1}
    with pytest.raises(ConfigError) as refused:
        configure("train", ["loss=a2c", *(f"loss.{name}={value}" for name, value in given.items())])
    assert re.findall(r"'loss\.(\w+)'", str(refused.value)) == sorted(given)


def test_a_recipe_that_sets_an_option_of_another_choice_than_it_makes_is_refused(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("defaults: [override /optim: sgd]\noptim: {eps: 1.0e-8}\n")
    said = f"{recipe}: unknown key 'optim.eps' with optim=sgd; it is an option of optim=adam | adamw | rmsprop"
    with pytest.raises(ConfigError) as refused:
        configure("train", ["recipe=mine"], [tmp_path])
    assert str(refused.value) == said
    assert configure("train", ["recipe=mine", "optim=adam"], [tmp_path]).optim.eps == 1e-8
    with pytest.warns(UserWarning, match="recipe mine sets what has no meaning with optim=sgd: optim.eps"):
        configure("train", ["recipe=mine", "optim=sgd"], [tmp_path])  # it is the command that chooses


@pytest.mark.parametrize("option", ["policy.eps_end=0.1", "policy.dueling=true"])
def test_collecting_reads_no_option_of_a_loss(option):
    with pytest.raises(ConfigError, match="has no meaning for rlcli collect; leave it out"):
        configure("collect", ["policy=mlp", option])
    configure("collect", ["policy=mlp", "policy.init_std=0.5", "policy.shared=true"])
    with pytest.raises(ConfigError, match=r"'policy\.hidden' with policy=random; it is an option of policy=mlp"):
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
    ("option", "said"),
    [
        (
            "policy.exploration=mode",
            "unknown key 'policy.exploration' with policy=random; it is an option of policy=mlp",
        ),
        (
            "collector.init_random_frames=8",
            "collector.init_random_frames has no meaning with policy=random; use policy",
        ),
        ("policy.distribution=normal", "unknown key 'policy.distribution' with policy=random"),
    ],
)
def test_a_policy_that_draws_at_random_reads_no_option_of_one_that_chooses(option, said):
    with pytest.raises(ConfigError, match=f"^{said}"):
        configure("collect", ["policy=random", option])
    configure("collect", ["policy=mlp", option])


def test_a_registered_policy_is_explored_with_like_ours(monkeypatch):
    monkeypatch.setitem(registry._users["policy"], "mine", object)
    configure("collect", ["policy=mine", "policy.exploration=mode", "collector.init_random_frames=8"])
    with pytest.raises(ConfigError, match=r"'policy\.hidden' with policy=mine; it is an option of policy=mlp"):
        configure("collect", ["policy=mine", "policy.hidden=[8]"])


def test_what_a_verb_reads_an_option_with_is_said_in_words():
    assert {key: read_with(Config, leaves(Config)[key]) for key in ("seed", "run.keep", "loss.kl_target")} == {
        "seed": "", "run.keep": "", "loss.kl_target": "with loss=ppo_kl"
    }  # fmt: skip
    assert read_with(Config, leaves(Config)["loss.alpha_init"]) == "with loss=sac, with loss.alpha=auto"
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
def test_our_recipes_set_nothing_for_nothing(name, monkeypatch):
    monkeypatch.setattr("rlcli.config.installed.has", lambda package: True)  # whatever it is that is installed here
    recipe = find_recipes()[name]
    words = ["policy.path=."] if name == "collect_policy" else []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        configure(recipe.verb, [f"recipe={name}", *words])


def test_options_are_read_by_choices_that_there_are_in_the_order_of_the_tables():
    names = {group: [*choices, REGISTERED] for group, choices in {**CHOICES, "verb": VERBS}.items()}
    for key, leaf in {**leaves(Config), **leaves(CollectConfig)}.items():
        by = {group: choices for group, choices in leaf.option.read_by.items() if "." not in group}
        assert by.keys() | leaves(Config).keys() >= leaf.option.read_by.keys()
        assert list(by) == [group for group in names if group in by], key
        assert all(list(choices) == [name for name in names[group] if name in choices] for group, choices in by.items())


def test_what_an_option_is_read_by_is_its_own_and_that_of_its_group():
    table = leaves(Config)
    assert table["weights.swap"].option.read_by == {
        "collector": ("multi_async", "async", "ray", "distributed"), "verb": ("train",)
    }  # fmt: skip
    assert table["env.atari.noop_max"].option.read_by == {"env": ("atari",)}
    assert table["env.num"].option.read_by == {}


@pytest.mark.parametrize("group", CHOICES)
def test_a_choice_has_its_own_options_alone(group):
    """Its object is of its dataclass, and one of all choices is derived for what is typed alone."""
    for choice in CHOICES[group]:
        cfg = from_dict("train", {group: {"kind": choice}})
        options = CHOICES[group][choice].options
        assert type(getattr(cfg, group)) is options and getattr(cfg, group).kind == choice
        own = {f"{group}.{name}" for name in leaves(options)}
        assert own == {key for key in held(cfg) if key.startswith(f"{group}.")}
        assert all(by == group for key, (by, _) in idle(cfg).items() if key.startswith(f"{group}.") and key not in own)


def test_a_default_run_reads_what_its_choices_say():
    without = idle(Config())
    assert {"loss.tau": ("loss", "ppo_clip"), "policy.eps_init": ("loss", "ppo_clip")}.items() <= without.items()
    assert not {"loss.clip_epsilon", "optim.epochs", "value.lmbda", "policy.hidden", "env.num"} & without.keys()
    assert type(Config()) is type(configure("train", [])) and from_dict("train", {}) == Config()
