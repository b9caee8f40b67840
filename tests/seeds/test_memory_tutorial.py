"""The memory tutorial's blocks run here and print what it shows, line for line."""

from __future__ import annotations

import pytest
from seed_blocks import Block, run

PROBLEM = Block("004", "env_maker = lambda", after="Where the memory goes")
KNOB_1 = Block("004", "compact_collector = Collector(", needs=(PROBLEM,))
BLOCKS = {"the problem": PROBLEM, "knob 1": KNOB_1}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_block_prints_what_the_tutorial_shows(name):
    ran = run(BLOCKS[name])
    assert ran.printed.strip()
    assert ran.shown.lstrip().startswith(ran.printed.rstrip())
