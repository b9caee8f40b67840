"""Packages that fetch their names when they are used offer all of them, and load no more than was asked for."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import rlcli

ROOT = Path(rlcli.__file__).parents[1]
PACKAGES = sorted(
    ".".join(path.relative_to(ROOT).parts[:-1])
    for path in (ROOT / "rlcli").rglob("__init__.py")
    if "lazily(__name__)" in path.read_text(encoding="utf-8")
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


def loaded(source):
    """Modules of rlcli that a fresh process has after it ran this."""
    said = f"{source}\nimport sys; print(*(name for name in sys.modules if name.startswith('rlcli.')))"
    return {*subprocess.run([sys.executable, "-c", said], check=True, stdout=subprocess.PIPE, text=True).stdout.split()}


def test_one_file_of_the_data_room_loads_no_other_rooms_of_it():
    found = loaded("import rlcli.data.next_obs.rows")
    rooms = ("buffer", "samplers", "storages", "shared", "collected", "stored", "index", "ring")
    assert "rlcli.data.next_obs.rows" in found and not [
        name for name in found if name.startswith(tuple(f"rlcli.data.{room}" for room in rooms))
    ]


def test_a_file_that_nobody_imported_is_found_as_an_attribute():
    found = loaded(
        "import rlcli.data\nassert rlcli.data.storages.memmap.LazyMemmapStorage is rlcli.data.LazyMemmapStorage"
    )
    assert "rlcli.data.storages.memmap" in found and "rlcli.data.buffer.ensemble" not in found


def test_learning_on_policy_loads_no_buffers(tmp_path):
    overrides = ["recipe=ppo_exact", "total_frames=512", "collector.frames_per_batch=256", "run.eval_episodes=0"]
    overrides += ["console=off", "logger=none", f"run.dir={tmp_path / 'run'}"]
    found = loaded(f"import rlcli\nrlcli.train({overrides})")
    rooms = ("buffer", "samplers", "shared", "collected", "stored", "index", "ring", "storages.mapped")
    assert "rlcli.data.files.checkpoints" in found
    assert not [name for name in found if name.startswith(tuple(f"rlcli.data.{room}" for room in rooms))]
