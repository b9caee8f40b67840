"""Runs that learn from stored rows: they learn, resume bit for bit, and keep what they are told to keep."""

from __future__ import annotations

import itertools
import random
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from face import configure, open_run, refused
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from tensordict.nn import TensorDictSequential
from test_resume import final_state, same, stop_after
from torch import nn

from rlcli.algorithms.dqn import DQN as DQNAlgorithm
from rlcli.build import collect, evaluate, resume
from rlcli.config import registry
from rlcli.config.registry import register_policy
from rlcli.data import open_buffer
from rlcli.errors import ArgumentError, ConfigError, EnvError
from rlcli.graphs import host
from rlcli.inspection.folder import inspect
from rlcli.keys import as_tuple
from rlcli.modules import MLP, EGreedyModule, QValueActor
from rlcli.transforms import Transform

SMALL = ["run.eval_episodes=0", "console=off", "logger=none", "policy.hidden=[16]", "sampler.batch_size=32"]
DQN = [
    "loss=dqn", "storage=tensor", "sampler=random", "storage.max_size=500", "total_frames=1200", "env.num=4",
    "collector.frames_per_batch=64", "collector.init_random_frames=200", "loss.target_every=20",
    "optim.updates_per_frame=0.1", "policy.eps_frames=800", *SMALL,
]  # fmt: skip
SAC = [
    "loss=sac", "storage=tensor", "sampler=random", "storage.max_size=160", "total_frames=240", "env.num=2",
    "env.id=Pendulum-v1", "collector.frames_per_batch=10", "collector.init_random_frames=50",
    "env.max_episode_steps=40", *SMALL,
]  # fmt: skip
SLICES = ["sampler=slice", "sampler.slice_len=8", "policy.recurrent_size=8"]
TASKS = {
    "dqn": DQN,
    "dqn full": [*DQN, "memory=full"],
    "dqn double prioritized": [*DQN, "sampler=prioritized", "loss.double=true"],
    "dqn n-step": [*DQN, "loss.n_steps=3"],
    "dqn dueling, soft": [*DQN, "policy.dueling=true", "loss.tau=0.1"],
    "sac": SAC,
    "dqn two dims": [*DQN, "storage.ndim=2"],
    "dqn n-step delta": [*DQN, "loss.n_steps=3", "memory=delta"],
    "dqn frame stacks": [*DQN, "env.frame_stack=3"],
    "dqn lstm, few states, slices by priority": [
        *DQN, *SLICES, "policy=lstm", "sampler=prioritized_slice", "memory.recurrent_state_stride=7",
        "sampler.burn_in=2",
    ],
    "dqn gru, few states": [*DQN, *SLICES, "policy=gru", "memory.recurrent_state_stride=5"],
    "dqn gru, burn-in": [*DQN, *SLICES, "policy=gru", "sampler.burn_in=3"],
    "dqn lstm prioritized n-step": [
        *DQN, *SLICES, "policy=lstm", "sampler=prioritized_slice", "loss.n_steps=3", "loss.start_state=zero",
    ],
    "sac fixed alpha": [*SAC, "loss.alpha=0.2", "sampler=prioritized"],
}  # fmt: skip


def decided(run) -> dict:
    """The final state, but for the numbers that the index gives its slots: they have no meaning of their own."""
    state = final_state(run)
    ring = state["buffer"]["rows"]["ring"]
    assert ring.pop("index") and "slots" in ring
    ring.pop("slots")
    return state


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())
@pytest.mark.every(3)
def test_rows_on_a_device_teach_the_same(run, task, monkeypatch):
    """The host's memory stands for a GPU's: what is drawn, and what is learned from it, is the same bit for bit."""
    plain = final_state(run(*task, "run.dir=a"))
    monkeypatch.setattr(host, "is_elsewhere", lambda device: True)
    there = run(*task, "run.dir=b")
    found = final_state(there)
    for state in (plain, found):
        del state["buffer"]["rows"]  # in codes, or not
    same(plain, found)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())
@pytest.mark.every(3)
def test_stopped_and_resumed_equals_uninterrupted(run, task):
    whole = decided(run("run.dir=whole", *task))
    with stop_after(random.Random(str(task)).randrange(2, 18)):
        run("run.dir=cut", *task)
    same(decided(resume("cut")), whole)


@pytest.mark.parametrize(("task", "frames", "every"), [(DQN, 2600, 700), (SAC, 700, 150)], ids=["dqn", "sac"])
def test_the_figures_of_a_resumed_run_are_those_of_one_that_was_never_stopped(run, task, frames, every):
    def figures(made):
        timed = ("seconds", "frames_per_second", "stages", "memory")
        return [{key: x for key, x in record.items() if key not in timed} for record in made.metrics()]

    task = [*task, f"total_frames={frames}", "optim.updates_per_frame=0.1"]
    task += [f"run.eval_every={every}", "run.eval_episodes=1"]
    whole = figures(run("run.dir=whole", *task))
    with stop_after(24):  # with updates since the last report, and an evaluation
        run("run.dir=cut", *task)
    assert figures(resume("cut")) == whole and len(whole) > 3


@pytest.mark.parametrize("ending", ["stopped", "failed"])
def test_the_summary_of_a_run_that_ended_early_counts_every_frame(run, monkeypatch, ending):
    task = [*DQN, "total_frames=3000"]
    if ending == "stopped":
        with stop_after(24):
            run("run.dir=a", *task)
    else:
        original = CartPoleEnv.step
        calls = itertools.count(1)
        monkeypatch.setattr(CartPoleEnv, "step", lambda self, x: 1 / 0 if next(calls) == 1600 else original(self, x))
        with pytest.raises(EnvError):
            run("run.dir=a", *task)
    made = open_run("a")
    summary, last = made.summary, made.metrics()[-1]
    assert summary["status"] == ending and summary["frames"] == summary["throughput"]["frames"] == 1536
    assert last["frames"] == 1024 and summary["learning"]["episodes"] > last["episodes"]
    if ending == "stopped":
        assert [record["frames"] for record in resume("a").metrics()] == [1024, 2048, 3000]


def test_an_algorithm_that_keeps_no_ends_has_its_frames_counted(run, monkeypatch):
    class Endless(DQNAlgorithm):
        def keys(self, loss, estimator, env):
            return [key for key in super().keys(loss, estimator, env) if as_tuple(key)[-1] != "done"]

    monkeypatch.setitem(registry._users, "algorithm", {"endless": Endless})
    made = run("run.dir=a", *DQN, "loss=endless", "memory=full", "total_frames=3000")
    assert [record["frames"] for record in made.metrics()] == [1024, 2048, 3000]
    assert made.summary["frames"] == 3000


def test_a_run_cut_again_and_again_still_ends_the_same(run):
    whole = decided(run("run.dir=whole", *DQN))
    with stop_after(3):
        run("run.dir=cut", *DQN)
    for _ in range(4):
        with stop_after(3):
            resume("cut")
    same(decided(resume("cut")), whole)


@pytest.mark.parametrize("more", [[], [*SLICES, "policy=gru", "sampler.burn_in=2"]], ids=["mlp", "gru"])
def test_exact_and_full_learn_the_same_weights(run, more):
    """The rows that are drawn, and what they read, do not depend on how next observations are kept."""
    states = [final_state(run(f"run.dir={mode}", *DQN, *more, f"memory={mode}")) for mode in ("exact", "full")]
    for name, x in states[0]["policy"].items():
        assert torch.equal(x, states[1]["policy"][name]), name


def test_updates_are_those_that_frames_have_earned(run):
    state = final_state(run("run.dir=a", *DQN, "optim.updates_per_frame=0.3"))
    learned = 1200 + 16 - 200  # the last batch is cut to whole steps; the first 200 frames earn nothing
    assert abs(int(state["update"]["counters"][0]) - 0.3 * learned) <= 6
    assert 0 <= state["loop"]["owed"] < 1


def test_epsilon_falls_by_frames_and_ends_where_it_is_told_to(run):
    policy = final_state(run("run.dir=a", *DQN))["policy"]
    eps, frames = (next(x for k, x in policy.items() if k.endswith(name)) for name in (".eps", ".frames"))
    assert float(eps) == pytest.approx(0.05) and int(frames) >= 1200


def test_schedules_stand_where_they_do_on_policy_before_the_batch_is_collected(run):
    """Else the updates of a run's last batch have learning rate 0, and move nothing."""
    last = run("run.dir=a", *DQN, "optim.lr=3e-4", "optim.anneal_lr=true").metrics()[-1]
    assert last["frames"] == 1200 and last["lr"] == pytest.approx(3e-4 * (1 - 1152 / 1200))


@pytest.mark.parametrize("sampler", ["random", "prioritized"])
def test_one_reward_that_is_not_a_number_is_skipped_and_counted_with_any_sampler(run, monkeypatch, sampler):
    class Spoils(Transform):
        """The reward of one step is not a number."""

        def __init__(self):
            super().__init__(in_keys=["reward"])
            self.steps = 0

        def _step(self, tensordict, next_tensordict):
            self.steps += 1
            if self.steps == 70:
                next_tensordict["reward"][2] = torch.nan
            return next_tensordict

    monkeypatch.setitem(registry._users, "transform", {"Spoils": Spoils})
    made = run("run.dir=a", *DQN, f"sampler={sampler}", "env.transforms=[Spoils]", "seed=1")
    assert made.summary["status"] == "done"
    assert sum(record.get("skipped", 0) for record in made.metrics()) >= 1


def test_another_set_of_episodes_is_none_that_a_run_trains_on(run, monkeypatch):
    seeds = []
    reset = CartPoleEnv.reset
    monkeypatch.setattr(
        CartPoleEnv, "reset", lambda self, *, seed=None, **k: seeds.append(seed) or reset(self, seed=seed)
    )
    run("run.dir=a", *DQN, "seed=7", "run.max_replay_steps=0")
    trained = set(seeds)
    del seeds[:]
    for seed in (None, 0, 7):
        evaluate("a", episodes=3, seed=seed)
    played = [seeds[i : i + 3] for i in range(len(seeds)) if i % 3 == 0]
    assert not trained & set(seeds) and None not in seeds
    assert len(set(map(tuple, played))) >= 2


def test_the_greedy_policy_of_a_run_can_be_evaluated(run):
    found = evaluate(run("run.dir=a", *DQN).path, episodes=3)
    assert len(found.returns) == 3


@pytest.mark.parametrize("kind", ["multi_sync", "multi_async", "async"])
def test_a_policy_that_remembers_learns_from_what_workers_collect(run, kind):
    words = [*DQN, *SLICES, "policy=gru", "sampler=prioritized_slice", "sampler.burn_in=2", "total_frames=500"]
    made = run("run.dir=a", *words, f"collector={kind}", "collector.num_workers=2" if kind != "async" else "seed=1")
    assert made.summary["status"] == "done" and made.metrics()[-1]["updates"] > 10


def test_states_are_stored_where_slices_begin_from_them(run):
    widths = {}
    for start in ("stored", "zero"):
        run(f"run.dir={start}", *DQN, *SLICES, "policy=gru", f"loss.start_state={start}", "total_frames=400")
        ring = final_state(open_run(start))["buffer"]["rows"]["ring"]
        widths[start] = str(ring)
    assert "recurrent_state" in widths["stored"] and "recurrent_state" not in widths["zero"]


def test_rows_of_a_buffer_are_in_the_ledger(run):
    memory = run("run.dir=a", *DQN).summary["memory"]
    text = str(memory)
    assert "buffer" in text and "index" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["loss=dqn", "storage=none", "sampler=minibatch"],
            ["storage=none has none; use storage=tensor", "sampler=minibatch cuts one batch"],
        ),
        (["storage=tensor"], ["sampler=minibatch learns from each batch once", "use sampler=slice, or storage=none"]),
        (["storage=tensor", "sampler=random"], ["sampler=random draws single rows", "use sampler=slice"]),
        ([*DQN, "memory=compact"], ["memory=compact stores none; use memory=exact"]),
        ([*DQN, "policy.eps_init=0.01"], ["policy.eps_end=0.05 is more than policy.eps_init=0.01"]),
        ([*DQN, "collector.init_random_frames=5000"], ["leaves nothing of total_frames=1200"]),
        ([*DQN, "storage.max_size=10"], ["storage.max_size=10 is less than collector.frames_per_batch=64"]),
        ([*SAC, "loss.double=true", "policy.dueling=true"], ["'loss.double' with loss=sac", "policy.dueling has no"]),
        (
            [*SAC, "loss.alpha=0.1", "loss.target_entropy=-1"],
            ["loss.target_entropy has no meaning with loss.alpha=0.1"],
        ),
        (["loss.n_steps=3"], ["'loss.n_steps' with loss=ppo_clip"]),
        (
            [*DQN, "policy=gru"],
            ["policy=gru learns along trajectories, and sampler=random draws", "use sampler=slice or"],
        ),
        ([*DQN, "policy=gru", "sampler=prioritized"], ["sampler=prioritized draws single rows"]),
        ([*DQN, "policy=gru", "sampler=minibatch"], ["sampler=minibatch cuts one batch; use sampler=slice or"]),
        ([*DQN, "sampler=slice"], ["loss=dqn learns from single rows with policy=auto; use sampler=random"]),
        ([*DQN, *SLICES, "policy=gru", "collector.track_traj_ids=false"], ["needs collector.track_traj_ids=true"]),
        ([*SAC, "policy=gru"], ["policy=gru is recurrent, and loss=sac has no recurrent networks; use loss=dqn"]),
        ([*SAC, "sampler=slice"], ["loss=sac learns from single rows"]),
        ([*DQN, "loss.start_state=zero"], ["loss.start_state=zero is of a state that policy=auto lacks"]),
        (["loss.start_state=zero"], ["'loss.start_state' with loss=ppo_clip; it is an option of loss=dqn"]),
        ([*DQN, "sampler.burn_in=2"], ["'sampler.burn_in' with sampler=random"]),
        (
            ["storage=tensor", "sampler=slice", "policy=gru", "sampler.burn_in=2"],
            ["sampler.burn_in has no meaning with loss=ppo_clip"],
        ),
        (["storage=tensor", "sampler=prioritized_slice"], ["draws by the errors of rows", "use sampler=slice"]),
        ([*DQN, "storage.scratch_dir=x"], ["'storage.scratch_dir' with storage=tensor"]),
    ],
)
def test_what_does_not_fit_is_said_all_at_once(words, said):
    with pytest.raises(ConfigError) as caught:
        configure("train", words)
    for part in said:
        assert part in str(caught.value)


def test_an_action_that_does_not_fit_the_loss_names_the_one_that_does(run):
    refused(ConfigError, "loss=sac", lambda: run("run.dir=a", *DQN, "env.id=Pendulum-v1"))
    refused(ConfigError, "loss=dqn", lambda: run("run.dir=b", *SAC, "env.id=CartPole-v1"))


@pytest.mark.parametrize("task", [DQN, SAC], ids=["dqn", "sac"])
def test_frames_can_be_collected_with_a_trained_policy(run, task):
    trained = run("run.dir=a", *task)
    words = [
        "policy=checkpoint", f"policy.path={trained.path}", "total_frames=64", "collector.frames_per_batch=32",
        "env.num=2", f"env.id={trained.config['env']['id']}", "console=off", "run.dir=b",
    ]  # fmt: skip
    frames = collect(configure("collect", words), words)
    assert frames.summary["frames"] == 64

    words += ["env.id=MountainCar-v0", "run.dir=c"]
    with refused(ConfigError, f"{trained.config['env']['id']} MountainCar"):
        collect(configure("collect", words), words)


def test_a_users_own_network_of_action_values_is_trained(run):
    @register_policy("OwnValues")
    def own_values(observation_spec, action_spec, width=8):
        values = QValueActor(MLP(4, 2, (width,)), spec=action_spec)
        return TensorDictSequential(values, EGreedyModule(action_spec, 1.0, 0.1, 500))

    dqn, sac = ([word for word in words if not word.startswith("policy.")] for words in (DQN, SAC))
    state = final_state(run("run.dir=a", *dqn, "policy=OwnValues", "policy.kwargs.width=12"))
    assert any(x.shape == (12, 4) for x in state["policy"].values())
    refused(ConfigError, "critics", lambda: run("run.dir=b", *sac, "policy=OwnValues", "env.id=CartPole-v1"))


def test_a_collection_that_fails_at_once_leaves_nothing_of_its_policy(run):
    class Wide(nn.Linear):
        def forward(self, x):
            return super().forward(x).softmax(-1)

    @register_policy("TooWide")
    def too_wide(observation_spec, action_spec, width=3):
        return Wide(4, width)

    words = ["env.id=CartPole-v1", "policy=TooWide", "total_frames=8", "console=off", "run.dir=w"]
    refused(ArgumentError, "fit", lambda: collect(configure("collect", words), words))
    assert not Path("w").exists()


@pytest.mark.parametrize("fate", ["gone", "damaged"])
def test_who_opens_the_rows_of_an_older_checkpoint_is_told_what_became_of_the_newest(run, fate):
    done = run("run.dir=r", *DQN, "run.checkpoint_every=400")
    assert len(open_buffer("r")) == 500
    newest = done.checkpoints[-1]
    if fate == "gone":
        shutil.rmtree(newest)
        said = "the run had saved 1,200, whose checkpoint is gone"
    else:
        file = newest / "tensors.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
        said = "checkpoint skipped: .*tensors.safetensors"
    with pytest.warns(UserWarning, match=said):
        open_buffer("r")
    if fate == "gone":
        with pytest.warns(UserWarning, match=said):
            assert any(said in notice for found in inspect("r") for notice in found.notices)
    with warnings.catch_warnings(action="error"):
        open_buffer(done.checkpoints[-1 if fate == "gone" else -2])  # asked for by name
