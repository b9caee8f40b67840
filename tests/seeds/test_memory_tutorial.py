"""The memory tutorial's blocks run here and print what it shows, line for line."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from seed_blocks import Block, run

SEEDED = "import torch\ntorch.manual_seed(0)"  # as the document's first block does
PROBLEM = Block("004", "env_maker = lambda", after="Where the memory goes", preamble=SEEDED)
KNOB_1 = Block("004", "compact_collector = Collector(", needs=(PROBLEM,))
KNOB_2 = Block("004", "rb = ReplayBuffer(", after="Knob 2", needs=(PROBLEM, KNOB_1))
IN_SAMPLE = Block(
    "004", "rb = ReplayBuffer(", after="Knob 2", needs=(PROBLEM, KNOB_1),
    swap=("NextStateReconstructor()", "NextStateReconstructor(source='sample')"),
)  # fmt: skip
ROWS = "traj = sample["
KNOB_3 = Block("004", "env_maker_delta = lambda", after="Knob 3", needs=(PROBLEM, KNOB_1))
KNOB_3_BUFFER = Block("004", "rb_delta = ReplayBuffer(", after="Knob 3", needs=(PROBLEM, KNOB_1, KNOB_3))
KNOB_4 = Block("004", "value_net = TensorDictModule(", after="Knob 4", needs=(PROBLEM, KNOB_1, KNOB_2))
BEFORE = (PROBLEM, KNOB_1, KNOB_2, KNOB_4)
BLOCKS = {
    "the problem": PROBLEM,
    "knob 1": KNOB_1,
    "knob 2, successors in the sample": IN_SAMPLE,
    "knob 2, rows": Block("004", ROWS, after="Knob 2", needs=(PROBLEM, KNOB_1, IN_SAMPLE)),
    "knob 3": KNOB_3,
    "knob 3, in a buffer": KNOB_3_BUFFER,
    "knob 4": KNOB_4,
    "knob 5": Block("004", "gae_shifted = GAE(", after="Knob 5", needs=BEFORE),
    "knob 6": Block("004", "gae_full = GAE(", after="Knob 6", needs=BEFORE),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_block_prints_what_the_tutorial_shows(name):
    ran = run(BLOCKS[name])
    assert ran.printed.strip()
    assert ran.shown.lstrip().startswith(ran.printed.rstrip())


def test_knob_2_as_it_stands_gives_every_successor_that_the_storage_has():
    ran = run(Block("004", ROWS, after="Knob 2", needs=(PROBLEM, KNOB_1, KNOB_2)))
    names, boundaries = ran.names, [19, 39]
    unknown, flagged = ran.printed.splitlines()
    assert flagged == f"rows flagged as trajectory boundaries:  {boundaries}"
    sample, data = names["sample"], names["compact_data"]
    ended = data["next", "done"].squeeze(-1).clone()
    ended[-1] = True  # what follows the last row was never collected
    successor = dict(zip(map(tuple, data["observation"][:-1].tolist()), data["observation"][1:], strict=True))
    lost = {tuple(row) for row in data["observation"][ended].tolist()}
    rows = [i for i, obs in enumerate(sample["observation"].tolist()) if tuple(obs) in lost]
    assert unknown.endswith(f" {rows}") and set(rows) <= set(boundaries)
    for i, obs in enumerate(sample["observation"].tolist()):
        if i not in rows:
            assert torch.equal(sample["next", "observation"][i], successor[tuple(obs)])


@pytest.mark.parametrize(("seed", "rows", "running"), [(138, 1, 1), (135, 2, 0)], ids=["goes on", "ended"])
def test_knob_4_hands_the_estimator_rows_without_a_successor(seed, rows, running):
    seeded = replace(PROBLEM, preamble=f"import torch\ntorch.manual_seed({seed})")  # draws so many such rows
    collected = replace(KNOB_1, needs=(seeded,))
    sampled = replace(KNOB_2, needs=(seeded, collected))
    ran = run(replace(KNOB_4, needs=(seeded, collected, sampled)))
    sample, out = ran.names["sample"], ran.names["out"]
    unknown = sample["next", "observation"].isnan().any(-1)
    assert unknown.sum() == rows
    assert torch.equal(out["approximated"].reshape(-1), unknown & ~sample["next", "terminated"].squeeze(-1))
    assert out["approximated"].sum() == running


def test_knob_7_gives_rows_from_the_disk():
    ran = run(Block("004", "with tempfile.TemporaryDirectory() as tmpdir:", after="Knob 7", needs=(PROBLEM, KNOB_1)))
    assert ran.shown.lstrip().startswith(ran.printed.rstrip()) and "[40]" in ran.printed
