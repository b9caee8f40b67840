"""`rlcli help TOPIC` prints the pages, a verb's own page, or the list of both."""

from __future__ import annotations

import pytest

from rlcli.cli.help import PAGES, topics


@pytest.mark.parametrize("words", ["help", "help help"])
def test_without_a_topic_it_lists_verbs_and_topics(rlcli, words):
    code, out, _ = rlcli(words)
    assert code == 0 and "usage: rlcli VERB" in out
    assert all(f"\n  {topic} " in out for topic in topics())


@pytest.mark.parametrize("topic", topics())
def test_a_page_is_printed_as_it_is_written_where_nobody_looks_at_it(rlcli, topic):
    code, out, _ = rlcli(f"help {topic}")
    assert code == 0 and out == (PAGES / f"{topic}.md").read_text(encoding="utf-8")


def test_a_verb_has_its_own_page(rlcli):
    assert rlcli("help bench")[1] == rlcli("bench --help")[1]


def test_an_unknown_topic_is_answered_with_the_nearest(rlcli):
    code, _, err = rlcli("help memroy")
    assert code == 2 and "did you mean memory?" in err
    assert "topics are algorithms, benchmarks, buffers," in rlcli("help nothing")[2]
