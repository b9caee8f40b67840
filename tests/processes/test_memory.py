"""Memory is what the least of all bounds leaves: the machine, control groups and those that hold them, ulimits."""

from __future__ import annotations

import resource
from types import SimpleNamespace

import pytest
from face import refused

from rlcli.processes import memory

MIB = 1 << 20
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """One of 1000 MiB, of which 600 are free, and this process's files: it holds 100 MiB, and 300 of addresses."""
    monkeypatch.setattr(memory, "ROOT", tmp_path)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=600 * MIB, total=1000 * MIB))
    monkeypatch.setattr(
        "psutil.Process", lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=100 * MIB, shared=0))
    )
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    write(tmp_path / "proc/self/status", f"VmSize:\t{300 * 1024} kB\nVmData:\t{200 * 1024} kB\n")
    return tmp_path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def group(folder, names, limit, used, files=0):
    write(folder / names[0], f"{limit if isinstance(limit, str) else limit * MIB}\n")
    write(folder / names[1], f"{used * MIB}\n")
    write(folder / "memory.stat", f"anon 1\n{names[2]} {files * MIB}\n")


def mounted(machine, names, path, root="/"):
    where = "/sys/fs/cgroup" if names is V2 else "/sys/fs/cgroup/memory"
    kind, options, line = ("cgroup2", "rw", "0::") if names is V2 else ("cgroup", "rw,memory", "4:cpu:/\n3:memory:")
    write(machine / "proc/self/mountinfo", f"31 23 0:28 {root} {where} rw shared:1 - {kind} cgroup {options}\n")
    write(machine / "proc/self/cgroup", f"{line}{path}\n")
    return machine / where.lstrip("/")


def test_without_any_bound_the_machine_counts_and_what_the_process_has_is_its_own(machine):
    assert memory.free_memory() == (700 * MIB, 1000 * MIB)


@pytest.mark.parametrize("names", [V1, V2])
@pytest.mark.parametrize(
    ("path", "root", "there"),
    [
        ("/slurm/job_7/step_0", "/", (240, 400)),  # the job's limit, not the step's own and not the root's
        ("/docker/a", "/docker/a", (250, 900)),  # the mount shows the container's part alone
        ("/../elsewhere", "/", (250, 900)),  # outside of what the mount shows
    ],
)
def test_the_least_over_a_group_and_all_that_hold_it(machine, names, path, root, there):
    top = mounted(machine, names, path, root)
    group(top, names, 900, 750)
    group(top / "slurm", names, "max" if names is V2 else str(9223372036854771712), 0)
    group(top / "slurm/job_7", names, 400, 280, files=20)
    group(top / "slurm/job_7/step_0", names, 800, 250)
    free, total = memory.free_memory()
    assert (free // MIB, total // MIB) == there
    assert all(str(top) in who for _, _, who in memory.limits()[1:])


@pytest.mark.parametrize(("which", "free"), [("RLIMIT_AS", 200), ("RLIMIT_DATA", 300)])
def test_ulimits_bound_addresses_and_data_of_which_some_are_taken(machine, monkeypatch, which, free):
    of = {getattr(resource, which): 400 * MIB}
    monkeypatch.setattr(resource, "getrlimit", lambda each: (of.get(each, resource.RLIM_INFINITY),) * 2)
    assert memory.free_memory() == (free * MIB, 400 * MIB)
    assert memory.limits()[1][2] == {"RLIMIT_AS": "ulimit -v", "RLIMIT_DATA": "ulimit -d"}[which]


@pytest.mark.parametrize(
    ("text", "count"),
    [("2GiB", 2 << 30), ("2 GiB", 2 << 30), ("1.5g", 3 << 29), ("800MB", 800_000_000), ("512", 512), ("3 kib", 3072)],
)
def test_sizes_are_read_as_people_write_them(text, count):
    assert memory.bytes_in(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "3x", "-2GiB", "1.2.3", "2GiBs"])
def test_what_is_no_size_is_refused(text):
    refused(ValueError, "size", lambda: memory.bytes_in(text))
