"""Estimators, samplers, storages and loggers of a user's package: one file and one recipe each, and they train."""

import json
import sys
from pathlib import Path

import pytest
from face import configure, leaves, main, refused

from rlcli.config import registry
from rlcli.config.option import held
from rlcli.config.schemas import read_with
from rlcli.errors import ConfigError

HERE = Path(__file__).parent
RECIPES = [HERE / "added_parts" / "recipes"]
TINY = ["console=off", "run.eval_episodes=0", "logger=none", "threads=1"]
ON = ["total_frames=512", "collector.frames_per_batch=256", "sampler.batch_size=64", "optim.epochs=1"]
OFF = ["total_frames=600", "collector.init_random_frames=200", "env.num=4", "collector.frames_per_batch=100"]


@pytest.fixture
def added(monkeypatch):
    """Import one file of the package anew; what it registers and that it was named are forgotten after the test."""
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setattr(registry, "_users", {kind: {} for kind in registry.KINDS})
    monkeypatch.setattr(registry, "imported", [])

    def add(name: str):
        monkeypatch.delitem(sys.modules, f"added_parts.{name}", raising=False)
        registry.import_package(f"added_parts.{name}")
        return sys.modules[f"added_parts.{name}"]

    return add


def trained(folder: Path, recipe: str, *words: str) -> dict:
    """What became of a run by the command line: its configuration."""
    line = ["train", f"recipe={recipe}", "--recipe-dir", str(RECIPES[0]), *TINY, *words, f"run.dir={folder}"]
    assert main(line) == 0
    return json.loads((folder / "config.json").read_text())


def test_an_estimator_of_a_package_trains(added, tmp_path):
    module = added("damped")
    config = trained(tmp_path / "run", "damped", *ON)
    assert config["value"]["kind"] == "damped" and config["value"]["lmbda"] == 0.8
    made = registry.build("estimator", "damped", module.Damped, gamma=0.9, value_network=None, lmbda=0.8)
    assert made.lmbda == 0.8 and made.scale == 1.0


def test_a_sampler_of_a_package_trains(added, tmp_path):
    added("newest")
    assert trained(tmp_path / "run", "newest", *OFF)["sampler"]["kwargs"] == {"share": 0.25}


def test_a_storage_of_a_package_trains(added, tmp_path):
    module = added("counting")
    trained(tmp_path / "run", "counting", *OFF)
    assert module.Counting.written == 1000 + 600


def test_a_logger_of_a_package_is_written_to(added, tmp_path):
    added("listed")
    words = ["console=off", "run.eval_episodes=0", *ON, "logger=listed", "logger.kwargs.name=mine"]
    assert main(["train", *words, f"run.dir={tmp_path / 'run'}"]) == 0
    first, second, third, *_, last = (tmp_path / "run" / "mine.txt").read_text().splitlines()
    assert (first, second, last) == ("begun at None", "seed 0", "closed") and third.startswith("256 ")


def test_a_resumed_run_chooses_another_logger_without_the_arguments_of_the_one_before(added, tmp_path):
    added("listed")
    run = tmp_path / "run"
    words = ["console=off", "run.eval_episodes=0", *ON, "logger=listed", "logger.kwargs.name=mine", f"run.dir={run}"]
    assert main(["train", *words]) == 0
    assert main(["resume", str(run), "logger=none", "total_frames=768"]) == 0
    assert json.loads((run / "config.json").read_text())["logger"] == {"kind": "none", "kwargs": {}}
    assert main(["resume", str(run), "logger.kwargs.name=again", "logger=listed", "total_frames=1024"]) == 0
    assert (run / "again.txt").exists()


def test_what_a_part_uses_is_read_and_what_it_does_not_is_refused(added):
    added("damped")
    added("newest")
    cfg = configure("train", ["value=damped", "value.lmbda=0.5"])
    assert cfg.value.lmbda == 0.5 and "value.lmbda" in held(cfg) and "value.rho_thresh" not in held(cfg)
    with refused(ConfigError, "unknown value.rho_thresh value=damped value=vtrace"):
        configure("train", ["value=damped", "value.rho_thresh=2"])
    with refused(ConfigError, "unknown sampler.alpha sampler=newest sampler=prioritized"):
        configure("train", ["loss=dqn", "storage=tensor", "sampler=newest", "sampler.alpha=0.5"])
    assert read_with(type(cfg), leaves(type(cfg))["storage.max_size"]) == "not with storage=none"


def test_arguments_are_for_a_part_of_ones_own(added):
    refused(ConfigError, "value.kwargs value=gae", lambda: configure("train", ["value.kwargs={scale:2}"]))
    added("damped")
    refused(ConfigError, "value.kwargs.scale=2", lambda: configure("train", ["value=damped", "value.scale=2"]))


def test_an_argument_that_a_part_does_not_take_is_refused(added, tmp_path, capsys):
    added("newest")
    line = ["train", "recipe=newest", "--recipe-dir", str(RECIPES[0]), *TINY, *OFF, "sampler.kwargs={shar:1}"]
    assert main([*line, f"run.dir={tmp_path / 'run'}"]) == 2
    assert "sampler=newest could not be built" in capsys.readouterr().err


def test_what_is_no_part_is_refused(added):
    registry.register_storage("none_at_all")(lambda **options: 3)
    refused(ConfigError, "storage=none_at_all storage", lambda: registry.build("storage", "none_at_all", dict))


def test_a_logger_that_takes_no_figures_is_refused_and_leaves_no_run_behind(added, tmp_path, capsys):
    registry.register_logger("a_number")(lambda folder, resume_at: 3)
    assert main(["train", "console=off", "logger=a_number", *ON, f"run.dir={tmp_path / 'run'}"]) == 2
    assert "logger=a_number is no logger: its builder gave int" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_name_of_an_env_is_its_id_and_no_choice_of_the_group(added):
    registry.register_env("mine")(lambda: None)
    refused(ConfigError, "mine env.id=mine", lambda: configure("train", ["env=mine"]))


def test_a_name_without_its_package_is_unknown_and_says_how_to_import_it(added):
    refused(ConfigError, "damped", lambda: configure("train", ["value=damped"]))
    refused(ConfigError, "damped", lambda: configure("train", ["recipe=damped"], RECIPES))
