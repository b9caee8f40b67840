"""Training runs that begin with another run's weights: they act with them from the first frame, and need it no more."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from face import main, refused
from test_off_policy_runs import DQN, SAC
from test_resume import same, stop_after

from rlcli.build import resume
from rlcli.errors import ConfigError
from rlcli.jobs.learner import Learner
from rlcli.runs.checkpoint import load, newest

SMALL = ["total_frames=1024", "collector.frames_per_batch=256", "run.eval_episodes=0", "console=off", "logger=none"]
PPO = [*SMALL, "optim.epochs=1"]
NORMALISED = [*PPO, "env.id=Pendulum-v1", "env.normalize_observation=true", "value.normaliser=running"]


@pytest.fixture
def began(monkeypatch):
    """The state of each learner as it stood when its first frame was about to be collected."""
    seen = []
    start = Learner.run_to_end

    def watched(self):
        seen.append(copy.deepcopy({name: {**part.state_dict()} for name, part in self.saver.parts.items()}))
        start(self)

    monkeypatch.setattr(Learner, "run_to_end", watched)
    return seen


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (PPO, [*PPO, "optim.lr=1e-5"]),
        (PPO, [*PPO, "loss=a2c", "optim.epochs=1"]),
        ([*PPO, "policy=gru"], [*PPO, "policy=gru", "loss.entropy_coeff=0"]),
        (DQN, [*DQN, "loss.tau=0.5"]),
        (SAC, [*SAC, "optim.lr=1e-5"]),
        (NORMALISED, [*NORMALISED, "optim.lr=1e-5"]),
    ],
    ids=["ppo", "ppo to a2c", "recurrent", "dqn", "sac", "normalised"],
)
@pytest.mark.every(2)
def test_a_run_begins_with_weights_targets_and_statistics(run, began, old, new):
    first = run(*old, "run.dir=old")
    state = newest(first).state
    before = {path: path.read_bytes() for path in first.path.rglob("*") if path.is_file()}
    run(*new, "policy.init_from=old", "run.dir=new")
    here = began[-1]
    weights = {name: x for name, x in state["policy"].items() if not name.endswith((".eps", ".frames"))}
    assert all(torch.equal(here["policy"][name], x) for name, x in weights.items())
    for name, x in state["update"].items():
        if name == "loss.log_alpha":
            assert torch.equal(here["update"][name], x)
        elif name.startswith("loss.target_value_network."):
            trained = name.replace("loss.target_value_network", "actor.module.0")
            assert torch.equal(here["update"][name], state["policy"][trained])
    if old is NORMALISED:
        scale, now = (x["collector"]["engine"]["transforms"]["RunningNorm"] for x in (state, here))
        same(scale, dict(now))
        assert all(torch.equal(here["loop"]["estimator"][name], x) for name, x in state["loop"]["estimator"].items())
    assert {path: path.read_bytes() for path in first.path.rglob("*") if path.is_file()} == before


def test_the_statistics_are_learned_on(run):
    run(*NORMALISED, "run.dir=old")
    new = run(*NORMALISED, "policy.init_from=old", "run.dir=new")
    count = newest(new).state["collector"]["engine"]["transforms"]["RunningNorm"]["_extra_state"]["observation/count"]
    assert int(count) > 2 * 1024


def test_the_run_goes_on_without_the_one_it_began_with(run):
    run(*PPO, "run.dir=old")
    whole = run(*PPO, "policy.init_from=old", "run.dir=whole")
    with stop_after(2):
        run(*PPO, "policy.init_from=old", "run.dir=new")
    shutil.rmtree("old")
    new = resume("new")
    assert new.summary["policy_began_with"] == whole.summary["policy_began_with"]
    assert new.summary["policy_began_with"]["frames"] == 1024
    same(newest(whole).state, newest(new).state)
    refused(ConfigError, "begins", lambda: resume("new", ["policy.init_from=whole"]))


def test_a_checkpoint_is_named_by_its_name_its_frames_or_its_folder(run, began):
    first = run(*PPO, "run.checkpoint_every=256", "run.dir=old")
    at_768, at_1024 = first.checkpoints
    for name, path in ((f"old:{at_768.name}", at_768), ("old:768", at_768), (str(at_768), at_768), ("old", at_1024)):
        run(*PPO, "total_frames=256", f"policy.init_from='{name}'")
        same({key: x.detach() for key, x in began[-1]["policy"].items()}, load(path).state["policy"])
    refused(ConfigError, "768", lambda: run(*PPO, "policy.init_from='old:5'"))


def test_other_shapes_are_refused_layer_by_layer_or_left_out(run, began, tmp_path):
    first = run(*PPO, "run.dir=old")
    other = [*PPO, "policy.hidden=[64,32]", "policy.init_from=old", "run.dir=new"]
    with pytest.raises(ConfigError) as refused:
        run(*other)
    assert "actor.module.0.module.2.weight is (64, 64) there and (32, 64) here" in str(refused.value)
    assert "critic.module.4.weight is (1, 64) there and (1, 32) here" in str(refused.value)
    assert "actor.module.0.module.0" not in str(refused.value)
    assert not (tmp_path / "new").exists()
    new = run(*other, "policy.init_strict=false")
    old = newest(first).state["policy"]
    taken = [name for name, x in began[-1]["policy"].items() if x.shape == old[name].shape]
    assert all(torch.equal(began[-1]["policy"][name], old[name]) for name in taken)
    told = new.summary["policy_began_with"]
    assert told["layers"] == len(taken)
    assert len(told["left_out"]) == len(old) - len(taken)


def test_scales_that_only_one_run_has_are_refused(run):
    run(*PPO, "env.id=Pendulum-v1", "run.dir=old")
    with refused(ConfigError, "normalised"):
        run(*PPO, "env.id=Pendulum-v1", "env.normalize_observation=true", "policy.init_from=old")


def test_what_would_change_a_run_says_how_to_make_a_new_one(run, capsys):
    run(*PPO, "run.dir=old", "optim.lr=1e-3")
    with pytest.raises(ConfigError) as refused:
        resume("old", ["optim.lr=1e-4"])
    command = str(refused.value).partition("from its weights: ")[2].partition(";")[0]
    assert command.endswith("policy.init_from=old optim.lr=1e-4")
    assert "optim.lr=1e-3" not in command and "run.dir" not in command
    assert main(command.split()[1:]) == 0
    assert main(["train", "policy=checkpoint", "policy.path=old"]) == 2
    assert "rlcli train ... policy.init_from=old" in capsys.readouterr().err


def test_all_mistakes_of_a_resume_are_said_at_once(run, capsys):
    run(*PPO, "run.dir=old")
    assert main(["resume", "old", "total_framez=3", "optim.lr=-1", "collector.frames_per_batch=0"]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in ("total_framez", "optim.lr is -1", "collector.frames_per_batch is 0"))
    assert "loading" not in said


def test_what_does_not_fit_a_forced_change_is_named_by_its_layers(run):
    run(*PPO, "policy=gru", "run.dir=old")
    with pytest.raises(ConfigError) as refused:
        resume("old", ["policy.recurrent_size=32", "total_frames=2048"], force=True)
    assert "gru.weight_hh_l0 is (192, 64) there and (96, 32) here" in str(refused.value)
    assert "RuntimeError" not in str(refused.value)
