"""Off-policy runs that begin with stored rows: they hold them, learn from them, and need their source no more."""

from __future__ import annotations

import random
import shutil

import numpy as np
import pytest
import torch
from face import configure, refused
from tensordict import TensorDict
from test_off_policy_runs import DQN, SAC, decided
from test_resume import same, stop_after

import rlcli
from rlcli.build import collect, resume
from rlcli.build.plan import plan
from rlcli.data import LazyTensorStorage, TensorDictReplayBuffer, full_next_obs, open_buffer, open_segments
from rlcli.errors import ConfigError
from rlcli.jobs.learner import Learner
from rlcli.keys import REWARD

LARGE = ["storage.max_size=3000"]


@pytest.fixture
def frames(tmp_path, monkeypatch):
    """`frames(*overrides)`: a collection in `frames`."""
    monkeypatch.chdir(tmp_path)

    def start(*words: str, folder: str = "frames"):
        words = [
            "policy=random", "env.num=4", "total_frames=600", "collector.frames_per_batch=100", "console=off",
            "logger=none", f"run.dir={folder}", *words,
        ]  # fmt: skip
        return collect(configure("collect", words), words)

    return start


@pytest.fixture
def learner(monkeypatch):
    """The learner of the next run, as it stood when the first frame was about to be collected."""
    seen = []
    start = Learner.run_to_end

    def watched(self):
        if self.loop.init_rows:
            buffer = self.loop.buffer
            seen.append((self, buffer[range(len(buffer))].clone()))
        start(self)

    monkeypatch.setattr(Learner, "run_to_end", watched)
    return seen


@pytest.mark.parametrize("memory", ["exact", "full"])
@pytest.mark.parametrize("ndim", [1, 2])
def test_a_run_begins_with_every_row_and_random_frames_are_spared(run, frames, learner, memory, ndim):
    frames("memory=full")
    done = run("run.dir=a", *DQN, *LARGE, f"memory={memory}", f"storage.ndim={ndim}", "storage.init_from=frames")
    found, rows = learner[0]
    whole = open_segments("frames/data").concat()
    assert len(rows) == 600 and found.loop.init_rows == 600
    assert found.loop.learning_starts == 0 and found.collector.init_random_frames == 0  # DQN asks for 200
    for key in rows.keys(True, True):
        if key != "index":
            theirs = full_next_obs(whole).get(key)
            theirs = theirs.transpose(0, 1) if ndim == 2 else theirs
            flat = theirs.reshape(600, *theirs.shape[2:])
            if ndim == 2:
                assert torch.equal(rows.get(key), flat), key
            else:
                assert torch.equal(rows.get(key).float().sort(0).values, flat.float().sort(0).values), key
    assert done.summary["buffer_began_with"] == {"rows": 600, "from": "frames"}
    assert done.summary["frames"] == 1200  # those it collected itself: counted apart


TASKS = {
    "n-step, prioritized": [*DQN, "loss.n_steps=3", "sampler=prioritized"],
    "delta": [*DQN, "memory=delta", "memory.delta_dtype=bfloat16"],
    "memmap, side by side": [*DQN, "storage=memmap", "storage.ndim=2"],
    "some random frames left": [*DQN, "collector.init_random_frames=700"],
}


LONG = {"delta", "memmap, side by side"}  # the others say the same sooner


@pytest.mark.parametrize(
    "task", [pytest.param(task, id=name, marks=[pytest.mark.slow] * (name in LONG)) for name, task in TASKS.items()]
)
def test_stopped_and_resumed_equals_uninterrupted_though_the_source_is_gone(run, frames, task):
    frames()
    words = [*task, *LARGE, "storage.init_from=frames"]
    whole = decided(run("run.dir=whole", *words))
    with stop_after(random.Random(str(task)).randrange(2, 18)):
        run("run.dir=cut", *words)
    shutil.rmtree("frames")
    again = resume("cut")
    same(decided(again), whole)
    assert again.summary["buffer_began_with"]["rows"] == 600


def test_a_smaller_buffer_takes_the_newest_and_says_so(run, frames, learner):
    frames()
    done = run("run.dir=a", *DQN, "storage.init_from=frames")  # max_size 500 of 600
    rewards = learner[0][1]
    whole = open_segments("frames/data").concat()["observation"][:, -125:].reshape(-1, 4)
    assert len(rewards) == 500
    assert torch.equal(rewards["observation"].sort(0).values, whole.sort(0).values)
    (warning,) = (w for w in done.summary["warnings"] if w["kind"] == "storage.init_from")
    assert "100 older rows of frames were left out" in warning["text"]


def test_rows_of_another_run_of_a_dump_and_of_a_trained_policy(run, frames, learner):
    first = run("run.dir=first", *DQN)
    run("run.dir=second", *DQN, "storage.init_from=first")
    assert len(learner[-1][1]) == 500
    buffer = open_buffer(first.path)
    buffer.dumps("dumped")
    run("run.dir=third", *DQN, "storage.init_from=dumped")
    assert len(learner[-1][1]) == 500
    frames("policy=checkpoint", "policy.path=first", folder="played")
    run("run.dir=fourth", *DQN, *LARGE, "storage.init_from=played")
    assert len(learner[-1][1]) == 600


def test_what_was_collected_as_differences_is_true_again_where_a_row_follows(run, frames, learner, recwarn):
    frames("memory=delta")
    run("run.dir=a", *DQN, *LARGE, "storage.ndim=2", "storage.init_from=frames")
    found, rows = learner[0]
    after = found.loop.buffer.ring.index.successors(np.arange(600))
    known = after >= 0
    assert known.mean() > 0.9
    assert torch.equal(rows["next", "observation"][known], rows["observation"][torch.from_numpy(after[known])])
    assert not [w for w in recwarn if "not followed by their own" in str(w.message)]


def test_sac_takes_box_actions(run, frames, learner):
    frames("env.id=Pendulum-v1", "env.num=2", "env.max_episode_steps=40")
    run("run.dir=a", *SAC, *LARGE, "storage.init_from=frames")
    rows = learner[0][1]
    whole = open_segments("frames/data").concat()
    assert torch.equal(rows[REWARD].sort(0).values, whole[REWARD].reshape(-1, 1).sort(0).values)


def test_next_rows_and_ends_are_those_of_the_source(run, frames, learner):
    frames("collector.max_frames_per_traj=9")
    run("run.dir=a", *DQN, *LARGE, "storage.init_from=frames", "storage.ndim=2")
    found, _ = learner[0]
    source = open_buffer("frames")
    theirs = source.ring.index.successors(np.arange(600))
    ours = found.loop.buffer.ring.index.successors(np.arange(600))
    assert (theirs == ours).mean() > 0.99 and ((ours == theirs) | (ours < 0)).all()


def test_the_plan_counts_them(frames):
    frames()
    words = [*DQN, *LARGE]
    columns = [plan(configure("train", [*words, *more]), "train") for more in ([], ["storage.init_from=frames"])]
    rows = [next(e for e in found.entries if e.component == "buffer").shape[0] for found in columns]
    assert rows == [1200, 1800]


@pytest.mark.parametrize(
    ("collected", "asked", "said"),
    [
        (["env.id=Acrobot-v1"], [], "they are of env.id=Acrobot-v1, this run is of env.id=CartPole-v1"),
        (["memory=compact"], [], "collect with memory=exact"),
        (["env.frame_stack=2"], [], "they were made with env.frame_stack=2, here it is None"),
        (["env.normalize_observation=true"], [], "env.normalize_observation scales by statistics of one run"),
        ([], ["env.kwargs={sutton_barto_reward: true}"], "env.kwargs={}, here it is {'sutton_barto_reward': True}"),
        ([], ["memory.keep=[chosen_action_value]"], "they lack chosen_action_value, and hold "),
        (["env.num=2"], ["storage.ndim=2"], "storage.ndim=2 wants 4 (storage.ndim=1 takes any)"),
    ],
)
def test_rows_that_are_others_are_refused_with_what_differs(run, frames, tmp_path, collected, asked, said):
    frames(*collected)
    with pytest.raises(ConfigError) as caught:
        run("run.dir=a", *DQN, *LARGE, "storage.init_from=frames", *asked)
    assert said in str(caught.value) and "storage.init_from" in str(caught.value)
    assert not (tmp_path / "a").exists()


def test_what_makes_no_sense_is_said_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(ConfigError, "loss=ppo_clip", lambda: configure("train", ["storage.init_from=."]))
    refused(ConfigError, "storage.init_from=nowhere", lambda: configure("train", [*DQN, "storage.init_from=nowhere"]))


def test_a_buffer_of_ones_own_with_other_shapes_is_refused(run, tmp_path):
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100))
    flags = {key: torch.zeros(20, 1, dtype=torch.bool) for key in ("done", "terminated")}
    after = {"observation": torch.ones(20, 2), "reward": torch.ones(20, 1), **flags}
    buffer.extend(
        TensorDict({"observation": torch.zeros(20, 2), "action": torch.zeros(20).long(), "next": after}, [20])
    )
    buffer.dumps(tmp_path / "mine")
    refused(ConfigError, "float32[2] float32[4]", lambda: run("run.dir=a", *DQN, "storage.init_from=mine"))


def test_python_reads_what_the_command_line_wrote(frames):
    done = frames()
    buffer = open_buffer(done.path, batch_size=32)
    assert len(buffer) == 600 and buffer.sample().shape == (32,)
    assert "open_buffer" in done.summary["commands"]["read"]
    assert {found.kind for found in rlcli.inspect(done.path)} == {"collected frames"}
