"""The global random streams: seeded, kept in a file, and put back to the very next number."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from rlcli.runs import checkpoint, random_streams


def draw() -> list:
    """Gaussians too: both of Python's and numpy's streams hold the second half of a pair back."""
    of_numpy = [float(np.random.rand()), float(np.random.normal())]
    return [random.random(), random.gauss(0, 1), *of_numpy, float(torch.rand(()))]


def test_a_checkpoint_brings_every_stream_back_to_the_next_number(tmp_path):
    for k in range(5):
        random_streams.seed(k)
        for _ in range(k):
            draw()
        checkpoint.save(tmp_path, {"random": random_streams.state()}, number=k)
        expected = [draw() for _ in range(700)]  # past the end of the generators' tables
        random_streams.restore(checkpoint.load_latest(tmp_path).state["random"])
        assert [draw() for _ in range(700)] == expected


def test_a_seed_decides_all_of_them_and_large_ones_are_taken():
    for number in (0, 2**32 - 1, 2**40):
        random_streams.seed(number)
        first = draw()
        random_streams.seed(number)
        assert draw() == first
    random_streams.seed(1)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_what_is_drawn_aside_moves_nothing():
    random_streams.seed(3)
    expected = draw()
    random_streams.seed(3)
    with random_streams.kept():
        draw(), draw()
    assert draw() == expected


class Accelerator:
    """Stands in for `torch.cuda`, `torch.mps` or `torch.xpu`: two devices, or one, with a stream each."""

    def __init__(self, kind: str) -> None:
        self.kind, self.used = kind, True
        self.streams = [torch.Generator().manual_seed(k) for k in range(1 if kind == "mps" else 2)]

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.used

    def device_count(self) -> int:
        return len(self.streams)

    def get_rng_state(self, device: str | None = None):
        return self.streams[0 if device is None else torch.device(device).index].get_state()

    def get_rng_state_all(self):
        return [stream.get_state() for stream in self.streams]

    def set_rng_state(self, words, device: str) -> None:
        assert torch.device(device).type == self.kind
        self.streams[torch.device(device).index].set_state(words)

    def draw(self) -> list[float]:
        return [float(torch.rand((), generator=stream)) for stream in self.streams]


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_the_streams_of_an_accelerator_are_brought_back_too(kind, tmp_path, monkeypatch):
    theirs = Accelerator(kind)
    monkeypatch.setattr(torch, kind, theirs)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: kind == "mps")
    checkpoint.save(tmp_path, {"random": random_streams.state()}, number=0)
    saved = checkpoint.load_latest(tmp_path).state["random"]
    expected = theirs.draw()
    random_streams.restore(saved)
    assert theirs.draw() == expected
    del saved[kind]  # of a version that knew of fewer
    random_streams.restore(saved)
    theirs.used = False
    assert kind == "mps" or random_streams.state()[kind] == []


def test_what_is_imported_for_a_console_moves_no_stream():
    """A library may draw when it is imported: rich does, and a run must not depend on where its lines go."""
    program = """
from rlcli.runs import random_streams
import random
import subprocess
import sys
random_streams.seed(3)
before = random.getstate()
import rich.console, rich.live, rich.markdown, rich.progress, rich.table
import rlcli.report.live, rlcli.report.closing, rlcli.report.view
assert random.getstate() == before
"""
    subprocess.run([sys.executable, "-c", program], check=True)
