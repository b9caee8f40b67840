"""Evaluations: returns of the env's own rewards, whatever transforms the policy learned with."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from face import build_env, configure, refused
from tensordict.nn import TensorDictModule
from torch import nn

import rlcli
from rlcli.build import collect, evaluate, load, resume
from rlcli.build.env import evaluation_envs
from rlcli.build.trained_run import config_of, restored_policy
from rlcli.cli.flags import run_folder
from rlcli.config import registry
from rlcli.config.registry import register_transform
from rlcli.envs import GymEnv, SerialEnv
from rlcli.errors import ArgumentError, ConfigError, EnvError, StoppedSafely
from rlcli.jobs import learner
from rlcli.keys import OBSERVATION
from rlcli.learning import evaluation, video
from rlcli.learning.evaluation import evaluate as play
from rlcli.modules import as_actor
from rlcli.runs import checkpoint
from rlcli.transforms import RewardScaling, RunningNorm, Transform

BRIEF = ["total_frames=512", "collector.frames_per_batch=256", "run.eval_episodes=4", "console=off", "logger=none"]


class Tenth(Transform):
    """A user's: scales rewards by a registered buffer, and counts what it has seen in another."""

    def __init__(self) -> None:
        super().__init__(in_keys=["reward"])
        self.register_buffer("scale", torch.tensor(0.1))
        self.register_buffer("steps", torch.tensor(0))

    def _step(self, tensordict, next_tensordict):
        self.steps += 1
        return next_tensordict.set("reward", next_tensordict.get("reward") * self.scale)


@pytest.fixture
def tenth(monkeypatch):
    monkeypatch.setitem(registry._users, "transform", dict(registry._users["transform"]))
    register_transform("Tenth")(Tenth)
    register_transform("Shrunk")(lambda by: RewardScaling(0.0, by))  # a function, whose class has another name


@pytest.mark.parametrize(
    "transforms",
    [
        "[{RewardScaling:{loc:0.0,scale:0.1}},RunningNorm]",
        "[RunningNorm,{RewardScaling:{loc:0.0,scale:0.1}},RewardNorm,RunningNorm]",
        "[{RewardClipping:{clamp_min:0.0,clamp_max:0.5}},{RewardScaling:{loc:1.0,scale:3.0}}]",
        "[Tenth,RunningNorm]",
        "[{Shrunk:{by:0.01}}]",
    ],
)
def test_returns_are_sums_of_the_envs_own_rewards(run, tenth, transforms):
    """CartPole gives 1 for every step, whatever the policy learned from."""
    trained = run(
        "run.dir=a", f"env.transforms={transforms}", "env.normalize_reward=true", "run.eval_every=256", *BRIEF
    )
    played = trained.summary["evaluation"]
    assert played["returns"] == played["lengths"]
    again = evaluate("a", episodes=4)
    assert again.returns.tolist() == played["returns"] == again.lengths.tolist()  # the run's own and `rlcli eval` agree
    records = [record for record in trained.metrics() if "eval_return" in record]
    assert [record["eval_return"] for record in records] == [record["eval_length"] for record in records]
    assert len(records) == 2


def test_statistics_are_put_back_by_name_where_reward_transforms_differ(run):
    trained = run("run.dir=a", "env.normalize_observation=true", "env.normalize_reward=true", *BRIEF)
    state = checkpoint.load_latest(trained.path / "checkpoints").state
    words = ["env.normalize_observation=true", "env.reward_scale=3.0", "env.normalize_reward=true"]
    env = build_env(configure("collect", words).env)
    restored_policy(config_of(trained.config), env, state)
    norm = env.transforms[0]
    assert isinstance(norm, RunningNorm) and norm.frozen
    saved = state["collector"]["engine"]["transforms"]["RunningNorm"]["_extra_state"]
    assert torch.equal(torch.as_tensor(norm.tallies[0].mean), saved[f"{OBSERVATION}/scale_mean"])
    env.close()
    collected = ["policy=checkpoint", "policy.path=a", "total_frames=64", "collector.frames_per_batch=64", "run.dir=b"]
    assert collect(configure("collect", [*collected, *words, "console=off"]), collected).summary["status"] == "done"


def test_what_a_users_transform_has_learned_acts_in_evaluations(run, monkeypatch):
    seen = []

    class Shifted(Transform):
        """Its buffer decides what the policy sees: 0 in a new one, 7 once it has seen a step."""

        def __init__(self) -> None:
            super().__init__(in_keys=["observation"])
            self.register_buffer("by", torch.tensor(0.0))

        def _reset(self, tensordict, reset_tensordict):
            seen.append(float(self.by))
            return reset_tensordict

        def _step(self, tensordict, next_tensordict):
            self.by.fill_(7.0)
            return next_tensordict

    monkeypatch.setitem(registry._users, "transform", {**registry._users["transform"], "Shifted": Shifted})
    run("run.dir=a", "env.transforms=[Shifted]", *BRIEF)
    del seen[:]
    evaluate("a", episodes=2)
    assert seen[0] == 7.0


# ---- how many envs play ---------------------------------------------------------------------------------------------
class Numbered(gym.Env):
    """Episodes of lengths that their seed decides; every reward tells the seed."""

    observation_space, action_space = gym.spaces.Box(0, 1, (1,), np.float32), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.worth, self.left = seed % 1000, int(self.np_random.integers(1, 40))
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.left -= 1
        return np.zeros(1, np.float32), float(self.worth), self.left == 0, False, {}


def played(lanes, episodes, **options):
    env = SerialEnv(lanes, lambda: GymEnv(Numbered()))
    found = play(env, None, episodes, **options)
    env.close()
    return found


def test_the_same_episodes_are_played_whatever_the_number_of_envs(monkeypatch):
    """The first so many that begin, not the first that end: short episodes weigh no more than long ones."""
    whole = played(23, 23)
    assert whole.cut == 0 and len(set(whole.returns)) > 20
    for lanes in (1, 2, 7, 16, 22):
        for batch in (1, 5, 64):
            monkeypatch.setattr(evaluation, "STEPS_A_BATCH", batch)
            found = played(lanes, 23)
            assert found.returns.tolist() == whole.returns.tolist() and found.lengths.tolist() == whole.lengths.tolist()


def test_episodes_are_cut_alike_whatever_the_number_of_envs():
    whole = played(9, 9, longest=20)
    assert whole.cut == (whole.lengths == 20).sum() > 0
    for lanes in (1, 2, 5):
        found = played(lanes, 9, longest=20)
        assert found.cut == whole.cut and found.returns.tolist() == whole.returns.tolist()


def test_many_episodes_do_not_make_many_emulators():
    lanes = lambda episodes, *words: evaluation_envs(configure("train", list(words)), episodes).num  # noqa: E731
    assert [lanes(n) for n in (1, 3, 20, 1000)] == [1, 3, 7, 8]  # of eight envs: three rounds of seven at most
    assert lanes(1000, "env.num=1024") == 32 and lanes(20, "env.num=1") == 1
    assert lanes(40, "run.eval_envs=25") == 20  # two rounds of twenty, not one of 25 and one of 15


class Only(Numbered):
    """Of which one can exist at a time."""

    there = made = 0

    def __init__(self):
        if Only.there:
            raise ConnectionError("the port is taken")
        Only.there, Only.made = 1, Only.made + 1

    def close(self):
        Only.there = 0


def test_an_env_of_which_one_can_exist_is_trained_and_evaluated(run, monkeypatch):
    monkeypatch.setitem(registry._users, "env", {"only": Only})
    Only.there = Only.made = 0
    summary = run("run.dir=a", "env.id=only", "env.num=1", *BRIEF).summary
    assert len(summary["evaluation"]["returns"]) == 4 and Only.made == 2 and not Only.there
    assert evaluate("a", episodes=4).returns.tolist() == summary["evaluation"]["returns"]
    failed = run("run.dir=b", "env.id=only", "env.num=1", "run.eval_every=256", *BRIEF).summary
    assert failed["status"] == "done" and not Only.there
    (warning,) = [w for w in failed["warnings"] if w["kind"] == "evaluation"]
    assert "the port is taken" in warning["text"] and "run.eval_every=null evaluates once" in warning["text"]


@pytest.mark.parametrize("words", [["env.mode=serial"], ["env.mode=parallel", "env.workers=1"]])
def test_where_a_process_can_hold_one_env_alone_the_keys_are_named(run, monkeypatch, words):
    monkeypatch.setitem(registry._users, "env", {"only": Only})
    Only.there = 0
    with refused(EnvError, "env.mode=parallel env.per_worker=1 run.eval_envs=1"):
        run("run.dir=a", "env.id=only", "env.num=2", *words, *BRIEF)


def test_envs_of_evaluations_are_kept_and_play_the_same_again(run, monkeypatch):
    made = []
    monkeypatch.setitem(registry._users, "env", {"numbered": lambda: made.append(1) or Numbered()})
    words = ["env.id=numbered", "env.num=2", "run.eval_every=128", *BRIEF]
    several = [record["eval_return"] for record in run("run.dir=a", *words).metrics() if "eval_return" in record]
    assert len(made) <= 2 + 2 + 3 and len(several) == 2 and len(set(several)) == 1


# ---- within a run ---------------------------------------------------------------------------------------------------
def test_an_error_in_an_evaluation_ends_no_run(run, monkeypatch, capsys):
    class Fails(Numbered):
        """Its ninth object cannot be stepped: a run of eight envs meets it in its evaluations."""

        made = 0

        def __init__(self):
            type(self).made += 1
            self.number = type(self).made

        def step(self, action):
            if self.number > 8:
                raise ConnectionError("the simulator is gone")
            return super().step(action)

    monkeypatch.setitem(registry._users, "env", {"fails": Fails})
    trained = run("run.dir=a", "env.id=fails", "env.mode=serial", "run.eval_every=256", *BRIEF, "console=plain")
    summary = trained.summary
    assert summary["status"] == "done" and summary["frames"] == 512
    assert "the simulator is gone" in summary["evaluation"]["error"]
    (warning,) = [w for w in summary["warnings"] if w["kind"] == "evaluation"]
    assert warning["count"] == 2 and "ConnectionError" in warning["text"]
    report = (trained.path / "report.md").read_text()
    assert "| failed |" in report and "the simulator is gone" in report
    assert "evaluation  failed: the environment raised in step" in capsys.readouterr().out
    refused(EnvError, "simulator", lambda: evaluate("a", episodes=2))


class Remembers(nn.Module):
    """Logits of CartPole through everything that acts otherwise when it is trained, or keeps what it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.out = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))
        self.calls = {"number": 0}

    def forward(self, observation):
        self.calls["number"] += 1
        self.mean = 0.9 * self.mean + 0.1 * observation.mean(0)  # another tensor under the buffer's name
        return self.out(self.drop(self.norm(observation))) + self.mean[:2]

    def get_extra_state(self):
        return self.calls

    def set_extra_state(self, state):
        self.calls = dict(state)


@pytest.fixture
def remembers(monkeypatch):
    def build(observation_spec, action_spec):
        critic = TensorDictModule(nn.Linear(4, 1), ["observation"], ["state_value"])
        return as_actor(Remembers(), observation_spec, action_spec), critic

    monkeypatch.setitem(registry._users, "policy", {"remembers": build})


def test_an_evaluation_leaves_no_trace_in_the_run(run, remembers):
    states = []
    for name, every in (("a", "256"), ("b", "null")):
        trained = run(f"run.dir={name}", "policy=remembers", f"run.eval_every={every}", *BRIEF, "total_frames=1024")
        states.append(checkpoint.load_latest(trained.path / "checkpoints").state["policy"])
    assert states[0].keys() == states[1].keys() and states[0]["actor.module.0.module._extra_state"]["number"] > 0
    for name, x in states[0].items():
        assert x == states[1][name] if isinstance(x, dict) else torch.equal(x, states[1][name]), name
    first, again = (evaluate("b", episodes=4).returns.tolist() for _ in range(2))
    assert first == again == trained.summary["evaluation"]["returns"]


def test_a_loaded_policy_acts_as_in_evaluations(run, remembers):
    run("run.dir=a", "policy=remembers", *BRIEF)
    policy = load("a")
    assert not any(module.training for module in (*policy.actor.modules(), *policy.critic.modules()))
    assert policy(np.ones(4, np.float32)) in (0, 1)  # one row has no variance
    rows = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    policy.actor.module[0].module.mean.zero_()
    first = policy(rows)
    policy.actor.module[0].module.mean.zero_()
    assert (policy(rows) == first).all()
    words = ["policy=checkpoint", "policy.path=a", "total_frames=64", "collector.frames_per_batch=64", "env.num=1"]
    words += ["run.dir=b", "console=off"]
    assert collect(configure("collect", words), words).summary["status"] == "done"


@pytest.mark.parametrize("words", [[], ["loss=dqn", "storage=tensor", "sampler=random", "sampler.batch_size=8"]])
def test_the_closing_evaluation_is_not_played_twice(run, monkeypatch, words):
    calls = []
    monkeypatch.setattr(evaluation, "evaluate", lambda *a, **k: calls.append(1) or play(*a, **k))
    trained = run("run.dir=a", "run.eval_every=256", *BRIEF, *words)
    assert len(calls) == 2
    last = trained.metrics()[-1]
    assert trained.summary["evaluation"]["mean_return"] == last["eval_return"]
    del calls[:]
    trained = run("run.dir=b", *BRIEF, "run.eval_every=500", "total_frames=768", *words)
    assert len(calls) == 2  # at 512, and at the end
    assert "evaluation" in trained.summary


def test_the_closing_evaluation_is_a_stage_of_its_own(run):
    stages = run("run.dir=a", *BRIEF).summary["throughput"]["stages"]
    assert stages["evaluate"]["seconds"] > 0 and list(stages)[-1] == "other"


def test_an_evaluation_that_a_stop_interrupts_is_made_up_after_the_resume(run, monkeypatch):
    original, give_up = learner.Evaluator._play, [True]

    def play(self):
        if give_up:  # at 512 frames
            self.stop.requested, self.stop.reason = True, "a test"
            return None
        return original(self)

    monkeypatch.setattr(learner.Evaluator, "_play", play)
    with pytest.raises(StoppedSafely):
        run("run.dir=a", "run.eval_every=512", *BRIEF, "total_frames=1024")
    give_up.clear()
    assert [record["frames"] for record in resume("a").metrics() if "eval_return" in record] == [768, 1024]


def test_bounds_are_counted_by_default_and_the_report_says_what_how_far_and_how_often(run, monkeypatch):
    class Strays(Numbered):
        def step(self, action):
            seen, *rest = super().step(action)
            return seen + 2.5, *rest

    monkeypatch.setitem(registry._users, "env", {"strays": Strays})
    trained = run("run.dir=a", "env.id=strays", *BRIEF)
    summary = trained.summary
    assert summary["status"] == "done" and summary["out_of_bounds"]["observation"]["observations"] == 512
    report = (trained.path / "report.md").read_text()
    assert "the env's observation was outside its declared bounds; the worst: 2.5 at element [0], 1.5 above" in report
    assert "(512 times)" in report and "in evaluations the env's observation" in report
    assert evaluate("a", episodes=4).outside.figures() == summary["evaluation"]["out_of_bounds"]
    refused(EnvError, "declared", lambda: run("run.dir=b", "env.id=strays", "env.out_of_bounds=refuse", *BRIEF))


@pytest.mark.parametrize("asked", [{"episodes": 0}, {"episodes": -2}, {"seed": -1}, {"seed": 2**32}])
def test_a_number_of_episodes_or_a_seed_that_is_none_is_refused(tmp_path, asked):
    refused(ArgumentError, f"{next(iter(asked))}", lambda: rlcli.evaluate(tmp_path, **asked))


def test_a_long_evaluation_says_how_far_it_is(run, monkeypatch, capsys):
    monkeypatch.setattr(evaluation, "PROGRESS_EVERY", 0.0)
    lengths = run("run.dir=a", *BRIEF, "console=plain").summary["evaluation"]["lengths"]
    said = [line for line in capsys.readouterr().out.splitlines() if "episodes ended" in line]
    batches = -(-max(lengths) // evaluation.STEPS_A_BATCH)
    assert len(said) == batches and said[-1].startswith("evaluating: 4 of 4 episodes ended, ")
    assert f" ended, {evaluation.STEPS_A_BATCH * 4} frames" in said[0]
    lines = []
    found = evaluate("a", episodes=4, say=lines.append)
    playing = "running 4 episodes ..."  # once the envs are there and the policy is read
    assert lines == [playing, *said] and lines[-1].endswith(f", return {found.returns.mean():.1f} so far ...")
    monkeypatch.setattr(evaluation, "PROGRESS_EVERY", 60.0)
    evaluate("a", episodes=4, say=lines.append)
    assert lines == [playing, *said, playing]


def test_what_is_said_of_a_long_evaluation_is_of_the_episodes_that_ended():
    told = []
    found = played(2, 9, progress=lambda returns, frames: told.append((returns.tolist(), frames)))
    assert told[-1][0] == found.returns.tolist() and all(set(part) <= set(found.returns) for part, _ in told)


def test_judging_a_short_run_does_not_take_many_times_as_long_as_training_it():
    assert [evaluation.longest_episode(None, frames) for frames in (100, 30_000, 10**7)] == [1_000, 7_500, 30_000]
    assert evaluation.longest_episode(50, 10**7) == 50


def test_a_run_and_rlcli_eval_cut_episodes_off_alike(run):
    played = run("run.dir=a", "env.id=Pendulum-v1", "run.eval_max_steps=64", *BRIEF).summary["evaluation"]
    again = evaluate("a", episodes=4)
    assert played["lengths"] == again.lengths.tolist() == [64] * 4 and played["returns"] == again.returns.tolist()
    assert evaluate("a", episodes=1, max_steps=10).lengths.tolist() == [10]


def _picture(env):
    """A picture of the state that needs no package that draws."""
    return np.resize(np.ascontiguousarray(env.state, np.float64).view(np.uint8), (32, 32, 3))


def test_a_film_is_cut_off_with_its_episode(run, monkeypatch):
    imageio, said = pytest.importorskip("imageio.v3"), []
    monkeypatch.setattr("gymnasium.envs.classic_control.cartpole.CartPoleEnv.render", _picture)
    run("run.dir=r", *BRIEF)
    with warnings.catch_warnings(action="error", category=UserWarning):
        evaluate("r", episodes=1, max_steps=5, video="film.gif", say=said.append)
    assert len(imageio.imread("film.gif", index=None)) <= 5
    assert said[0] == "running 1 episode, then the first one again for film.gif ..."


@pytest.mark.parametrize("longest", [5, 1000])
def test_a_film_that_ends_before_its_episode_says_so(run, monkeypatch, longest):
    imageio = pytest.importorskip("imageio.v3")
    monkeypatch.setattr(video, "LONGEST", longest)
    monkeypatch.setattr("gymnasium.envs.classic_control.cartpole.CartPoleEnv.render", _picture)
    run("run.dir=r", *BRIEF)
    with warnings.catch_warnings(record=True, action="always") as caught:
        evaluate("r", episodes=1, video="film.gif")
    said = [str(warning.message) for warning in caught if "film.gif" in str(warning.message)]
    assert said == (["film.gif ends after 5 steps, before the episode that it shows"] if longest == 5 else [])
    frames = len(imageio.imread("film.gif", index=None))
    assert frames <= 5 if longest == 5 else frames > 5  # equal pictures share one


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("missing/film.mp4", "there is no folder missing. Make it: mkdir -p missing"),
        ("two words/film.gif", "Make it: mkdir -p 'two words'"),
        ("file/film.gif", "file is no folder. Choose another file."),
        ("file/there/film.gif", "Not a directory. Choose another file."),
        (f"{'x' * 300}.gif", "File name too long. Choose another file."),
        ("x\0.gif", "embedded null byte"),
        ("/proc/film.gif", "Choose another file."),
        ("folder", "folder is a folder, and a video is a file"),
        ("folder.gif", "folder.gif is a folder"),
        ("film.xyz", "film.xyz is not the name of a video. Name a file that ends in .mp4"),
        ("film", "film is not the name of a video"),
        ("film.avi", "needs the package imageio_ffmpeg. Install it: pip install"),
    ],
)
def test_a_film_that_cannot_be_written_is_refused_before_anything_is_loaded(tmp_path, monkeypatch, path, words):
    monkeypatch.chdir(tmp_path)
    for name in ("folder", "folder.gif"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setattr(video, "has", lambda package: package != "imageio_ffmpeg")
    refused(ConfigError, words, lambda: evaluate("no run, and nobody has looked for one", episodes=1, video=path))
    assert not (tmp_path / "film.avi").exists()


def test_the_weights_of_the_best_evaluation_are_kept_and_named(run, monkeypatch):
    found = iter([3.0, 7.0, 5.0])
    played = lambda self: evaluation.Evaluation(np.array([next(found)]), np.array([1]))  # noqa: E731
    monkeypatch.setattr(learner.Evaluator, "_play", played)
    run("run.dir=a", "run.eval_every=256", *BRIEF, "total_frames=768", "run.keep_best=true", "run.checkpoint_every=256")
    (best,) = checkpoint.FOLDERS.paths(Path("a/best"))
    assert load("a:best").frames == checkpoint.load(best).manifest["number"] == 512 and load("a").frames == 768
    words = ["policy=checkpoint", "policy.path=a:best", "total_frames=64", "console=off", "run.dir=c"]
    collect(configure("collect", words), words)
    kept, weights = (checkpoint.load_latest(Path(f)).state["policy"] for f in ("c/policy", "a/best"))
    assert all(torch.equal(kept[name], x) for name, x in weights.items())
    assert load("a:768").frames == load("a:checkpoint_000003").frames == 768 and run_folder("a:768", "eval") == "a:768"
    assert run("run.dir=d", *BRIEF, "policy.init_from=a:best").summary["policy_began_with"]["frames"] == 512
    refused(ConfigError, "frames", lambda: load("a:9"))
    run("run.dir=b", *BRIEF)
    refused(ConfigError, "kept best", lambda: load("b:best"))


def test_prune_lists_and_removes_older_checkpoints_of_finished_runs_alone(run, capsys, monkeypatch):
    from rlcli.cli.main import main

    run("run.dir=runs/a", *BRIEF, "run.checkpoint_every=256")
    run("run.dir=runs/b", *BRIEF, "run.checkpoint_every=256")
    summary = Path("runs/b/summary.json")
    summary.write_text(summary.read_text().replace('"done"', '"stopped"'))
    shutil.copytree("runs/a", "runs/0")
    for path in checkpoint.FOLDERS.paths(Path("runs/0/checkpoints")):
        (path / "state.json").write_text("{}")
    before = Path("runs/a/checkpoints"), Path("runs/b/checkpoints")
    assert main(["prune"]) == 0 and [len(checkpoint.FOLDERS.paths(p)) for p in before] == [2, 2]
    assert "runs/a: 1 older checkpoint\n" in (said := capsys.readouterr().out) and "runs/b" not in said
    assert "skipped  runs/0: " in said  # none of its checkpoints verifies
    assert main(["prune", "runs", "runs/a", "--yes"]) == 0
    assert [len(checkpoint.FOLDERS.paths(p)) for p in before] == [1, 2] and load("runs/a").frames == 512
    assert main(["prune"]) == 0 and "nothing to remove" in capsys.readouterr().out
