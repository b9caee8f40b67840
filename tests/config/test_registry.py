"""A name becomes code only through the registry, and importing happens only when a name is used."""

import inspect
import types
from importlib.metadata import EntryPoint

import pytest
import torch
from face import configure, find_recipes, from_dict, leaves, refusals, refused

from rlcli.config import registry
from rlcli.config.choices import CHOICES
from rlcli.envs import GymEnv
from rlcli.errors import ConfigError
from rlcli.learning.optimizer import OPTIMIZERS


@pytest.fixture(autouse=True)
def own_names(monkeypatch):
    monkeypatch.setattr(registry, "_users", {kind: {} for kind in registry.KINDS})


def test_every_wrapper_of_our_table_exists():
    for name in registry.names("wrapper"):
        assert registry.find("wrapper", name).__name__ == name


OURS = [
    (kind, name) for kind, group in registry.GROUPS.items() for name in CHOICES[group] if CHOICES[group][name].place
]


@pytest.mark.parametrize(("kind", "name"), OURS)
def test_a_part_of_ours_is_what_the_table_says_of_it(kind, name):
    """It is there, says of itself what the table does, and takes the options of its group that it is said to use."""
    part, said = registry.find(kind, name), registry.part(kind, name)
    group = registry.GROUPS[kind]
    assert set(getattr(part, "uses", ())) <= set(registry.reading(group, name))
    for field in ("off_policy", "draws"):
        assert getattr(part, field, getattr(said, field)) == getattr(said, field)
    if kind in ("estimator", "sampler", "storage"):
        some_have = {key for other in CHOICES[group] for key in registry.reading(group, other)}
        some_have -= {"storage.codes", "memory.frame_stack", "sampler.beta_frames"}  # the buffer's, and the loop's
        taken = {f"{group}.{parameter}" for parameter in inspect.signature(part).parameters}
        assert taken & some_have == {f"{group}.{option}" for option in leaves(said.options)} & some_have


@pytest.mark.parametrize("name", sorted(CHOICES["optim"]))
def test_an_optimizer_takes_the_options_that_the_table_says(name):
    some_have = {key for other in CHOICES["optim"] for key in registry.reading("optim", other)}
    taken = {f"optim.{parameter}" for parameter in inspect.signature(OPTIMIZERS[name].func).parameters}
    assert set(registry.reading("optim", name)) == some_have & taken


def test_a_registered_builder_is_found_by_its_name():
    @registry.register_policy("mine")
    def build(observation_spec, action_spec):
        return None

    assert registry.find("policy", "mine") is build
    assert "mine" in registry.names("policy") and registry.users_names("policy") == ("mine",)


def test_a_builder_of_a_policy_gets_what_it_uses():
    from rlcli.build.policy import users_policy

    def build(observation_spec, action_spec, **options):
        got.append(options)
        return torch.nn.Linear(4, 2)

    got, build.uses = [], ("policy.hidden",)
    registry.register_policy("sized")(build)
    cfg = configure("train", ["policy=sized", "policy.hidden=[5]", "policy.kwargs={a: 1}"])
    users_policy(cfg, GymEnv("CartPole-v1"))
    assert got == [{"hidden": [5], "a": 1}]


test_our_names_cannot_be_taken = refusals(
    (ConfigError, "ClipAction", lambda: registry.register_wrapper("ClipAction")),
    (ConfigError, "mlp", lambda: registry.register_policy("mlp")),
    (ConfigError, "RunningNorm", lambda: registry.register_transform("RunningNorm")),
)  # fmt: skip


def test_a_name_is_registered_once():
    def one():
        return 1

    def other():
        return 2

    for register in (registry.register_env, registry.register_policy):
        register("mine")(one)
        register("mine")(one)  # its module was loaded anew
        with refused(ConfigError, "mine"):
            register("mine")(other)


def test_an_entry_point_cannot_take_our_names(monkeypatch):
    class Point:
        name, value = "policy.cnn", "their_package:build"

    registry._entry_points.cache_clear()
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [Point()])
    try:
        with pytest.warns(UserWarning, match=r"their_package:build announces policy 'cnn'"):
            assert registry.users_names("policy") == ()
    finally:
        registry._entry_points.cache_clear()


def test_an_unknown_name_is_refused_with_the_nearest_and_never_imported():
    with pytest.raises(ConfigError, match="did you mean ClipAction"):
        registry.find("wrapper", "ClipActoin")
    with pytest.raises(ConfigError):
        registry.find("wrapper", "os:system")


def test_an_entry_point_is_known_without_being_loaded(monkeypatch):
    class Point:
        name, value = "policy.theirs", "their_package:build"

        def load(self):
            return "loaded"

    registry._entry_points.cache_clear()
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [Point()])
    try:
        assert registry.users_names("policy") == ("theirs",)
        assert registry.find("policy", "theirs") == "loaded"
    finally:
        registry._entry_points.cache_clear()


def test_a_broken_entry_point_is_named_and_stands_in_nobodys_way(monkeypatch):
    def point(name, value):
        return EntryPoint(name, value, "rlcli")

    registry._entry_points.cache_clear()
    announced = [point("policy.theirs", "no_such_package:build"), point("recipes.theirs", "no_such_package.sub")]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: announced)
    try:
        refused(ConfigError, "no_such_package:build", lambda: registry.find("policy", "theirs"))
        with pytest.warns(UserWarning, match=r"recipes of no_such_package\.sub are left out"):
            assert "ppo_exact" in find_recipes()
    finally:
        registry._entry_points.cache_clear()


def test_a_package_of_the_working_folder_can_be_imported(tmp_path, monkeypatch):
    (tmp_path / "my_names.py").write_text(
        "from rlcli import register_policy\n@register_policy('from_package')\ndef f(o, a): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    registry.import_package("my_names")
    assert registry.users_names("policy") == ("from_package",)


test_refused = refusals(
    ("a name is one word", ConfigError, "word", lambda: registry.register_env("my.env:Thing")),
    ("a package that is not there is a sentence", ConfigError, "not_there_at_all",
     lambda: registry.import_package("not_there_at_all")),
)  # fmt: skip


def test_a_part_may_name_arguments_of_its_own_among_what_it_uses():
    @registry.register_sampler("mine")
    class Mine:
        uses = ("sampler.alpha", "sampler.kwargs")

    chosen = from_dict("train", {"sampler": {"kind": "mine", "alpha": 0.3, "kwargs": {"nearest": 2}}}).sampler
    assert registry.arguments("sampler", chosen) == {"alpha": 0.3, "nearest": 2}
    assert from_dict("train", {"sampler": {"kind": "mine"}}).sampler.alpha == 0.6 and not hasattr(chosen, "beta")


def test_a_part_that_uses_all_options_of_a_choice_has_its_checks():
    @registry.register_sampler("mine")
    class Mine:
        uses = registry.reading("sampler", "slice")

    made = {"kind": "mine", "slice_len": 5}
    (problem, *_) = from_dict("train", {"sampler": made}).sampler.problems()
    assert "is no multiple of sampler.slice_len=5" in problem.what


def test_an_algorithm_has_the_options_that_its_bases_use_and_reading_others_is_a_sentence():
    class Base:
        uses = ("loss.tau",)

    @registry.register_algorithm("mine")
    class Mine(Base):
        uses = ("loss.double",)

    options = from_dict("train", {"loss": {"kind": "mine", "double": True}}).loss
    assert options.double and options.tau == 1 and not hasattr(options, "n_steps")
    with refused(ConfigError, "mine n_steps uses"):
        print(options.n_steps)


@pytest.mark.parametrize(
    ("uses", "words"),
    [
        (("loss.tua",), "uses mine loss.tua mean loss.tau?"),
        ("loss.tau", "uses mine ('loss.tau',)"),
    ],
)
def test_what_a_part_uses_are_keys(uses, words):
    registry.register_algorithm("mine")(types.SimpleNamespace(uses=uses))
    with refused(ConfigError, words):
        from_dict("train", {"loss": {"kind": "mine"}})
