"""Lines and tables: one value, spelled for a terminal and as Markdown."""

from __future__ import annotations

import io

from rlcli.report.figures import WIDTH, Table, key_cell, page, shape_cell, wrapped


def a_table() -> Table:
    table = Table(["key", "what", "bytes"], left=2)
    table.add("next.obs", "a|b", "12")
    table.add("= all", strong=True)
    return table


def printed(table: Table, width: int, title: str | None = None) -> list[str]:
    console = page(stream := io.StringIO(), width, piped=0)
    console.print(table.to_rich(title))
    return stream.getvalue().rstrip("\n").split("\n")


def test_markdown_aligns_figures_right_and_keeps_bars_out_of_cells():
    assert a_table().to_markdown() == [
        "| key | what | bytes |",
        "| --- | --- | ---: |",
        "| next.obs | a\\|b | 12 |",
        "| = all |  |  |",
    ]


def test_a_terminal_shows_the_same_cells_and_folds_what_is_too_long():
    lines = printed(a_table(), 40)
    assert [text.split() for text in lines if "obs" in text] == [["next.obs", "a|b", "12"]]
    narrow = printed(a_table(), 14)
    assert max(map(len, narrow)) <= 14 and "".join(text.split()[0] for text in narrow[3:6]) == "next.obs"


def test_a_title_frames_a_table():
    assert "figures" in printed(a_table(), 40, "figures")[0] and "┃" in "".join(printed(a_table(), 40, "figures"))


def test_what_is_piped_has_a_width_of_its_own():
    assert page(io.StringIO(), None, piped=77).width == 77 and page(io.StringIO(), 50, piped=77).width == 50


def test_lines_are_wrapped_between_words_and_paths_stay_whole():
    path = "/tmp/" + "deep-er/" * 30
    lines = wrapped(f"{'word ' * 40}{path}\nanother", indent=4).splitlines()
    assert path.rstrip() in [text.strip() for text in lines] and lines[-1] == "another"
    assert all(len(text) <= WIDTH or text.strip() == path for text in lines) and lines[1].startswith("    word")


def test_cells_of_keys_and_shapes():
    assert (shape_cell((4, 84, 84)), shape_cell(())) == ("4x84x84", "-")
    assert (key_cell("obs", "exact"), key_cell("obs", "")) == ("obs (exact)", "obs")
