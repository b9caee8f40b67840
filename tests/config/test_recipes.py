"""Recipes ship with the package, compose without a problem, and can be a user's own."""

import pytest
from face import Config, configure, find_recipes, leaves, refused

from rlcli.config import guard, registry
from rlcli.config.choices import CHOICES
from rlcli.config.compose import plan
from rlcli.config.option import groups
from rlcli.config.recipes import choice_file, shipped, tuned_recipe
from rlcli.config.registry import choices
from rlcli.config.resolved import flat
from rlcli.errors import ConfigError

SHIPPED = find_recipes()
NAMES = {
    "ppo_compact",
    "ppo_full",
    "ppo_exact",
    "ppo_kl",
    "ppo_shifted",
    "ppo_delta",
    "recipe_a",
    "recipe_b",
    "a2c_cartpole",
    "reinforce_cartpole",
    "ppo_halfcheetah",
    "ppo_pong",
    "collect_random",
    "collect_policy",
}


def test_the_promised_recipes_are_there():
    assert set(SHIPPED) >= NAMES


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_composes_and_its_header_says_how_to_run_it(name, tmp_path, monkeypatch):
    monkeypatch.setattr("rlcli.config.installed.has", lambda package: True)  # whatever it is that is installed here
    recipe = SHIPPED[name]
    overrides = [f"recipe={name}"] + ([f"policy.path={tmp_path}"] if name == "collect_policy" else [])
    assert configure(recipe.verb, overrides).recipe == name
    text = "\n".join(recipe.header)
    assert f"rlcli {recipe.verb} recipe={name}" in text
    assert "figures:" in text


def test_the_three_ppo_recipes_differ_only_in_memory():
    one, *others = (configure("train", [f"recipe=ppo_{kind}"]) for kind in ("full", "compact", "exact"))
    for other in others:
        assert other.memory != one.memory
        other.memory, other.recipe = one.memory, one.recipe
        assert other == one


def write(folder, name, text):
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.yaml").write_text(text)


def test_recipes_beside_the_user_are_found_and_build_on_ours(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "recipes", "mine", "defaults: [ppo_exact]\nenv: {num: 3}\n")
    cfg = configure("train", ["recipe=mine"])
    assert (cfg.recipe, cfg.env.num, cfg.memory.next_obs, cfg.optim.lr) == ("mine", 3, "exact", 1e-3)
    refused(ConfigError, "./recipes/mine.yaml recipe=mine", lambda: configure("train", ["recipe=./recipes/mine.yaml"]))


@pytest.mark.parametrize("word", ["recipe=null", "recipe='null'"])
def test_a_recipe_that_is_called_null_is_not_passed_over_in_silence(word, tmp_path):
    write(tmp_path, "null", "seed: 7")
    with pytest.raises(ConfigError, match="a recipe is called null; give its file another name"):
        configure("train", [word], [tmp_path])
    assert configure("train", ["recipe=null"]).seed == 0


def test_a_given_folder_wins_over_the_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "recipes", "ppo_exact", "seed: 1")
    write(tmp_path / "given", "ppo_exact", "seed: 2")
    assert configure("train", ["recipe=ppo_exact"]).seed == 1
    assert configure("train", ["recipe=ppo_exact"], [tmp_path / "given"]).seed == 2


def test_a_package_announces_recipes_without_being_imported(tmp_path, monkeypatch):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "__init__.py").write_text("raise RuntimeError('imported')")
    write(tmp_path / "theirs" / "recipes", "their_recipe", "seed: 7")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "recipe_packages", lambda: ["theirs"])
    assert configure("train", ["recipe=their_recipe"]).seed == 7


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("env: {nmu: 3}", "unknown key 'env.nmu'; did you mean env.num?"),
        ("env: {num: many}", "env.num must be a whole number, not 'many'"),
        ("n_steps: 64", "unknown key 'n_steps'; write collector.frames_per_batch=512"),
        ("env: gym", "env holds keys, not 'gym'"),
        ("enve: {num: 3}", "unknown key 'enve'"),
        ("defaults: [ppo_exactt]", "unknown recipe 'ppo_exactt'; did you mean ppo_exact"),
        ("defaults: [{override /memory: exct}]", "unknown memory 'exct'; did you mean exact?"),
        ("defaults: [{memory: exact}]", "not accepted in defaults"),
        ("memory: {next_obs: compact}", "contradict"),
        ("loss: {kind: sac}", "loss.kind follows from the choice; write defaults: [override /loss: sac]"),
        ("optim: {kind: sgd}", "optim.kind follows from the choice; write defaults: [override /optim: sgd]"),
        ("defaults: [override /console: off]", "on, off, yes and no are no text in YAML; write 'off'"),
        ("recipe: ppo_exact", "recipe is chosen in defaults; write defaults: [ppo_exact]"),
        ("seed: ???", "seed is ???, which is no value"),
        ("policy: {hidden: ['???']}", "policy.hidden.0 is ???, which is no value"),
        ("env: ???", "env is ???, which is no value"),
        ("seed: 010", "010 is 8 in YAML"),
        ("total_frames: 1:30", "1:30 is 90 in YAML"),
        ("run: {dir: 12:30}", "12:30 is 750 in YAML (FILE). Write the number, or '12:30' for the text"),
        ("env.num: 3", "env.num is one key, with a dot in it; write env: {num: ...}"),
        ("env: {atari.noop_max: 3}", "write env: {atari: {noop_max: ...}}"),
        ("hydra: {run: {dir: null}}", "hydra.run.dir is the name of a folder, not None"),
        ("hydra: {sweeper: {params: [1]}}", "hydra.sweeper.params holds `key: values` lines"),
        ("policy: {hidden: '${env.num}'}", "composed (recipe/wrong): Interpolation key 'env.num' not found"),
        ("env: {id: '${now:}'}", "holds a resolver that is not accepted"),
    ],
)
def test_a_mistake_in_a_recipe_is_a_sentence(text, words, tmp_path):
    write(tmp_path, "wrong", text)
    with pytest.raises(ConfigError) as refusal:
        configure("train", ["recipe=wrong"], [tmp_path])
    assert words.replace("FILE", str(tmp_path / "wrong.yaml")) in str(refusal.value)
    assert "contradict" in words or "composed" in words or "wrong.yaml" in str(refusal.value)


def test_whole_numbers_of_a_recipe_may_be_written_with_an_exponent(tmp_path):
    write(tmp_path, "long", "total_frames: 1e5\nenv: {num: 2e1}\npolicy: {hidden: [6.4e1]}\nseed: 1_000\n")
    cfg = configure("train", ["recipe=long"], [tmp_path])
    assert repr((cfg.total_frames, cfg.env.num, cfg.policy.hidden, cfg.seed)) == "(100000, 20, [64], 1000)"


def test_a_recipe_of_another_verb_says_so():
    with pytest.raises(ConfigError, match="this recipe is for rlcli train") as refusal:
        configure("collect", ["recipe=dqn_recurrent"])
    assert str(refusal.value).endswith("it sets storage, sampler, loss, value, optim")
    refused(ConfigError, "ppo_exact ppo_compact ppo_compact.yaml", lambda: configure("collect", ["recipe=ppo_exact"]))
    with pytest.raises(ConfigError, match="use rlcli collect"):
        configure("train", ["recipe=collect_random"])


def test_recipes_that_build_on_each_other_in_a_circle_are_refused(tmp_path):
    write(tmp_path, "a", "defaults: [b]")
    write(tmp_path, "b", "defaults: [a]")
    with pytest.raises(ConfigError):
        configure("train", ["recipe=a"], [tmp_path])


# ---- the choices in conf/ -----------------------------------------------------------------------------------------
CHOSEN = [group for group in groups(Config) if f"{group}.kind" in leaves(Config)]


@pytest.mark.parametrize("group", CHOSEN)
def test_every_choice_of_a_group_is_composed_and_a_file_says_what_it_sets(group):
    files = {path.stem: path for path in (shipped("conf") / group).glob("*.yaml")}
    assert files.keys() <= set(choices(Config, group))
    for name in choices(Config, group):
        assert choice_file(group, name)[0][group]["kind"] == name
    for name, path in files.items():
        assert path.read_text().startswith("# ")
        read = guard.read_yaml(path)  # as Hydra has it
        read.pop("defaults", None)
        assert choice_file(group, name)[0] in (read, {group: read})


def test_a_choice_that_learns_from_stored_rows_needs_no_file_to_say_so(monkeypatch):
    new = {"iql": CHOICES["loss"]["dqn"], "sarsa": CHOICES["loss"]["ppo_clip"]}
    monkeypatch.setitem(CHOICES, "loss", CHOICES["loss"] | new)
    monkeypatch.setitem(registry._OURS, "algorithm", registry._OURS["algorithm"] | dict.fromkeys(new, "a:b"))
    choice_file.cache_clear()
    assert choice_file("loss", "iql") == ({"loss": {"kind": "iql"}}, {"storage": "tensor", "sampler": "random"})
    assert choice_file("loss", "sarsa") == ({"loss": {"kind": "sarsa"}}, {})
    cfg = configure("train", ["loss=iql"])
    assert (cfg.loss.kind, cfg.storage.kind, cfg.sampler.kind) == ("iql", "tensor", "random")


@pytest.mark.parametrize("path", sorted(shipped("conf").glob("*/*.yaml")), ids=lambda path: path.stem)
def test_a_choice_holds_only_what_differs_from_the_schema(path):
    said = dict(flat(Config, choice_file(path.parent.name, path.stem)[0]))
    repeats = [
        key
        for key, value in said.items()
        if value == leaves(Config)[key].default and not key.endswith(("kind", "next_obs"))
    ]
    assert not repeats


def test_what_a_recipe_builds_on_cannot_come_after_it(tmp_path):
    (tmp_path / "late.yaml").write_text("defaults: [_self_, ppo_exact]\ntotal_frames: 7\n")
    refused(ConfigError, "_self_", lambda: configure("train", ["recipe=late"], [tmp_path]))
    (tmp_path / "late.yaml").write_text("defaults: [ppo_exact, _self_]\ntotal_frames: 7\n")
    cfg = configure("train", ["recipe=late"], [tmp_path])
    assert (cfg.recipe, cfg.total_frames) == ("late", 7)


def test_what_a_recipe_sweeps_over_is_checked_before_the_first_job(tmp_path):
    (tmp_path / "swept.yaml").write_text("defaults: [ppo_exact]\nhydra: {sweeper: {params: {loss.tau: '0.1,0.2'}}}\n")
    refused(ConfigError, "loss.tau loss=ppo_clip", lambda: plan("train", ["recipe=swept"], [tmp_path], multirun=True))


@pytest.mark.parametrize(
    ("env_id", "loss", "recipe"),
    [("Walker2d-v5", "ppo_clip", "ppo_mujoco"), ("Walker2d-v5", "sac", "sac_mujoco"),
     ("Acrobot-v1", "ppo_kl", "ppo_classic"),
     ("Acrobot-v1", "dqn", None), ("Taxi-v4", "ppo_clip", None), ("Unknown-v0", "ppo_clip", None)],
)  # fmt: skip
def test_a_family_of_environments_has_its_recipe(env_id, loss, recipe):
    assert tuned_recipe(env_id, loss) == recipe
