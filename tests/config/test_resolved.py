"""A configuration survives the run folder: to JSON and back, with overrides of a later command."""

import json

import pytest
from face import VERBS, Config, configure, from_dict, refused
from hypothesis import given
from hypothesis import strategies as st

from rlcli.config.resolved import to_dict
from rlcli.config.schemas import CollectConfig
from rlcli.config.validate import as_resumed
from rlcli.config.words import spelled
from rlcli.errors import ConfigError


def through_json(cfg) -> dict:
    return json.loads(json.dumps(to_dict(cfg)))


@pytest.mark.parametrize(("verb", "schema"), VERBS.items())
def test_a_configuration_comes_back_equal(verb, schema):
    cfg = schema()
    cfg.env.wrappers = ["ClipAction", {"TimeLimit": {"max_episode_steps": 5}}]
    cfg.env.kwargs = {"render_mode": "rgb_array", "nested": {"a": [1, 2]}}
    cfg.policy.hidden = [32]
    again = from_dict(verb, through_json(cfg))
    assert again == cfg and type(again) is schema


@given(st.integers(0, 2**32 - 1), st.floats(1e-8, 10), st.lists(st.integers(1, 512), max_size=4), st.booleans())
def test_numbers_come_back_bit_for_bit(seed, lr, hidden, anneal):
    cfg = Config()
    cfg.seed, cfg.optim.lr, cfg.policy.hidden, cfg.optim.anneal_lr = seed, lr, hidden, anneal
    assert from_dict("train", through_json(cfg)) == cfg


def test_a_saved_key_that_nothing_reads_is_refused():
    with refused(ConfigError, "config.json mine"):
        from_dict("train", {**through_json(Config()), "mine": {"a": 1}}, where="config.json")


def test_whole_numbers_may_be_written_with_an_exponent():
    assert repr(from_dict("train", {"seed": 3.0}, ["total_frames=1e5"]).total_frames) == "100000"


def test_overrides_change_what_was_saved():
    saved = through_json(CollectConfig())
    cfg = from_dict("collect", saved, ["total_frames=1_000", "env.kwargs={a: 1}", "run.dir=null", "threads=2"])
    assert (cfg.total_frames, cfg.env.kwargs, cfg.run.dir, cfg.threads) == (1000, {"a": 1}, None, 2)
    assert from_dict("collect", saved, ["run.dir=2024_01_05"]).run.dir == "2024_01_05"


def test_a_mapping_of_keys_changes_those_that_it_names():
    saved = through_json(Config())
    cfg = from_dict("train", saved | {"env": {"kind": "atari"}}, ["run={keep:4}", "env.atari={noop_max:3}"])
    assert (cfg.run.keep, cfg.run.eval_episodes, cfg.env.atari.noop_max) == (4, 20, 3)


@pytest.mark.parametrize("word", ["recipe=ppo_pong", "optim=sgd", "optim={lr:1}", "env=atari"])
def test_what_was_chosen_when_the_run_began_is_not_said_to_be_open_to_change(word):
    refused(ConfigError, "chosen", lambda: from_dict("train", through_json(Config()), [word]))


def test_another_choice_is_told_beside_the_options_that_go_with_it():
    words = ["optim=sgd", "optim.momentum=0.1"]
    with pytest.raises(ConfigError) as refusal:
        as_resumed("train", through_json(Config()), words, "config.json")
    assert "optim was chosen" in str(refusal.value) and "unknown key 'optim.momentum'" in str(refusal.value)


@pytest.mark.parametrize("choice", ["auto", "live", "plain", "off"])
def test_a_group_that_is_nothing_but_its_choice_is_chosen_anew_by_its_name(choice):
    for word in (f"console={choice}", f"console.kind={choice}"):
        assert from_dict("train", {"console": {"kind": "auto"}}, [word]).console.kind == choice
    assert from_dict("collect", {}, ["logger=none"]).logger.kind == "none"


@pytest.mark.parametrize("word", ["device=cpu", "device.kind=cpu"])
def test_a_device_is_chosen_anew_and_keeps_what_else_was_said_of_it(word):
    saved = {"device": {"kind": "cuda", "train_device": "cuda:1", "graphs": "off"}}
    device = from_dict("train", saved, [word]).device
    assert (device.kind, device.train_device, device.graphs) == ("cpu", "cuda:1", "off")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim.rl=1", "did you mean optim.lr"),
        ("+learning_rate=1", "write optim.lr=1"),
        ("+mine=1", "unknown key 'mine'"),
        ("env=atari", "was chosen when the run began"),
        ("total_frames=many", "total_frames must be a whole number, not 'many'"),
        ("total_frames", "write key=value"),
        ("run.dir=${oc.env:HOME}", "resolver"),
        ("seed=1,2", "is a sweep over several values; give one value$"),
        ("run.dir=a,b", r"""or quote a text twice: 'run\.dir="a,b"'"""),
        ("~seed", "cannot be deleted"),
        ("run.dir=a'b", "quote it twice"),
    ],
)
def test_a_wrong_override_of_a_resume_is_a_sentence(override, words):
    with pytest.raises(ConfigError, match="(?s)" + words):
        from_dict("train", {}, [override])


@pytest.mark.parametrize("text", ["a b", "it's", "off", "1,2", "null", "a=b", "[x", "\\'"])
def test_a_text_that_is_spelled_is_read_as_it_was(text):
    (word,) = spelled("train", {"run.dir": text})
    assert from_dict("train", {}, [word]).run.dir == text


def test_all_mistakes_in_a_saved_file_are_listed():
    with pytest.raises(ConfigError) as refusal:
        from_dict("train", {"seed": "x", "env": {"num": "y"}, "value": {"gamma": []}}, where="config.json")
    assert str(refusal.value).count("config.json") == 3


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("total_frames=${nope}", "total_frames has no value: Interpolation key 'nope' not found"),
        ("total_frames=${total_frames}", "total_frames has no value: Recursive interpolation"),
        ("total_frames='???'", "total_frames is ???, which is no value"),
        ("env.kwargs={a: '???'}", "env.kwargs.a is ???, which is no value"),
        ("run.eval_every=${hydra:job.num}", "run.eval_every has no value"),
        ("env.wrappers=${policy.hidden}", "env.wrappers must be a list, not None"),
        ("policy.hidden=${env.num}", "policy.hidden must be a list of whole numbers or null, not 8"),
        ("optim.kind=sgd", "optim.kind was chosen when the run began and cannot become 'sgd' now"),
    ],
)
def test_a_value_of_a_resume_is_checked_as_that_of_a_command(override, words):
    with pytest.raises(ConfigError) as refusal:
        from_dict("train", through_json(Config()), [override])
    assert str(refusal.value).startswith(words)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"wrappers": "${env.id}"}, "config.json: env.wrappers must be a list, not 'CartPole-v1'"),
        ({"id": "${nope}"}, "env.id has no value: Interpolation key 'nope' not found (config.json)"),
        ({"id": "???"}, "config.json: env.id is ???, which is no value"),
    ],
)
def test_a_saved_reference_is_checked_when_it_is_followed(env, words):
    with pytest.raises(ConfigError) as refusal:
        from_dict("train", {"env": env}, where="config.json")
    assert str(refusal.value).startswith(words)


def test_options_of_choices_that_were_not_made_are_not_kept_and_those_of_older_runs_are_left_out():
    data = through_json(configure("train", ["loss=dqn"]))
    assert "tau" in data["loss"] and "clip_epsilon" not in data["loss"] and "atari" not in data["env"]
    assert set(data["value"]) == {"kind", "gamma", "kwargs"}  # an estimator can be chosen, and nothing reads it
    older = data | {"loss": data["loss"] | {"clip_epsilon": 0.2}, "env": data["env"] | {"atari": {"noop_max": 30}}}
    assert through_json(from_dict("train", older)) == data
    older["loss"]["clip_epsilon"] = 0.3
    with pytest.raises(ConfigError) as refusal:
        from_dict("train", older, where="config.json")
    said = "config.json: unknown key 'loss.clip_epsilon' with loss=dqn; it is an option of loss=ppo_clip"
    assert str(refusal.value) == said
