"""Packages that fetch their names when they are used offer all of them, and load no more than was asked for."""

import importlib
from pathlib import Path

import pytest
from forked_programs import run_forked

import rlcli

ROOT = Path(rlcli.__file__).parents[1]
PACKAGES = sorted(
    ".".join(path.relative_to(ROOT).parts[:-1])
    for path in (ROOT / "rlcli").rglob("__init__.py")
    if "__all__ = lazily(__name__)" in path.read_text(encoding="utf-8")
)


def test_packages_are_found():
    assert {"rlcli.data", "rlcli.data.buffer", "rlcli.data.storages"} <= {*PACKAGES}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_is_there_in_dir_and_in_a_star_import(package):
    module, star = importlib.import_module(package), {}
    exec(f"from {package} import *", star)
    assert module.__all__ and {*module.__all__} <= {*dir(module)} and {*module.__all__} <= {*star}
    for name in module.__all__:
        assert getattr(module, name) is star[name]
        assert not (Path(module.__file__).parent / f"{name}.py").exists(), f"importing the file would replace {name}"
    with pytest.raises(AttributeError, match=f"{package}' has no attribute 'nothing'"):
        _ = module.nothing
    with pytest.raises(ImportError):
        exec(f"from {package} import nothing", {})


PROGRAMS = {
    "a file of the data room": "import rlcli.data.next_obs.rows",
    "an attribute": (
        "import rlcli.data\nassert rlcli.data.storages.memmap.LazyMemmapStorage is rlcli.data.LazyMemmapStorage"
    ),
    "training": """
import rlcli
rlcli.train(
    recipe="ppo_exact", total_frames=512, console="off", logger="none",
    collector={"frames_per_batch": 256}, run={"dir": "run", "eval_episodes": 1},
)
""",
    "everything": f"""
import importlib, pkgutil, types, rlcli
for module in pkgutil.walk_packages(rlcli.__path__, "rlcli."):
    if not module.name.startswith(("rlcli.bench.peers", "rlcli.__main__")):
        importlib.import_module(module.name)
for name in {[name for name in rlcli.__all__ if not name.startswith("_")]!r}:
    assert isinstance(getattr(rlcli, name), types.FunctionType), name
packages = [m for name, m in sys.modules.items() if name.startswith("rlcli.") and hasattr(m, "__all__")]
replaced = [f"{{m.__name__}}.{{name}}" for m in packages for name in m.__all__
            if isinstance(getattr(m, name), types.ModuleType)]
assert len(packages) > 9 and not replaced, replaced
""",
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """What gives the modules of rlcli that a fresh process has after it ran a program."""
    programs = {
        name: (f"import sys\n{program}\nprint(*(m for m in sys.modules if m.startswith('rlcli.')))", folder)
        for name, program in PROGRAMS.items()
        if (folder := tmp_path_factory.mktemp("folder"))
    }
    ran = run_forked(programs, tmp_path_factory.mktemp("ran"))

    def of(name):
        assert ran[name].returncode == 0, ran[name].stderr
        return {*ran[name].stdout.split()}

    return of


def below(modules, room, *parts):
    """Those of the modules that are parts of a room."""
    return [name for name in modules if name.startswith(tuple(f"rlcli.{room}{part}" for part in parts))]


def test_one_file_of_the_data_room_loads_no_other_rooms_of_it(loaded):
    found = loaded("a file of the data room")
    rooms = ("buffer", "samplers", "storages", "shared", "collected", "stored", "index", "ring")
    assert "rlcli.data.next_obs.rows" in found and not below(found, "data.", *rooms)


def test_a_file_that_nobody_imported_is_found_as_an_attribute(loaded):
    found = loaded("an attribute")
    assert "rlcli.data.storages.memmap" in found and "rlcli.data.buffer.ensemble" not in found


def test_learning_on_policy_loads_no_buffers(loaded):
    found = loaded("training")
    rooms = ("buffer", "samplers", "shared", "collected", "stored", "index", "ring", "storages.mapped")
    assert {"rlcli.data.files.checkpoint_reader", "rlcli.learning.gradient_ppo"} <= found
    assert not below(found, "data.", *rooms)


def test_learning_on_policy_loads_nothing_of_what_learns_from_buffers(loaded):
    found = loaded("training")
    assert "rlcli.learning.gradient_ppo" in found
    assert not below(
        found, "", "learning.gradient_bootstrapped", *(f"objectives.{a}" for a in ("bootstrap", "dqn", "sac"))
    )


def test_training_loads_nothing_that_only_other_jobs_need(loaded):
    found = loaded("training")
    assert not below(found, "build.", "collecting", "resumed", "init_rows", "plan", "buffer")
    assert not below(found, "jobs.", "collection", "init_policy", "trained_policy")
    assert not below(loaded("training"), "collectors.", "trajectories", "faces")


def test_no_module_takes_the_place_of_a_function(loaded):
    """Nor of a class, in any package that says what it offers.

    In a process of its own: kernels of a GPU are loaded once, as the first to ask wants them.
    """
    assert "rlcli.data.buffer.ensemble" in loaded("everything")
