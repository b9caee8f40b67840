"""Overrides: mistakes are found all at once, and what is right reaches Hydra in the form it needs."""

import pytest
from face import Config, configure, find_recipes, leaves, refused
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcli.config.compose import plan
from rlcli.config.option import value_at
from rlcli.config.overrides import check_overrides, expand
from rlcli.config.words import parsed, plain, spelled
from rlcli.errors import ConfigError


def complaints(*overrides: str) -> str:
    with pytest.raises(ConfigError) as refusal:
        configure("train", overrides)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "collector.frames_per_bacth=3",
            "unknown key 'collector.frames_per_bacth'; did you mean collector.frames_per_batch?",
        ),
        ("lr=1", "did you mean optim.lr?"),
        ("recipe=ppo_exat", "unknown recipe 'ppo_exat'; did you mean ppo_exact?"),
        ("memory=exat", "unknown memory 'exat'; did you mean exact? (choices: full | compact | exact | delta)"),
        ("env.id=CartPol-v1", "did you mean CartPole-v1"),
        ("env.num=many", "env.num must be a whole number, not 'many'; allowed: >= 1"),
        ("env.num=1.5", "env.num must be a whole number, not 1.5"),
        ("env.num=null", "env.num must be a whole number, not None"),
        ("policy.shared=maybe", "policy.shared must be true or false or null, not 'maybe'"),
        ("policy.hidden=64", "not 64; write policy.hidden=[64]; allowed: >= 1"),
        ("env.info_keys=distance", "not 'distance'; write env.info_keys=[distance]"),
        ("policy.hidden=[64,a]", "policy.hidden must be a list of whole numbers"),
        ("env.kwargs=3", "env.kwargs must be a mapping, not 3"),
        ("env.num", "write key=value"),
        ("env={num:3}", "env.<key>=..."),
        ("env.atari=3", "env.atari holds keys, not 3"),
        ("env.atari={noop:3}", "unknown key 'env.atari.noop'"),
        ("env.kind=atari", "write env=atari"),
        ("~env.num", "a key cannot be deleted"),
        ("~env.kwargs.a", "write env.kwargs={} and what is to stay"),
        ("env.atari={}", "env.atari holds keys, not {}"),
        ("run={}", "run holds keys, not {}"),
        ("seed=1,2", "'seed=1,2' is a sweep over several values; give one value"),
        ("run.dir=a,b", """give one value, or quote a text twice: 'run.dir="a,b"'"""),
        ("policy.hidden=64,32", "give one value, or a list: policy.hidden=[64,32]"),
        ("env.id=:Good", "env.id=:Good is not the id of an env; the colon does not belong there; write Good"),
        ("env.id=Good:", "the colon does not belong there; write Good"),
        ("env.id=:", "the colon does not belong there"),
        ("optim.lr=interval(0,1)", "range(a,b,step)"),
        ("seed=[1", "cannot read 'seed=[1'"),
        ("policy.hidden=(64,64)", "; write 'policy.hidden=[64,64]'"),
        ("env.kwargs={'continuous': True}", "; write 'env.kwargs={continuous:true}'"),
        ("env.wrappers=[A, B: {scale: 2}, {C: {n: 1}}]", "; write 'env.wrappers=[A,{B:{scale:2}},{C:{n:1}}]'"),
        ("collector.frames_per_batch=100000000000", "is more than total_frames=100,000; use 100000 at most"),
        ("env.num=10000000", "allowed: >= 1 and <= 1000000"),
        ("env.id=a=b", """quote it twice: 'env.id="a=b"'"""),
        ("env..num=3", "cannot read 'env..num=3'; write key=value"),
        ("~env", "give it another value: env=..."),
        ("+learning_rate=3e-2", "unknown key 'learning_rate'; write optim.lr=0.03"),
        ("++mine.a=1", "unknown key 'mine.a'"),
        ("env.render_mode=human", "an argument of its own: env.kwargs.render_mode=human"),
        ("env=CartPole-v1", "unknown env 'CartPole-v1'; write env.id=CartPole-v1"),
        ("env=ALE/Pong-v5", "write env=atari env.id=ALE/Pong-v5"),
        ("policy=MlpPolicy", "write policy=mlp"),
        ("loss=DQN", "write loss=dqn"),
        ("seed=" + "9" * 100_000, "...'; it has 100,005 characters"),
        ("env.kwargs.a=" + "[" * 3_000 + "]" * 3_000, "nested deeper than 16 levels"),
        ("collector=multi_snyc", "unknown collector 'multi_snyc'; did you mean multi_sync or multi_async?"),
    ],
)
def test_a_wrong_override_is_a_sentence(override, words):
    assert words in complaints(override)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["policy.hidden=[256,", "256]", "seed=x"], "quotes: 'policy.hidden=[256,256]'"),
        (["total_frames", "=", "100", "seed=x"], "'total_frames = 100': there are no spaces around =; write total_fr"),
        (["total_frames=", "100", "seed=x"], "; write total_frames=100"),
        (["total_frames", "=100", "seed=x"], "; write total_frames=100"),
    ],
)
def test_what_was_cut_at_its_spaces_is_put_together(words, said):
    _, problems = check_overrides(Config, words, ())
    assert len(problems) == 2 and said in str(problems[0]) and "seed must be" in str(problems[1])


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("run.dir=größe/x", "größe/x"),
        ("run.dir=日本/語", "日本/語"),
        ("env.kwargs.name=Ünï", "Ünï"),
        ("run.dir=~/a b", "/home/me/a b"),
        ("run.dir='~/größe'", "/home/me/größe"),
        ("storage.scratch_dir=~/x", "/home/me/x"),
        ("env.kwargs.path=~/x", "~/x"),  # not ours to say
    ],
)
def test_letters_of_any_script_and_the_home_folder_are_read(monkeypatch, word, value):
    monkeypatch.setenv("HOME", "/home/me")
    checked, problems = check_overrides(Config, [word], ())
    assert not problems and parsed(checked[0].text).value() == value == plain(checked[0].values[0])


def test_a_number_is_not_told_to_be_quoted():
    assert complaints("seed=1,2").endswith("give one value")


def test_all_mistakes_are_told_at_once_those_between_options_too():
    text = complaints("env.nm=3", "seed=x", "memory=exact", "memory.next_obs=compact", "optim.lr=-1", "env=gim")
    assert text.startswith("5 problems") and text.count("\n  - ") == 5


@pytest.mark.parametrize(
    "words",
    [
        ["policy=nope", "policy.hidden=[3]", "policy.path=x"],
        ["storage=nope", "storage.max_size=3"],
        ["storage=nope", "loss=dqn", "sampler=random"],
        ["loss=nope", "loss.tau=0.1"],
        ["loss=nope", "loss.kwargs.a=1"],
        ["sampler=nope", "sampler.slice_len=3"],
        ["env=nope", "env.atari.noop_max=3"],
        ["memory=nope", "memory.delta_dtype=int8"],
        ["memory.next_obs=nope", "memory.delta_dtype=int8"],
        ["optim=nope", "optim.momentum=0.3"],
        ["value=nope", "value.lmbda=0.5"],
        ["recipe=nope", "loss.tau=0.1", "sampler=random"],
        ["value.average=flase", "value.average_over=batch"],
        ["collector.frames_per_batch=64k", "sampler.batch_size=4096"],
        ["env.num=many", "env.workers=12"],
    ],
)
def test_what_cannot_be_used_is_the_only_problem_not_what_its_default_would_have_to_do_with_the_rest(words):
    text = complaints(*words)
    assert "\n" not in text and words[0].partition("=")[2] in text


def test_a_choice_that_there_is_not_hides_no_problem_of_another_key():
    text = complaints("storage=nope", "loss=dqn", "env.id=CartPol-v1", "env.num=0", "policy=random")
    assert text.startswith("4 problems")


def test_memory_exact_with_another_next_obs_says_that_they_contradict():
    assert "memory=exact and memory.next_obs=compact contradict" in complaints(
        "memory=exact", "memory.next_obs=compact"
    )


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("env.kwargs=${seed}", "env.kwargs must be a mapping, not 0"),
        ("env.wrappers=${seed}", "env.wrappers must be a list, not 0"),
        ("env.wrappers=${env.kwargs}", "env.wrappers must be a list, not {}"),
        ("env.transforms=${env.id}", "env.transforms must be a list, not 'CartPole-v1'"),
        ("logger.kwargs=${env.wrappers}", "logger.kwargs must be a mapping, not []"),
        ("policy.hidden=${optim.betas}", "policy.hidden must be a list of whole numbers"),
        ("optim.betas=${seed}", "optim.betas must be a list of numbers"),
        ("memory.keep=${env.id}", "memory.keep must be a list, not 'CartPole-v1'"),
    ],
)
def test_what_an_interpolation_puts_for_a_list_or_a_mapping_is_one(override, words):
    assert words in complaints(override)


def test_an_interpolation_may_give_a_list():
    assert configure("train", ["policy.hidden=[32]", "env.kwargs.widths=${policy.hidden}"]).env.kwargs == {
        "widths": [32]
    }
    assert configure("train", ["memory.keep=${env.wrappers}"]).memory.keep == []


@pytest.mark.parametrize("value", ["abc", "3", "null", "${seed}", "[full]", "{}"])
def test_a_next_obs_that_is_no_preset_is_refused_before_anything_is_composed(value):
    assert "unknown memory.next_obs" in complaints(f"memory.next_obs={value}")


def test_numbers_for_next_obs_are_refused_in_a_sweep_too():
    refused(ConfigError, "memory.next_obs", lambda: plan("train", ["memory.next_obs=range(1,3)"], multirun=True))


@pytest.mark.parametrize("mode", ["full", "compact", "exact"])
def test_next_obs_alone_is_the_preset_of_that_name(mode):
    memory = configure("train", ["recipe=ppo_full", f"memory.next_obs={mode}"]).memory
    assert (memory.kind, memory.next_obs) == (mode, mode)


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_a_mapping_meets_the_checks_that_its_single_options_meet(plus):
    for words in (["env.atari={noop_max:3}"], ["env.atari={noop_max:30}"], ["env={atari:3}"], ["env.atari={noop:3}"],
                  ["run={keep:1}"], ["weights={swap:never}"], ["weights={swap:3,swop:4}"]):  # fmt: skip
        assert complaints(plus + words[0])
    assert "run.keep is 1" in complaints(plus + "run={keep:1}")
    pong = ["env=atari", "env.id=ALE/Pong-v5"]
    assert configure("train", [*pong, plus + "env.atari={noop_max:3e0,screen_size:42}"]) == configure(
        "train", [*pong, "env.atari.noop_max=3", "env.atari.screen_size=42"]
    )
    assert configure("train", [plus + "run={keep:3,dir:runs/x}"]).run.keep == 3


def test_a_sweep_over_mappings_meets_them_too():
    words = ["env.atari={noop_max:3e0},{noop_max:4}"]
    assert plan("train", ["env=atari", "env.id=ALE/Pong-v5", *words], multirun=True).sweep
    refused(ConfigError, "env.atari env=gym env=atari", lambda: plan("train", words, multirun=True))


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("env.kwargs={a: 1},{a: 2, b: [x]}", "env.kwargs", [{"a": 1}, {"a": 2, "b": ["x"]}]),
        ("env.kwargs={a: 1},{}", "env.kwargs", [{"a": 1}, {}]),
        ("run={keep: 2},{keep: 3}", "run.keep", [2, 3]),
    ],
)
def test_a_sweep_goes_over_mappings_as_a_single_run_takes_one(text, key, values):
    jobs = expand(plan("train", [text], multirun=True).sweep)
    assert [value_at(configure("train", job), key) for job in jobs] == values


def test_what_is_wrong_in_a_mapping_of_a_sweep_is_named_by_its_key():
    with pytest.raises(ConfigError, match=r"unknown key .run\.kep.; did you mean run\.keep"):
        plan("train", ["run={keep: 2},{kep: 3}"], multirun=True)


def test_arguments_of_the_env_need_no_plus():
    cfg = configure("train", ["env.kwargs.render_mode=rgb_array", "env.kwargs.nested.a=1", "+env.num=3"])
    assert cfg.env.kwargs == {"render_mode": "rgb_array", "nested": {"a": 1}} and cfg.env.num == 3


ATARI = {"frameskip": 1, "repeat_action_probability": 0.0}  # what the choice gives


@pytest.mark.parametrize("route", [[], ["hydra.run.dir=${hydra.job.name}"]])
@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["env.kwargs={a: 1}"], ATARI | {"a": 1}),
        (["env.kwargs={}"], {}),
        (["++env.kwargs={}"], {}),
        (["env.kwargs={}", "env.kwargs.a=1"], {"a": 1}),
        (["env.kwargs.a=1", "env.kwargs={}"], {}),
        (["env.kwargs.a.b=1", "env.kwargs={a: {}}"], ATARI | {"a": {}}),
    ],
)
def test_an_empty_mapping_takes_away_what_a_choice_or_a_recipe_gives(words, left, route):
    assert configure("train", ["env=atari", *words, *route]).env.kwargs == left


def test_a_key_that_nothing_reads_is_refused_however_it_is_spelled():
    text = complaints("+learning_rate=3e-2", "+n_steps=64", "++mine=1", "env.num=4")
    assert text.startswith("3 problems") and "write collector.frames_per_batch=256" in text and "+" not in text


@pytest.mark.parametrize(("text", "value"), [("1e5", 100_000), ("2.0", 2), ("1_000", 1000)])
def test_a_whole_number_may_be_written_with_an_exponent(text, value):
    cfg = configure("train", [f"total_frames={text}", "policy.hidden=[64.0,1e2]", "run.max_replay_steps=1e6"])
    assert repr(cfg.total_frames) == repr(value)
    assert repr(cfg.policy.hidden) == "[64, 100]" and repr(cfg.run.max_replay_steps) == "1000000"


@pytest.mark.parametrize("text", ["1.5e0", "1e-3", "nan", "inf", "1e400"])
def test_a_number_that_is_not_whole_is_none(text):
    assert "total_frames must be a whole number" in complaints(f"total_frames={text}")


def test_a_sweep_over_whole_numbers_may_be_written_with_exponents():
    checked, problems = check_overrides(Config, ["total_frames=1e3,2e3"], [], multirun=True)
    assert problems == [] and expand(checked) == [["total_frames=1000"], ["total_frames=2000"]]


def test_a_space_at_the_edge_of_a_name_is_part_of_it():
    cfg = configure("train", ["run.dir= lead", "seed= 3 "])
    assert (cfg.run.dir, cfg.seed) == (" lead", 3)


def test_wrappers_are_written_by_name_with_arguments():
    cfg = configure("train", ["env.wrappers=[ClipAction,{TimeLimit:{max_episode_steps:5}}]"])
    assert cfg.env.wrappers == ["ClipAction", {"TimeLimit": {"max_episode_steps": 5}}]


def test_the_last_of_two_overrides_counts():
    assert configure("train", ["seed=1", "seed=2"]).seed == 2


def test_a_recipe_typed_after_none_or_before_none_is_the_last_one():
    """Hydra's composition ended with an error of Python's."""
    assert configure("train", ["recipe=null", "recipe=ppo_exact"]).recipe == "ppo_exact"
    assert configure("train", ["recipe=ppo_exact", "recipe=null"]).recipe is None
    assert configure("collect", ["recipe=null"]).recipe is None


def test_a_sweep_may_go_over_a_recipe_and_none():
    checked, problems = check_overrides(Config, ["recipe=null,ppo_exact"], find_recipes(), multirun=True)
    assert problems == [] and [configure("train", job).recipe for job in expand(checked)] == [None, "ppo_exact"]


def test_a_sweep_expands_as_hydra_does():
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    texts = [
        "recipe=ppo_full,ppo_exact",
        "seed=range(0,3)",
        "env.num=4",
        "run.dir='a b','c'",
        "optim.betas=[0.9,0.99]",
    ]
    checked, problems = check_overrides(Config, texts, find_recipes(), multirun=True)
    assert problems == []
    (theirs,) = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(texts), None)
    ours = expand(checked)
    parse = OverridesParser.create().parse_overrides
    assert [[(o.key_or_group, o.value()) for o in parse(job)] for job in ours] == [
        [(o.key_or_group, o.value()) for o in parse(job)] for job in theirs
    ]


def test_a_sweep_that_could_never_end_is_refused():
    _, problems = check_overrides(Config, ["seed=range(0,1000000000)"], [], multirun=True)
    assert "more than 10000" in str(problems[0])


@settings(max_examples=200)
@given(st.sampled_from(sorted(leaves(Config))), st.text(st.characters(codec="utf-8"), max_size=12))
def test_whatever_is_typed_is_composed_or_refused_in_a_sentence(key, value):
    checked, problems = check_overrides(Config, [f"{key}={value}"], ["ppo_exact"])
    assert len(checked) + bool(problems) == 1
    for problem in problems:
        assert str(problem)


@settings(max_examples=60)
@given(st.text(st.characters(codec="ascii"), max_size=30))
def test_no_text_at_all_breaks_the_reader(text):
    check_overrides(Config, [text], ["ppo_exact"])


@pytest.mark.parametrize("text", ["seed=range(0,0)", "memory=glob(z*)", "seed=glob(*)"])
def test_a_sweep_over_nothing_is_refused(text):
    checked, problems = check_overrides(Config, [text], ["ppo_exact"], multirun=True)
    assert not checked and "sweeps over no value at all" in str(problems[0])


def test_a_group_may_be_typed_with_a_plus():
    (checked,), problems = check_overrides(Config, ["+env=gym"], [])
    assert (checked.text, problems) == ("env=gym", [])


@pytest.mark.parametrize("typed", ["2024_01_05", "1e3", "true", "0x10", "7", "nan"])
def test_a_text_is_what_was_typed_whatever_number_the_grammar_sees_in_it(typed):
    assert configure("train", [f"run.dir={typed}"]).run.dir == typed
    assert configure("train", [f"hydra.run.dir={typed}"]).run.dir == typed


def test_spaces_around_a_quoted_text_are_no_part_of_it():
    assert configure("train", ["run.dir= 'a b'"]).run.dir == "a b"
    assert configure("train", ["run.dir=null"]).run.dir is None


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run=foo", "run holds keys, not 'foo'; write run.<key>=..."),
        ("weights=x", "weights holds keys, not 'x'"),
        ("hydra.run.dir=x/${hydra:job.name}", "HydraConfig was not set"),
        (f"seed=1{'0' * 400}", "seed is 1000"),
        (f"optim.lr=1{'0' * 400}", "optim.lr must be a number"),
        ("n_steps=1e308", "unknown key 'n_steps'"),
        ("env.wrappers=[{ClipReward:{max_reward:inf}}]", "ClipReward.max_reward is inf; give a finite number"),
        ("env.kwargs.a.b=nan", "env.kwargs.a.b is nan; give a finite number"),
    ],
)
def test_what_no_run_could_take_is_a_sentence(override, words):
    assert words in complaints(override)


def test_what_was_given_to_one_key_stands_in_the_way_of_no_other_command():
    assert configure("train", ["env.kwargs.q=[1]"]).env.kwargs["q"] == [1]
    assert configure("train", ["env.kwargs.q.x=2"]).env.kwargs["q"] == {"x": 2}
    assert "invalid literal" in complaints("env.kwargs.a=[1]", "env.kwargs.a.x=2")


def test_values_that_are_drawn_or_matched_are_the_same_whenever_the_jobs_are_asked_for():
    ready = plan("train", ["seed=shuffle(range(0,9))", "recipe=glob(*ull)", "optim.lr=1e-3"], multirun=True)
    jobs = expand(ready.sweep)
    assert jobs == expand(ready.sweep) and all(job[1:] == ["recipe=ppo_full", "optim.lr=1e-3"] for job in jobs)
    seeds = [job[0] for job in jobs]
    assert sorted(seeds) == [f"seed={n}" for n in range(9)] != seeds


@pytest.mark.parametrize("own", ["hydra.job.override_dirname", "hydra.runtime.cwd"])
def test_a_folder_named_by_hydras_record_of_the_command_follows_it(own, tmp_path, monkeypatch):
    def folder(seed: int) -> str:
        return str(configure("train", [f"hydra.run.dir=x/${{{own}}}", f"seed={seed}"]).run.dir)

    first = folder(1)
    monkeypatch.chdir(tmp_path)
    assert first != folder(2) and (str(tmp_path) in folder(2)) == (own == "hydra.runtime.cwd")


@pytest.mark.parametrize("name", ["x:y", "null", "True", "a.b", "a b", "", 1, "inf"])
def test_a_name_that_would_be_read_as_something_else_is_refused(name):
    for asked in ({"env": {"kwargs": {name: 1}}}, {"env.kwargs": {"k": [{name: 1}]}}):
        with refused(ConfigError, "setting"):
            spelled("train", asked)
    assert spelled("train", {"env": {"kwargs": {"a_b": {"c-d": 1}}}}) == ["env.kwargs={a_b:{c-d:1}}"]
    refused(ConfigError, "a.b", lambda: configure("train", ["env.kwargs={a.b:1}"]))
