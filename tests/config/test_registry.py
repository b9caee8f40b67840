"""A name becomes code only through the registry, and importing happens only when a name is used."""

import pytest

from rlcli.config import registry
from rlcli.errors import ConfigError


@pytest.fixture(autouse=True)
def own_names(monkeypatch):
    monkeypatch.setattr(registry, "_users", {kind: {} for kind in registry.KINDS})


def test_every_wrapper_of_our_table_exists():
    for name in registry.names("wrapper"):
        assert registry.find("wrapper", name).__name__ == name


def test_a_registered_builder_is_found_by_its_name():
    @registry.register_policy("mine")
    def build(observation_spec, action_spec):
        return None

    assert registry.find("policy", "mine") is build
    assert "mine" in registry.names("policy") and registry.users_names("policy") == ("mine",)


def test_our_names_cannot_be_taken():
    with pytest.raises(ConfigError, match="already a name"):
        registry.register_wrapper("ClipAction")
    with pytest.raises(ConfigError, match="'mlp' is already a name"):
        registry.register_policy("mlp")
    with pytest.raises(ConfigError, match="already a name"):
        registry.register_transform("RunningNorm")


def test_a_name_is_registered_once():
    def one():
        return 1

    def other():
        return 2

    for register in (registry.register_env, registry.register_policy):
        register("mine")(one)
        register("mine")(one)  # its module was loaded anew
        with pytest.raises(ConfigError, match=r"registered twice.*one and by .*other"):
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


def test_a_name_is_one_word():
    with pytest.raises(ConfigError, match="one word"):
        registry.register_env("my.env:Thing")


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


def test_a_package_of_the_working_folder_can_be_imported(tmp_path, monkeypatch):
    (tmp_path / "my_names.py").write_text(
        "from rlcli import register_policy\n@register_policy('from_package')\ndef f(o, a): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    registry.import_package("my_names")
    assert registry.users_names("policy") == ("from_package",)


def test_a_package_that_is_not_there_is_a_sentence():
    with pytest.raises(ConfigError, match="no package 'not_there_at_all'"):
        registry.import_package("not_there_at_all")
