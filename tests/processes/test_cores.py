"""Cores are those that the process may run on, or a container's share of them."""

from __future__ import annotations

import os

import pytest

from rlcli.processes import cores


@pytest.fixture
def groups(tmp_path, monkeypatch):
    monkeypatch.setattr(cores, "_GROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "there"),
    [
        ("max 100000\n", 8),
        ("250000 100000\n", 2),
        ("50000 100000\n", 1),
        ("1600000 100000\n", 8),
        ("100000 0\n", 8),
        ("nothing\n", 8),
    ],
)
def test_a_quota_of_cgroup_2(groups, text, there):
    (groups / "cpu.max").write_text(text)
    assert cores.cores() == there


@pytest.mark.parametrize(("quota", "there"), [("-1", 8), ("300000", 3)])
def test_a_quota_of_cgroup_1(groups, quota, there):
    (groups / "cpu").mkdir()
    (groups / "cpu" / "cpu.cfs_quota_us").write_text(quota)
    (groups / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert cores.cores() == there


def test_without_one(groups):
    assert cores.cores() == 8
