"""Whatever a recipe holds, it composes or is refused in a sentence; nothing else is raised."""

import os

import pytest
import yaml
from face import Config, configure, leaves
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcli.config.guard import parse_yaml
from rlcli.config.option import branches
from rlcli.errors import ConfigError

WORDS = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**6), 10**12), st.floats(), st.text(max_size=8),
    st.sampled_from(["CartPole-v1", "${env.num}", "${oc.env:HOME}", "auto", "_target_", "a(b)", "exact"]),
)  # fmt: skip
VALUES = st.recursive(
    WORDS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)
KNOWN = sorted([*leaves(Config), *branches(Config), "defaults", "hydra.run.dir"])
KEYS = st.one_of(st.sampled_from(KNOWN), st.text(max_size=8))


def nested(pairs: dict) -> dict:
    """Dotted keys as a tree; where one key needs another to be a mapping that is not, the later wins."""
    tree: dict = {}
    for key, value in pairs.items():
        *path, name = key.split(".")
        node = tree
        for part in path:
            if not isinstance(node.get(part), dict):
                node[part] = {}
            node = node[part]
        node[name] = value
    return tree


def composes_or_is_refused(pairs: dict, folder) -> None:
    (folder / "fuzzed.yaml").write_text(yaml.safe_dump(nested(pairs), allow_unicode=True), encoding="utf-8")
    try:
        assert configure("train", ["recipe=fuzzed"], [folder]).recipe == "fuzzed"
    except ConfigError as error:
        assert str(error)


@settings(max_examples=50)
@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_a_fuzzed_recipe_composes_or_is_refused(tmp_path_factory, pairs):
    composes_or_is_refused(pairs, tmp_path_factory.getbasetemp())


@pytest.mark.slow
@settings(max_examples=int(os.environ.get("FUZZ", "10000")), derandomize=False, print_blob=True)
@given(st.dictionaries(KEYS, VALUES, max_size=6))
def test_ten_thousand_fuzzed_recipes_compose_or_are_refused(tmp_path_factory, pairs):
    composes_or_is_refused(pairs, tmp_path_factory.getbasetemp())


@settings(max_examples=300)
@given(st.text(st.characters(codec="utf-8"), max_size=60))
def test_a_fuzzed_text_is_a_mapping_or_refused(text):
    try:
        assert isinstance(parse_yaml(text, "x.yaml"), dict)
    except ConfigError as error:
        assert "x.yaml" in str(error)


@settings(max_examples=300)
@given(st.lists(st.sampled_from(list("{}[],:&*!-?|>'\"#%@`\n ab1")), max_size=20).map("".join))
def test_a_text_of_yaml_signs_is_a_mapping_or_refused(text):
    try:
        assert isinstance(parse_yaml(text, "x.yaml"), dict)
    except ConfigError as error:
        assert "x.yaml" in str(error)
