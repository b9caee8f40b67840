"""How text is laid out for people: lines of at most `WIDTH` columns, and tables, on a terminal or as Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:  # a table as Markdown must not wait for rich
    import rich.console
    import rich.table

WIDTH = 120


def wrapped(text: str, indent: int = 2) -> str:
    """Sentences over as many lines as they need; words, such as paths, stay whole, whatever their length.

    Parameters
    ----------
    indent : int
        Blanks before every line but the first.
    """
    wrapper = textwrap.TextWrapper(
        WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrapper.fill(line) for line in text.splitlines())


def page(stream: TextIO | None, width: int | None, piped: int) -> rich.console.Console:
    """Where a verb prints its result: as wide as the terminal, or `piped` columns where there is none.

    Parameters
    ----------
    stream : text file, optional
        `sys.stdout` by default.
    width : int, optional
        Columns, whatever the stream is.
    """
    from rich.console import Console

    console = Console(file=stream, highlight=False, markup=False, width=width)
    if not console.is_terminal and width is None:
        console.width = piped
    return console


def shape_cell(shape: Sequence[int]) -> str:
    """`4x84x84`; a dash where there is none."""
    return "x".join(map(str, shape)) or "-"


def key_cell(key: str, note: str) -> str:
    """A key, with what is said of it in brackets."""
    return f"{key} ({note})" if note else key


@dataclass
class Table:
    """Rows of cells.

    Attributes
    ----------
    columns : sequence of str
        Their headings.
    left : int
        So many columns, the first ones, hold words and are aligned left; the others hold figures.
    rows : list of (cells, strong)
        A strong one is a sum, or stands out otherwise.
    """

    columns: Sequence[str]
    left: int = 1
    rows: list[tuple[Sequence[str], bool]] = field(default_factory=list)

    def add(self, *cells: str, strong: bool = False) -> None:
        """One row; what it leaves open at its end is blank."""
        self.rows.append(([*cells, *[""] * (len(self.columns) - len(cells))], strong))

    def to_rich(self, title: str | None = None) -> rich.table.Table:
        """For a terminal: framed under a title; without one a line under the headings, and long cells folded."""
        from rich import box
        from rich.table import Table as Drawn

        if title is None:
            drawn = Drawn(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="cyan")
        else:
            drawn = Drawn(title=title, title_justify="left")
        for i, name in enumerate(self.columns):
            justify, overflow = "left" if i < self.left else "right", "fold" if title is None else "ellipsis"
            drawn.add_column(name, justify=justify, overflow=overflow)  # type: ignore[arg-type]
        for cells, strong in self.rows:
            drawn.add_row(*cells, style="bold" if strong else None)
        return drawn

    def to_markdown(self) -> list[str]:
        """Its lines as Markdown, which has no strong rows."""
        rule = [" --- " if i < self.left else " ---: " for i in range(len(self.columns))]
        lines = ["| " + " | ".join(self.columns) + " |", "|" + "|".join(rule) + "|"]
        return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells, _ in self.rows]
