"""Code blocks of the documents that describe rlcli, cut out of their text and run.

The documents lie beside the checkout, not in it.  A block is found by its first line and reaches as far as the text
is Python; what it needs beside itself is stated in its entry, imports are the document's own.  Changed are only: the
import root, `cuda` where there is no GPU, literal `...`, and loops over a collector (stopped after 3); every change is
printed.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import io
import itertools
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

SEEDS = Path(__file__).parents[3] / "shared" / "seeds"
LOOPS = 3


@dataclass(frozen=True)
class Block:
    """One code block.

    Attributes
    ----------
    seed : str
        Number of its document ("004").
    starts : str
        How its first line begins.
    after : str
        Text (a heading, say) after which it is looked for; needed where several blocks begin alike.
    until : str
        How the first line begins that is left to other blocks; the end of what is Python by default.
    needs : tuple of Block
        Blocks that a reader has run before, in the same namespace.
    preamble : str
        Code for names that the document leaves to its reader.
    ellipsis : str
        What a literal `...` among a call's arguments stands for (arguments, as code).
    swap : (str, str)
        A piece of the block's code and what is run in its place, where a choice that rlcli makes otherwise is to be
        made as the document's library makes it; printed with the other changes.
    """

    seed: str
    starts: str
    after: str = ""
    until: str = ""
    needs: tuple[Block, ...] = ()
    preamble: str = ""
    ellipsis: str = ""
    swap: tuple[str, str] | None = None


@dataclass
class Ran:
    """What a block printed, the text that its document shows below it, and the names that it leaves."""

    printed: str
    shown: str
    names: dict[str, Any]


def read_seed(number: str) -> str:
    """The text of a document, or a skip where it is not beside this checkout."""
    found = sorted(SEEDS.glob(f"{number}_*.txt"))
    if not found:
        pytest.skip(f"document {number} is not beside this checkout")
    return found[0].read_text(encoding="utf-8")


def cut(text: str, starts: str, after: str = "", until: str = "") -> tuple[str, str]:
    """A block's code, without prompts and indentation, and the text below it."""
    first, last = span(text, starts, after, until)
    lines = text.splitlines()
    return _source(lines[first:last]), "\n".join(lines[last:])


@functools.cache
def span(text: str, starts: str, after: str = "", until: str = "") -> tuple[int, int]:
    """The lines of a block: the first one's number, and that of the first one below."""
    lines = text.splitlines()
    here = text[: text.index(after)].count("\n")
    first = next((i for i, line in enumerate(lines) if i >= here and _code(line).startswith(starts)), None)
    assert first is not None, f"no line begins with {starts!r} after {after!r}"
    last = next(
        (i for i, line in enumerate(lines) if until and i > first and _code(line).startswith(until)), len(lines)
    )
    ends = [end for end in range(first + 1, last + 1) if _is_code(lines[first:end])]
    assert ends, f"the text at {starts!r} is not Python"
    return first, ends[-1]


def _code(line: str) -> str:
    line = line.strip()
    return line[4:] if line.startswith((">>> ", "... ")) else line


def _source(lines: list[str]) -> str:
    plain = textwrap.dedent("\n".join(lines)).splitlines()
    return "\n".join(line[4:] if line.startswith((">>> ", "... ")) else line for line in plain)


def _is_code(lines: list[str]) -> bool:
    """Whether this is Python to its last line: a word of prose or a printed value would parse, but does nothing."""
    if not lines[-1].strip():
        return False
    try:
        statements = ast.parse(_source(lines)).body
    except SyntaxError:
        return False
    idle = [s for s in statements if isinstance(s, ast.Expr) and not isinstance(s.value, ast.Call)]
    return not idle


def imports_for(text: str, code: str) -> str:
    """The document's own imports of the names that `code` reads."""
    used = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    found = {}
    lines = [line.strip() for line in text.splitlines()]
    for line in lines:
        if not line.startswith(("import ", "from ")):
            continue
        try:
            statement = ast.parse(line).body[0]
        except SyntaxError:
            continue  # prose, or an import that is broken over lines: its block has it
        kept = [name for name in statement.names if (name.asname or name.name) in used]
        if kept:
            statement.names = kept
            found[ast.unparse(statement)] = None
    return "\n".join(found)


class _Changes(ast.NodeTransformer):
    def __init__(self, ellipsis: str) -> None:
        self.ellipsis = ast.parse(f"f({ellipsis})", mode="eval").body

    def visit_Import(self, node):
        for name in node.names:
            name.name = _rooted(name.name)
        return node

    def visit_ImportFrom(self, node):
        node.module = _rooted(node.module)
        return node

    def visit_Constant(self, node):
        if isinstance(node.value, str) and node.value.startswith("cuda") and not torch.cuda.is_available():
            node.value = "cpu"
        return node

    def visit_Call(self, node):
        self.generic_visit(node)
        if any(isinstance(arg, ast.Constant) and arg.value is ... for arg in node.args):
            node.args = [arg for arg in node.args if not (isinstance(arg, ast.Constant) and arg.value is ...)]
            node.args = [*self.ellipsis.args, *node.args]
            node.keywords = [*self.ellipsis.keywords, *node.keywords]
        return node

    def visit_For(self, node):
        self.generic_visit(node)
        if isinstance(node.iter, ast.Name):
            node.iter = ast.parse(f"stopped({node.iter.id})", mode="eval").body
        elif ast.unparse(node.iter) == "enumerate(collector)":
            node.iter = ast.parse("enumerate(stopped(collector))", mode="eval").body
        return node


def _rooted(module: str) -> str:
    return "rlcli" + module.removeprefix("torchrl") if module.split(".")[0] == "torchrl" else module


def changed(code: str, ellipsis: str = "") -> str:
    """The code as it is run here; differences are printed."""
    before = ast.unparse(ast.parse(code))
    after = ast.unparse(ast.fix_missing_locations(_Changes(ellipsis).visit(ast.parse(code))))
    for line in difflib.unified_diff(
        before.splitlines(), after.splitlines(), "in the document", "run here", "", "", 0, ""
    ):
        print(line)
    return after


def run(block: Block) -> Ran:
    """Run a block after those it needs, in one namespace."""
    space = {"stopped": lambda loop: itertools.islice(loop, LOOPS)}
    for part in [*block.needs, block]:
        text = read_seed(part.seed)
        code, below = cut(text, part.starts, part.after, part.until)
        if part.swap is not None:
            assert part.swap[0] in code
            print("# {} -> {}".format(*part.swap))
            code = code.replace(*part.swap)
        whole = "\n".join([part.preamble, imports_for(text, code), code])
        print(f"# preamble: {part.preamble or 'none'}")
        to_run = compile(changed(whole, part.ellipsis), f"seed {part.seed}: {part.starts}", "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(to_run, space)
    return Ran(printed.getvalue(), below, space)
