"""For every test: one thread an operation, hypothesis without a clock, signals as a terminal has them."""

import atexit
import functools
import gc
import importlib.util
import os
import signal
import subprocess
import sys
from collections import Counter

# before anything imports torch or numba; subprocesses inherit it
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes would compile rlcli anew each

if importlib.util.find_spec("pandas") is None:
    sys.modules["pandas"] = None  # tensordict looks for it on the disk whenever a module of it writes a tensor

import pytest
from forked_programs import fork_cheaply
from hypothesis import HealthCheck, settings

settings.register_profile("shared_cores", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared_cores")

sys.dont_write_bytecode = False  # each run would rewrite all assertions anew
# processes are started with the flags of this one: each worker would compile the file of its test
flags = subprocess._args_from_interpreter_flags
subprocess._args_from_interpreter_flags = lambda: [flag for flag in flags() if flag != "-B"]

# a process that dies leaves what it wrote to the system, and no test cuts the power (`disks.LosingDisk` notes what was
# synced): waiting for the disk would only take time
os.fsync = os.fstat

# a suite that was started in the background, or by nohup, would hand on signals that are ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# files of half a minute or more: one that began late would keep one core busy when the other has nothing left
LONGEST = ("planning/test_plan.py", "collectors/test_collector_faults.py", "envs/test_worker_faults.py")
# rooms whose tests fork hundreds of times: with all that is loaded by a suite's end, a fork takes three times as long
FORKING = ("faults", "data/shared")


def pytest_configure(config) -> None:
    # xdist would give out the files with few tests last, which are the slow ones: one core would wait for the other;
    # slow ones that lie beside this file come first, for the same reason
    config.option.loadscopereorder = False
    gc.disable()  # while tests are collected
    atexit.register(gc.unfreeze)  # not before: as it ends, pytest looks through everything five times


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(config, items) -> None:
    seen = Counter()
    for item in items:
        if mark := item.get_closest_marker("every"):
            number = seen[item.parent, item.originalname]
            seen[item.parent, item.originalname] += 1
            if (number + number // mark.args[0]) % mark.args[
                0
            ]:  # each round begins one later: no value of a grid is left out
                item.add_marker(pytest.mark.slow)
    tests = config.rootpath / "tests"
    first = [tests / file for file in LONGEST]

    @functools.cache
    def place(path) -> int:
        if path in first:
            return first.index(path)
        forks = any(tests / folder in path.parents for folder in FORKING)
        return len(first) + (0 if forks else 1 if path.parent == tests else 2)

    items.sort(key=lambda item: place(item.path))  # stable: the others keep their order


def pytest_collection_finish() -> None:
    gc.collect()
    gc.enable()
    # what a file imports late is looked through each time until the next file: with 10 an eighth of the CPU time
    gc.set_threshold(700, 10, 50)


@pytest.fixture(scope="module", autouse=True)
def _imported_stays() -> None:
    """What is imported by now stays: looking through it again and again was a fifth of the suite's time."""
    gc.freeze()
    fork_cheaply()


@pytest.fixture(scope="module", autouse=True)
def _gradients_stay_on():
    """A file that left them off, as an interrupt inside of `torch.no_grad` can, would have later ones fail."""
    yield
    assert "torch" not in sys.modules or sys.modules["torch"].is_grad_enabled()


@pytest.fixture(scope="module", autouse=True)
def _packages_are_of_one_file():
    """Packages that a test imports as a command does are no later file's, whose workers would look for them."""
    from rlcli.config import registry

    before = list(registry.imported)
    yield
    registry.imported[:] = before


@pytest.fixture(scope="module", autouse=True)
def workers_begin_with_what_tests_import():
    """One fork server serves the workers of all collectors and envs, and has imported what tests do."""
    from rlcli.processes import worker

    served, here = worker._served, os.getpid()

    def warm(target, theirs, spawn, preload):
        if os.getpid() == here:  # a fork of this process has a server of its own, which few ask
            preload = ["tests.preloaded" if name.startswith("rlcli.") else name for name in preload]
        return served(target, theirs, spawn, preload)

    worker._served = warm
    yield served
    worker._served = served


@pytest.fixture
def cold_workers(workers_begin_with_what_tests_import, monkeypatch) -> None:
    """Workers of this test begin as a user's do."""
    from rlcli.processes import worker

    monkeypatch.setattr(worker, "_served", workers_begin_with_what_tests_import)
