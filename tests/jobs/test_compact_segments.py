"""`rlcli collect memory=compact`: what was dropped is read off the rows that follow, else filled."""

from __future__ import annotations

import pytest
import torch
from face import refused

import rlcli
from rlcli.data import open_segments
from rlcli.errors import ArgumentError, ConfigError
from rlcli.keys import DONE

SMALL = ["total_frames=300", "collector.frames_per_batch=60", "console=off", "env.num=3"]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def collected(*overrides: str):
    return open_segments(rlcli.collect([*SMALL, *overrides]).path / "data")


@pytest.mark.parametrize("fill", [None, 7])
def test_next_observations_are_those_of_full_but_where_nobody_kept_them(fill):
    compact = collected("memory=compact", *([] if fill is None else [f"memory.fill_value={fill}"]))
    full = collected("memory=full")
    some = False
    for i in range(len(full)):
        got, whole = compact.read_with_next(i)["next", "observation"], full.read(i)["next", "observation"]
        unknown = full.read(i).get(DONE).squeeze(-1).clone()
        unknown[:, -1] |= i == len(full) - 1
        assert torch.equal(got[~unknown], whole[~unknown])
        assert bool((got[unknown].isnan() if fill is None else got[unknown] == fill).all())
        some |= bool(unknown.any())
    assert some
    refused(ArgumentError, "memory=compact", lambda: full.read_with_next(0))


def test_integers_need_a_value_that_their_dtype_holds():
    integers = ["env.id=FrozenLake-v1", "memory=compact"]
    refused(ArgumentError, "fill_value", lambda: collected(*integers).read_with_next(0))
    assert bool((collected(*integers, "memory.fill_value=99").read_with_next(0)["next", "observation"] == 99).any())
    refused(ArgumentError, "fill_value=0.5", lambda: collected(*integers, "memory.fill_value=0.5"))


@pytest.mark.parametrize("overrides", [["memory=exact"], ["memory=full"]])
def test_it_has_no_meaning_elsewhere(overrides):
    refused(ConfigError, "memory.fill_value", lambda: rlcli.collect([*SMALL, *overrides, "memory.fill_value=0"]))
    with pytest.raises(ConfigError, match="rlcli train"):
        rlcli.train(["memory=compact", "memory.fill_value=0", "console=off"])
