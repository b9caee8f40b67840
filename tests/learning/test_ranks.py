"""Ranks of a learner: their gradient is one process's, they step alike to the bit, and they end together."""

import contextlib
import copy
import os
import signal
import socket
import subprocess
import sys
import threading
from datetime import timedelta

import psutil
import pytest
import torch
from actor_critic_batches import make_actor, make_critic, rollout
from face import Recurrence, Saver, Update, configure, refused
from torch import distributed

import rlcli
from rlcli.build import resume, train
from rlcli.build.plan import plan
from rlcli.collectors import Collector
from rlcli.data.files.row_files import SavedRows
from rlcli.envs import GymEnv, SerialEnv
from rlcli.errors import ConfigError, EnvError, NumericsError, ResourceError, StoppedSafely
from rlcli.learning.gradient import GradientChoice
from rlcli.learning.optimizer import FlatParameters
from rlcli.learning.ranks import Ranks
from rlcli.modules import build_actor_critic
from rlcli.objectives import ClipPPOLoss
from rlcli.objectives.value import GAE, ValueNorm
from rlcli.processes import watchdog
from rlcli.runs import checkpoint

DQN = ["loss=dqn", "env.num=4", "collector.frames_per_batch=16", "collector.init_random_frames=1024"]
SHORT = [
    "learner.world_size=2", "total_frames=4096", "collector.frames_per_batch=512",
    "sampler.batch_size=128", "run.eval_episodes=0", "console=off", "logger=none",
]  # fmt: skip


def together(work, size=2):
    """What `work(ranks)` returns of each rank, in threads of this process."""
    store, results = distributed.HashStore(), [None] * size

    def run(rank):
        gloo = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices, options._timeout = [gloo.create_device(hostname="127.0.0.1")], timedelta(seconds=30)
        try:
            results[rank] = work(Ranks(rank, size, {"cpu": gloo(store, rank, size, options)}, store))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def ppo(**options):
    return ClipPPOLoss(make_actor("categorical"), make_critic(), **options)


def valued(loss, shape=(4, 16), seed=0):
    return GAE(gamma=0.99, lmbda=0.95, value_network=loss.critic_network)(rollout(loss.actor_network, shape, seed))


def gru():
    """A recurrent loss, and a batch `[3, 40]` of it."""

    def cartpole():
        return GymEnv("CartPole-v1", categorical_action_encoding=True)

    env = cartpole()
    recurrence = Recurrence("gru", 8, 1, {})
    policy = build_actor_critic(env.observation_spec, env.action_spec, hidden=[8], recurrence=recurrence, generator=0)
    loss = ClipPPOLoss(policy.actor, policy.critic, normalize_advantage=True)
    with Collector(SerialEnv(3, cartpole), policy.actor, frames_per_batch=120, seed=0) as collector:
        return loss, GAE(gamma=0.99, lmbda=0.9, value_network=policy.critic)(collector.rollout())


# ---- the gradient ---------------------------------------------------------------------------------------------------
def gradient(loss, columns, kind, ranks=None):
    """Gradient and figures of a minibatch, of all ranks' where there are some."""
    flat = FlatParameters(loss)
    if ranks is not None:
        ranks.join(loss)
        (columns,) = ranks.epoch([columns], 1, loss.tensor_keys.advantage)
    figures = GradientChoice(loss, flat, kind).of(columns)(columns)
    if ranks is not None:
        figures = ranks.joined(flat, figures, columns)
    return flat.grad.clone(), {name: float(x) for name, x in figures.items()}


@pytest.mark.parametrize("case", ["closed form", "autograd", "masked", "recurrent"])
def test_gradient_of_two_ranks_is_that_of_one_process_on_the_joined_minibatch(case):
    kind = "auto" if case == "closed form" else "autograd"
    loss, batch = gru() if case == "recurrent" else (ppo(normalize_advantage=True), None)
    batch = valued(loss) if batch is None else batch
    whole = Update(copy.deepcopy(loss)).columns(batch)
    cut = 80 if case == "recurrent" else 20  # unequal shares; of sequences whole ones
    parts = [{key: x[:cut].clone() for key, x in whole.items()}, {key: x[cut:].clone() for key, x in whole.items()}]
    expected, _ = gradient(copy.deepcopy(loss), {key: x.clone() for key, x in whole.items()}, kind)
    if case == "masked":  # rows that do not count, on one rank
        rows = torch.arange(len(parts[0]["action"]) + 5).clamp(max=cut - 1)
        padded = {key: x[rows].clone() for key, x in parts[0].items()}
        padded["mask"] = (torch.arange(len(rows)) < cut)[:, None]
        loss.normalize_advantage = False
        expected, _ = gradient(copy.deepcopy(loss), {key: x.clone() for key, x in whole.items()}, kind)
        parts[0] = padded
    losses = [copy.deepcopy(loss) for _ in parts]

    found = together(lambda ranks: gradient(losses[ranks.rank], parts[ranks.rank], kind, ranks))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]
    assert (found[0][0] - expected).abs().max() <= 1e-6


def test_a_rank_without_rows_and_one_that_is_not_finite():
    """The first has no part in the gradient, of the second all ranks skip the step."""
    loss = ppo()
    columns = Update(copy.deepcopy(loss)).columns(valued(loss))
    expected, _ = gradient(copy.deepcopy(loss), columns, "auto")

    def work(ranks):
        update = Update(copy.deepcopy(loss), max_grad_norm=None)
        update.ranks = ranks
        own = [columns, columns] if ranks.rank == 0 else [columns]
        first, second = ranks.epoch(own, 3, "advantage")
        update.on(first)
        before = update.flat.tensor.detach().clone()
        update.on(second)
        grad, figures = update.flat.grad.clone(), update.figures()
        update.on({**columns, "advantage": columns["advantage"] * (torch.nan if ranks.rank else 1)})
        return before, grad, figures, update.step.made, update.step.skipped

    one, other = together(work)
    assert torch.equal(one[1], other[1]) and one[2] == other[2]
    assert one[3:] == other[3:] == (2, 1)
    assert (one[1] - gradient_at(loss, one[0], columns)).abs().max() <= 1e-6
    assert expected.abs().max() > 0


def gradient_at(loss, weights, columns):
    twin = copy.deepcopy(loss)
    flat = FlatParameters(twin)
    flat.tensor.data.copy_(weights)
    GradientChoice(twin, flat).of(columns)(columns)
    return flat.grad


@pytest.mark.parametrize("steps", [200, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("average", ["minibatch", "batch"])
def test_ranks_step_alike_to_the_bit_and_meet_once_a_step_and_an_epoch(steps, average):
    loss = ppo(normalize_advantage=average == "minibatch")
    batches = [valued(loss, seed=seed) for seed in range(2)]
    estimator = GAE(gamma=0.99, lmbda=0.95, value_network=loss.critic_network, average=average == "batch")

    def work(ranks):
        update = Update(copy.deepcopy(loss), epochs=steps // 4, batch_size=16, lr=1e-3)
        update.ranks = ranks
        ranks.join(update.loss, copy.copy(estimator))
        assert ranks.average == average
        update.improve(batches[ranks.rank])
        ranks.compare(update.flat.tensor)
        return update.flat.tensor.detach().clone(), dict(ranks.calls), update.figures()

    one, other = together(work)
    assert torch.equal(one[0], other[0]) and one[2] == other[2]
    assert one[1] == {"step": steps, "epoch": steps // 4, "save": 1}


def test_value_statistics_are_of_all_ranks_rows():
    target = torch.randn(30, 1, dtype=torch.float64)
    alone = ValueNorm()
    alone.update(target)

    def work(ranks):
        norm = ValueNorm()
        norm.across = ranks.means
        norm.update(target[:10] if ranks.rank else target[10:])
        return norm.moments()

    for mean, deviation in together(work):
        torch.testing.assert_close((mean, deviation), alone.moments())


def test_unequal_weights_are_an_error_that_names_ranks():
    with refused(NumericsError, "rank 1 differ"):
        together(lambda ranks: ranks.compare(torch.full((3,), float(ranks.rank))))


def test_the_wait_for_another_rank_ends_where_the_run_is_to_stop():
    given_up = threading.Event()

    def work(ranks):
        def stop():
            raise StoppedSafely("asked to stop")

        if ranks.rank:
            given_up.wait(20)
            return ranks.add("step", torch.ones(1))
        ranks.look = stop
        try:
            with pytest.raises(StoppedSafely):
                ranks.add("step", torch.ones(1))
        finally:
            given_up.set()

    together(work)


@pytest.mark.parametrize("late", [1, 2])
def test_a_rank_that_stands_still_is_named_with_what_is_waited_for(late, monkeypatch):
    monkeypatch.setattr(watchdog, "SAY_AFTER", 0.2)
    said, over = [], threading.Event()

    def work(ranks):
        if ranks.rank == late:
            over.wait(20)
        ranks.say = lambda text: (said.append(text), over.set())
        ranks.add("epoch", torch.ones(1))

    together(work, size=3)
    (text,) = said
    assert text.startswith(f"rank {late} of the learner stands still") and text.endswith("for its advantages")


# ---- whole runs -----------------------------------------------------------------------------------------------------
@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def start(*words):
        words = [*SHORT, *([] if "loss=dqn" in words else ["optim.epochs=2"]), *words]
        return train(configure("train", words), words)

    return start


def states(path):
    newest = checkpoint.load_latest(path / "checkpoints").path
    return [checkpoint.load(newest, rank, 2).state for rank in range(2)]


@contextlib.contextmanager
def signalled(number, sign, error=None):
    """Send rank 1 a signal after rank 0's batch of that number, or fail there; yield a list of its pid."""
    after_batch, begin, seen, pids = Saver.after_batch, Saver.begin, [], []

    def begun(self, frames):
        pids.extend(worker.pid for worker in self.of.end.__self__.workers)
        begin(self, frames)

    def after(self, frames, **sound):
        seen.append(frames)
        if len(seen) == number:
            os.kill(pids[0], sign)
            if error is not None:
                raise error
        after_batch(self, frames, **sound)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saver, "begin", begun)
        patch.setattr(Saver, "after_batch", after)
        yield pids


def same(a, b):
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a.keys() - {"clock", "warnings"}:
            same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, SavedRows):
        same(a.columns(), b.columns())
    else:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b if not hasattr(a, "all") else (a == b).all()


def test_a_signal_to_any_rank_stops_all_and_a_resumed_run_is_the_same_to_the_bit(run):
    """And so is one in which a rank failed: the others save what they had after the last whole batch.

    Of one that was killed nothing can be saved: the run goes on from the checkpoint before.
    """
    whole = run("run.dir=whole")
    with signalled(3, signal.SIGTERM) as pids, pytest.raises(StoppedSafely):
        run("run.dir=cut")
    with signalled(3, 0, EnvError("broken")), refused(EnvError, "broken"):
        run("run.dir=failed")
    with signalled(7, signal.SIGKILL), refused(ResourceError, "rank 1 SIGKILL"):
        run("run.dir=killed", "run.checkpoint_every=1024")
    assert not any(psutil.pid_exists(pid) for pid in pids)
    for resumed in (resume("failed"), resume("killed"), resume("cut")):
        for one, other in zip(states(whole.path), states(resumed.path), strict=True):
            same(one, other)
        assert [record["frames"] for record in resumed.metrics()] == [512 * k for k in range(1, 9)]
    memory = whole.summary["memory"]["process"]
    assert memory["ranks"] == 2 and memory["peak"] > psutil.Process().memory_info().rss + (100 << 20)
    # another number of ranks goes on from the weights
    alone = resume("cut", ["learner.world_size=1", "total_frames=4608"])
    assert alone.summary["status"] == "done" and alone.metrics()[-1]["frames"] == 4608


def test_the_first_batches_of_all_ranks_are_one_process_s(run):
    """Rewards and ends of all envs, so episodes and returns, are those of the run that is not divided."""
    words = ["total_frames=512"]
    alone, both = run("learner.world_size=1", *words), run(*words)
    assert (alone.path / "episodes.csv").read_text().split("\n")[0]
    columns = ("frames", "return", "length", "episodes", "best")
    one, other = ([record[name] for name in columns] for record in (alone.metrics()[0], both.metrics()[0]))
    assert one == other


def test_a_rank_that_is_killed_ends_all_with_its_cause(run):
    """Where nothing was saved before, the weights go on."""
    with signalled(2, signal.SIGKILL), refused(ResourceError, "rank 1 SIGKILL"):
        run("run.dir=killed", *DQN)
    resumed = resume("killed")
    (warning,) = resumed.summary["warnings"]  # said by rank 0 alone
    assert resumed.summary["status"] == "done" and "begin anew" in warning["text"] and warning["count"] == 1
    paths = [file.path for file in rlcli.verify(resumed.path)]
    assert len(paths) == len({*paths})


@pytest.mark.parametrize(
    "words",
    [
        ["policy=gru", "sampler.batch_size=64", "value.normaliser=popart"],
        DQN,
        pytest.param(["loss=ppo_kl", "loss.target_kl=0.01", "value.average_over=batch"], marks=pytest.mark.slow),
        pytest.param(["sampler=slice", "sampler.slice_len=16", "storage=tensor"], marks=pytest.mark.slow),
        pytest.param(["loss=a2c", "value.shifted=true"], marks=pytest.mark.slow),
        pytest.param(["collector=multi_sync", "collector.num_workers=2"], marks=pytest.mark.slow),
    ],
    ids=lambda words: words[0],
)
def test_algorithms_of_two_ranks_end_with_the_same_weights(run, words):
    """They compare them at the last checkpoint."""
    assert run("total_frames=2048", *words).summary["status"] == "done"


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_of_torchrun_are_those_of_one_command_to_the_bit(run, tmp_path, nodes):
    """The second node sees no run folder: it sends its part of the checkpoint."""
    words = ["total_frames=1024", "optim.epochs=2", *SHORT[:1], *SHORT[2:]]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = ["--master-addr=127.0.0.1", f"--master-port={free.getsockname()[1]}", f"--nnodes={nodes}"]
    processes = []
    for node in range(nodes):
        (folder := tmp_path / str(node)).mkdir()
        command = [sys.executable, "-m", "torch.distributed.run", *meeting, f"--node-rank={node}"]
        command += [f"--nproc-per-node={2 // nodes}", "-m", "rlcli", "train", *words, "run.dir=run"]
        processes.append(subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    for process in processes:
        output, _ = process.communicate(timeout=180)
        assert process.returncode == 0, output.decode()
    alone = run(*words)
    for one, other in zip(states(alone.path), states(tmp_path / "0" / "run"), strict=True):
        same(one, other)
    assert all(not [*(tmp_path / "1").iterdir()] for _ in range(1, nodes))


@pytest.mark.slow
def test_ppo_exact_of_two_ranks_solves_cartpole_in_four_of_five_seeds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    returns = []
    for seed in range(5):
        words = ["recipe=ppo_exact", "learner.world_size=2", f"seed={seed}", "console=off", "logger=none"]
        returns.append(train(configure("train", words), words).summary["evaluation"]["mean_return"])
    assert sorted(returns)[1] >= 475, returns


def test_the_plan_of_ranks_counts_the_share_of_each_and_all_processes():
    found = plan(configure("train", SHORT), "train")
    assert (found.ranks, found.frames, found.lanes) == (2, 256, 4) and found.workers == found.total
    assert found.places[0].need == 2 * found.total


# ---- what is refused ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["env.num=9"], "env.num=9 does not divide"),
        (["collector.frames_per_batch=513"], "collector.frames_per_batch=514"),
        (["sampler.batch_size=127"], "sampler.batch_size=126"),
        (["collector=multi_async"], "collector=multi_sync"),
        (["env.normalize_observation=true"], "statistics of its own"),
        (["collector.trajs_per_batch=4"], "collector.trajs_per_batch"),
        (["learner.world_size=1", "learner.backend=gloo"], "learner.backend=gloo has no meaning"),
        (["learner.backend=nccl"], "nccl"),
    ],
)
def test_what_does_not_fit_ranks_is_refused(words, named):
    with pytest.raises(ConfigError) as caught:
        configure("train", [*SHORT, *words])
    assert named in str(caught.value)


def test_ranks_that_nobody_asked_for_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with refused(ConfigError, "learner.world_size=2"):
        configure("train", ["console=off"])
    assert configure("train", SHORT).learner.world_size == 2
    with refused(ConfigError, "storage=tensor has no meaning with ranks on several machines"):
        configure("train", [*SHORT, "recipe=dqn_exact"])
