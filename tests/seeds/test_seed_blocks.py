"""The extraction itself, on a document made up here."""

from __future__ import annotations

import pytest
import seed_blocks
from seed_blocks import Block, changed, cut, imports_for, run

DOCUMENT = """
A title#

from math import sqrt, floor
import os

Prose about it.

x = 4
for i in forever:
    x = (x +
         1)

print(sqrt(x))
2.6457513110645907

More prose
  • a bullet:

    >>> y = [
    ...     x]
    >>> print(y)

Important

x = 5
"""


@pytest.fixture
def document(tmp_path, monkeypatch):
    (tmp_path / "009_abc.txt").write_text(DOCUMENT)
    monkeypatch.setattr(seed_blocks, "SEEDS", tmp_path)


def test_a_block_reaches_as_far_as_the_text_is_python():
    code, below = cut(DOCUMENT, "x = 4")
    assert code.startswith("x = 4\nfor i") and code.endswith("print(sqrt(x))")
    assert below.startswith("2.6457")


def test_prompts_and_indentation_are_taken_off_and_prose_is_not_code():
    assert cut(DOCUMENT, "y =")[0] == "y = [\n    x]\nprint(y)"
    assert cut(DOCUMENT, "x = ", after="Important")[0] == "x = 5"


def test_only_used_imports_are_taken():
    assert imports_for(DOCUMENT, "sqrt(2)") == "from math import sqrt"


def test_a_missing_block_is_an_error():
    with pytest.raises(AssertionError, match="no line begins with 'z ='"):
        cut(DOCUMENT, "z =")


def test_changes_are_made_and_printed(capsys, monkeypatch):
    monkeypatch.setattr(seed_blocks.torch.cuda, "is_available", lambda: False)
    code = "from torchrl.data import A\nimport torchrl\nc = A(..., n=1, device='cuda:0')\nfor b in c:\n    pass"
    assert changed(code, "1, m=2").splitlines() == [
        "from rlcli.data import A",
        "import rlcli",
        "c = A(1, m=2, n=1, device='cpu')",
        "for b in stopped(c):",
        "    pass",
    ]
    assert "-for b in c:" in capsys.readouterr().out.splitlines()


def test_blocks_run_in_one_namespace_and_endless_loops_end(document):
    first = Block("009", "x = 4", preamble="import itertools\nforever = itertools.count()")
    assert run(first).printed == "2.6457513110645907\n"
    ran = run(Block("009", "y =", needs=(first,)))
    assert ran.printed == "[7]\n" and ran.shown.startswith("\nImportant")


def test_a_document_that_is_not_there_skips(document):
    with pytest.raises(pytest.skip.Exception, match="not beside this checkout"):
        run(Block("123", "x"))
