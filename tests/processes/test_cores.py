"""Cores are those that the process may run on, or the least share that its control groups have of them."""

from __future__ import annotations

import os

import pytest

from rlcli.processes import memory
from rlcli.processes.process import cores


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """One of eight cores, with the files of a process in the group /slurm/job_7 of both versions."""
    monkeypatch.setattr(memory, "ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    process = tmp_path / "proc/self"
    process.mkdir(parents=True)
    (process / "cgroup").write_text("2:cpu,cpuacct:/slurm/job_7\n0::/slurm/job_7\n")
    (process / "mountinfo").write_text(
        "31 23 0:28 / /groups/cpu rw - cgroup cgroup rw,cpu,cpuacct\n32 23 0:29 / /groups/all rw - cgroup2 cgroup2 rw\n"
    )
    for version in ("cpu", "all"):
        (tmp_path / "groups" / version / "slurm/job_7").mkdir(parents=True)
    return tmp_path / "groups"


@pytest.mark.parametrize("group", [".", "slurm", "slurm/job_7"])
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
def test_a_quota_of_cgroup_2(machine, text, there, group):
    (machine / "all" / group / "cpu.max").write_text(text)
    assert cores() == there


@pytest.mark.parametrize("group", [".", "slurm", "slurm/job_7"])
@pytest.mark.parametrize(("quota", "there"), [("-1", 8), ("300000", 3)])
def test_a_quota_of_cgroup_1(machine, quota, there, group):
    (machine / "cpu" / group / "cpu.cfs_quota_us").write_text(quota)
    (machine / "cpu" / group / "cpu.cfs_period_us").write_text("100000")
    assert cores() == there


def test_the_least_of_all_groups_counts(machine):
    for group, quota in {".": "600000", "slurm": "200000", "slurm/job_7": "max"}.items():
        (machine / "all" / group / "cpu.max").write_text(f"{quota} 100000\n")
    assert cores() == 2


def test_without_one(machine):
    assert cores() == 8
