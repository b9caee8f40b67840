"""All 28 code blocks of the documents by name: where each is run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from seed_blocks import Block, read_seed, span

PAGES, TUTORIAL, RECIPES = "test_buffer_pages.py", "test_memory_tutorial.py", "test_seed_recipes.py"
WORKERS, RECURRENT = "test_worker_pages.py", "test_recurrent_pages.py"

# name -> (block, the file of this folder that runs it)
RUN = {
    "001 single transitions": (Block("001", "memory = ReplayBuffer("), PAGES),
    "001 slices of a single env": (
        Block("001", "memory = ReplayBuffer(", after="# Single environment", until="# Batched"), PAGES,
    ),
    "001 slices of a batched env": (
        Block("001", "memory = ReplayBuffer(", after="# Batched environments", until="# MultiSync"), PAGES,
    ),
    "001 whole trajectories, one process": (
        Block("001", "collector = Collector(", after="Single-process collectors also"), PAGES,
    ),
    "002 a collector in the background": (Block("002", "collector = SyncDataCollector(...,"), PAGES),
    "001 slices of workers": (
        Block(
            "001", "memory = ReplayBuffer(", after="# MultiSyncCollector + regular env",
            until="# MultiSyncCollector + parallel",
        ), WORKERS,
    ),
    "001 slices of workers with batched envs": (
        Block("001", "memory = ReplayBuffer(", after="# MultiSyncCollector + parallel"), WORKERS,
    ),
    "001 whole trajectories of workers": (
        Block("001", "from torchrl.collectors import MultiCollector", after="Synchronous iteration"), WORKERS,
    ),
    "001 whole trajectories in the background": (
        Block("001", "collector = MultiCollector(", after="Asynchronous collection"), WORKERS,
    ),
    "002 weights of several models": (
        Block("002", "from torchrl.collectors import MultiSyncDataCollector"), WORKERS,
    ),
    "003 one buffer per worker": (
        Block("003", "from torchrl.collectors import MultiCollector", after="One buffer per worker"), WORKERS,
    ),
    "003 whole trajectories of workers": (
        Block("003", "from torchrl.collectors import MultiCollector", after="This is what passing the buffer"), WORKERS,
    ),
    "004 the problem": (Block("004", "env_maker = lambda", after="Where the memory goes"), TUTORIAL),
    "004 knob 1": (Block("004", "compact_collector = Collector("), TUTORIAL),
    "004 knob 2": (Block("004", "rb = ReplayBuffer(", after="Knob 2"), TUTORIAL),
    "004 knob 2, rows": (Block("004", "traj = sample[", after="Knob 2"), TUTORIAL),
    "004 knob 3": (Block("004", "env_maker_delta = lambda", after="Knob 3"), TUTORIAL),
    "004 knob 3, in a buffer": (Block("004", "rb_delta = ReplayBuffer(", after="Knob 3"), TUTORIAL),
    "004 knob 4": (Block("004", "value_net = TensorDictModule(", after="Knob 4"), TUTORIAL),
    "004 knob 5": (Block("004", "gae_shifted = GAE(", after="Knob 5"), TUTORIAL),
    "004 knob 6": (Block("004", "gae_full = GAE(", after="Knob 6"), TUTORIAL),
    "004 knob 7": (Block("004", "with tempfile.TemporaryDirectory() as tmpdir:", after="Knob 7"), TUTORIAL),
    "004 knob 8": (Block("004", "collector = Collector(", after="Knob 8"), RECIPES),
    "003 slices for a recurrent policy": (
        Block("003", "from torchrl.data.replay_buffers import SliceSampler", after="The flat 1-D output"), RECURRENT,
    ),
    "003 a recurrent policy for an env": (Block("003", "from torchrl.envs import GymEnv"), RECURRENT),
    "004 knob 9": (Block("004", "from torchrl.modules import GRUModule", after="Knob 9"), RECURRENT),
    "004 recipe A": (Block("004", "collector = Collector(", after="Recipe A"), RECIPES),
    "004 recipe B": (Block("004", "env_maker_delta = lambda", after="Recipe B"), RECIPES),
}  # fmt: skip

# an older page says the same of the same blocks, in older names
REPEATED = {
    "002 single transitions": Block("002", "memory = ReplayBuffer("),
    "002 slices": Block("002", "memory = ReplayBuffer(", after="# Single environment"),
}
IMPORTS = Block("004", "import tempfile")


def test_all_28_blocks_of_the_documents_run():
    assert len(RUN) == 28
    for block, file in RUN.values():
        assert block.starts in (Path(__file__).parent / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("number", ["000", "001", "002", "003", "004"])
def test_no_code_of_a_document_is_left_out(number):
    text = read_seed(number)
    blocks = [block for block, _ in RUN.values()] + [*REPEATED.values(), IMPORTS]
    seen = set()
    for block in blocks:
        if block.seed == number:
            seen |= set(range(*span(text, block.starts, block.after, block.until)))
    code = re.compile(r"\s*(>>> [^#]|\.\.\. |from torchrl|import |\w+ = [\w.]+\()")
    left = [line for i, line in enumerate(text.splitlines()) if code.match(line) and i not in seen]
    assert not left, "\n".join(left)
