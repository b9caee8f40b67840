"""An algorithm of a user's package is one file and one recipe: it trains, is saved, resumes, plays, and is planned."""

import json
import sys
from pathlib import Path

import pytest
import torch
from face import Saver, algorithm_of, configure, main, open_run, refused

import rlcli
from rlcli.algorithms import A2C, Algorithm
from rlcli.config import registry
from rlcli.config.choices import CHOICES
from rlcli.errors import ConfigError
from rlcli.runs import checkpoint
from rlcli.runs.folder import CHECKPOINTS

HERE = Path(__file__).parent
QUIET = ["console=off", "logger=none", "threads=1"]


@pytest.fixture(autouse=True)
def package(monkeypatch, tmp_path):
    """The package, registered anew and forgotten after the test; the working folder is empty."""
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setattr(registry, "_users", {kind: {} for kind in registry.KINDS})
    monkeypatch.setattr(registry, "imported", [])
    monkeypatch.delitem(sys.modules, "added_algorithm.iql", raising=False)
    registry.import_package("added_algorithm.iql")
    monkeypatch.chdir(tmp_path)
    return sys.modules["added_algorithm.iql"]


def train(folder, *words):
    recipes = str(HERE / "added_algorithm" / "recipes")
    return main(["train", "recipe=iql", "--recipe-dir", recipes, *QUIET, *words, f"run.dir={folder}"])


def weights(folder):
    state = checkpoint.load_latest(Path(folder) / CHECKPOINTS).state
    own = {name: x for name, x in state["update"].items() if isinstance(x, torch.Tensor)}
    return {**{f"policy.{name}": x for name, x in state["policy"].items()}, **own}


def test_it_trains_by_its_own_loss_and_moves_every_network(package):
    assert train("r") == 0
    run = open_run("r")
    assert run.config["loss"]["kind"] == "iql" and run.info["packages"] == ["added_algorithm.iql"]
    last = run.metrics()[-1]
    assert {*package.IQLLoss.out_keys, "grad_norm", "updates"} <= last.keys() and last["updates"] == 150
    assert all(last[name] == last[name] for name in package.IQLLoss.out_keys)
    summary = json.loads((run.path / "summary.json").read_text())
    assert len(summary["evaluation"]["returns"]) == 2


def test_a_checkpoint_holds_all_that_it_learns_and_a_stopped_run_resumes_bit_for_bit(monkeypatch):
    assert train("whole") == 0
    after, seen = Saver.after_batch, []

    def stop(self, frames, **sound):
        seen.append(frames)
        if len(seen) == 12:
            self.stop.requested, self.stop.reason = True, "a test"
        after(self, frames, **sound)

    with monkeypatch.context() as patch:
        patch.setattr(Saver, "after_batch", stop)
        assert train("cut") != 0
    assert checkpoint.load_latest(Path("cut") / CHECKPOINTS).manifest["number"] == 480
    assert main(["resume", "cut", "--import", "added_algorithm.iql"]) == 0
    whole, cut = weights("whole"), weights("cut")
    assert any(name.startswith("loss.target_qvalue_network") for name in whole) and whole.keys() == cut.keys()
    assert all(torch.equal(x, cut[name]) for name, x in whole.items())


def test_its_run_is_evaluated_loaded_and_planned_as_any_other():
    train("r", "run.eval_episodes=0")
    assert len(rlcli.evaluate("r", episodes=2).returns) == 2
    policy = rlcli.load("r")
    env = policy.make_env()
    observation, _ = env.reset(seed=0)
    policy.reset()
    assert policy(observation) in (0, 1)
    plan = rlcli.plan(["recipe=iql", *QUIET], recipe_dirs=[HERE / "added_algorithm" / "recipes"])
    assert any(entry.component == "buffer" for entry in plan.entries)


def test_what_it_uses_is_read_and_what_it_does_not_is_refused():
    words = ["loss=iql", "storage=tensor", "sampler=random", "collector.frames_per_batch=64"]
    assert configure("train", [*words, "loss.tau=0.5"]).loss.tau == 0.5
    refused(ConfigError, "optim.epochs loss=iql", lambda: configure("train", [*words, "optim.epochs=3"]))
    refused(ConfigError, "loss=iql storage=none", lambda: configure("train", ["loss=iql", "storage=none"]))


def test_what_is_no_algorithm_is_refused():
    registry.register_algorithm("nothing")(lambda cfg: 3)
    cfg = configure("train", [])
    cfg.loss.kind = "nothing"
    refused(ConfigError, "loss=nothing", lambda: algorithm_of(cfg))


@pytest.mark.parametrize("name", [name for name in CHOICES["loss"] if CHOICES["loss"][name].place])
def test_one_of_ours_is_its_file_and_a_line_of_the_table(name):
    found = registry.find("algorithm", name)
    assert issubclass(found, Algorithm) and found.__module__.startswith("rlcli.algorithms.")
    assert found.uses == registry.reading("loss", name) and found.off_policy == CHOICES["loss"][name].off_policy


def test_an_option_that_no_method_reads_is_refused(capsys):
    @rlcli.register_algorithm("slow")
    class Slow(A2C):
        def networks(self, env):
            assert self.cfg.loss.kwargs["depth"] == 2
            return super().networks(env)

        def objective(self, policy, **options):
            self.width = self.cfg.loss.kwargs["width"]
            return super().objective(policy, **options)

    words = ["train", "loss=slow", "env.id=CartPole-v1", "total_frames=256", "collector.frames_per_batch=256"]
    words += [*QUIET, "optim.epochs=1", "run.eval_episodes=0"]
    assert main([*words, "loss.kwargs={width: 1, depth: 2}"]) == 0
    assert main([*words, "loss.kwargs={width: 1, depth: 2, foo: 2}"]) == 2
    assert "loss=slow does not read loss.kwargs.foo (Slow)" in capsys.readouterr().err
