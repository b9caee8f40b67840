"""Collectors whose workers are somewhere else give what those of this machine give, to the bit."""

from __future__ import annotations

import concurrent.futures._base
import os
import random
import signal
import threading
import time
from functools import partial
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from face import Recurrence, decode_state, encode_state, refused
from interrupted import instructions
from loopback import Loopback
from tensordict.nn import TensorDictModule

from rlcli.collectors import AsyncCollector, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from rlcli.collectors.workers import asynchronous, batches, group
from rlcli.data import LazyTensorStorage, ReplayBuffer
from rlcli.envs import GymEnv, SerialEnv, TransformedEnv
from rlcli.errors import ArgumentError, EnvError
from rlcli.modules import MLP, Categorical, ProbabilisticActor, build_actor_critic
from rlcli.processes import remote_group, replacing, watchdog
from rlcli.transforms import StepCounter
from rlcli.weight_update import MultiProcessWeightSyncScheme, NoWeightSyncScheme, SharedMemWeightSyncScheme
from tests.collectors.counting import counting, pair, steps_seen

KINDS = [MultiSyncCollector, MultiAsyncCollector]
IDS, VERSION = ("collector", "traj_ids"), ("collector", "policy_version")


def cartpole():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def four():
    return SerialEnv(4, cartpole)


def counted():
    return TransformedEnv(four(), StepCounter(7))


def actor(seed: int = 0) -> ProbabilisticActor:
    torch.manual_seed(seed)
    net = TensorDictModule(MLP(4, 2, hidden=[16]), ["observation"], ["logits"])
    return ProbabilisticActor(net, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True)


def two_numbers():
    """A policy for `counting` envs."""
    net = TensorDictModule(MLP(2, 2, hidden=[4]), ["observation"], ["logits"])
    return ProbabilisticActor(net, in_keys=["logits"], distribution_class=Categorical)


def gru(seed: int = 0):
    env = cartpole()
    recurrence = Recurrence("gru", 8, 2, {})
    return build_actor_critic(
        env.observation_spec, env.action_spec, hidden=[8], recurrence=recurrence, generator=0
    ).actor  # fmt: skip


def doubled(batch):
    batch["next", "reward"].mul_(2)
    batch["collector", "twice"] = batch["observation"] * 2


def same(a, b) -> None:
    """The same keys, with the same bits."""
    assert {*a.keys(True, True)} == {*b.keys(True, True)}
    for key in a.keys(True, True):
        x, y = (torch.as_tensor(each[key].full() if hasattr(each[key], "full") else each[key]) for each in (a, b))
        assert x.dtype == y.dtype and x.shape == y.shape, key
        assert torch.equal(*(each.nan_to_num(7.5) if x.is_floating_point() else each for each in (x, y))), key


def follows(batch) -> None:
    """Where two rows are of one episode, the second's observation is what the first says comes next."""
    rows = batch.reshape(-1, batch.shape[-1])
    on = rows[IDS][:, 1:] == rows[IDS][:, :-1]
    now, after = rows["observation"][:, 1:], torch.as_tensor(rows["next", "observation"])[:, :-1]
    assert torch.equal(now[on], after[on])


def published(collector, policy) -> None:
    with torch.no_grad():
        for weights in policy.parameters():
            weights.mul_(1.01)
    collector.update_policy_weights_()


def killed_at_random(c, rng, kills, after_batch=lambda: None) -> int:
    """Kill a worker so many times while batches of 200 frames come, each whole; return the frames of all."""
    frames = 0
    for n in range(1, kills + 1):
        victim = rng.randrange(2)
        timer = threading.Timer(rng.random() * 0.03, lambda v=victim: c.processes.remote.kill(c.processes.workers[v]))
        timer.start()
        while sum(often for often, _ in c.restarts) < n or timer.is_alive():
            batch = c.next()
            frames += batch.numel()
            follows(batch)
            assert batch.numel() == 200 and c.frames == frames
            after_batch()
    return frames


# ---- what workers of this machine give -------------------------------------------------------------------------------
CASES = {
    "full": (four, actor, {"next_obs": "full"}),
    "exact": (four, actor, {"next_obs": "exact"}),
    "compact": (four, actor, {"next_obs": "compact"}),
    "delta": (four, actor, {"next_obs": "delta"}),
    "single envs": (cartpole, actor, {"next_obs": "exact"}),
    "single envs, full, end to end": (cartpole, actor, {"cat_results": 0}),
    "recurrent": (four, gru, {"recurrent_state_stride": 16, "next_obs": "exact"}),
    "uneven": (four, actor, {"frames_per_batch": [40, 80], "cat_results": 0, "next_obs": "exact"}),
    "ended early": (four, actor, {"reset_when_done": False}),
    "hooks": (four, actor, {"post_collect_hook": doubled, "init_random_frames": 150}),
    "cut, kept": (four, actor, {"max_frames_per_traj": 9, "keep_keys": ["observation", "action", ("next", "done")]}),
    "transforms": (counted, actor, {"set_truncated": True}),
    "no policy": (four, lambda: None, {"track_traj_ids": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_batches_are_those_of_workers_of_this_machine(case):
    env, policy, more = CASES[case]
    options = {"frames_per_batch": 160, "seed": 3, "track_policy_version": True} | more
    policies = policy(), policy()
    with (
        MultiSyncCollector([env] * 2, policies[0], start_method="fork", **options) as here,
        MultiSyncCollector([env] * 2, policies[1], transport=Loopback, **options) as there,
    ):
        for n in range(5):
            same(here.next(), there.next())
            if policies[0] is not None and n % 2:
                for each, acting in zip((here, there), policies, strict=True):
                    published(each, acting)
        told = ([vars(record) | {"waited": None, "at_most": ""} for record in each.workers] for each in (here, there))
        assert next(told) == next(told)
        assert here.stats(workers="both") == there.stats(workers="both")
        remote = there.processes.remote
    assert remote.is_closed and remote.carried == (2 if policies[0] is not None else 0)


def test_what_was_delivered_is_the_consumers_own():
    with MultiSyncCollector([four] * 2, actor(), frames_per_batch=80, seed=0, transport=Loopback) as c:
        first = c.next()
        kept = first.clone()
        first["observation"].add_(0)  # which may be written to
        for _ in range(4):
            c.next()
    same(first, kept)


@pytest.mark.parametrize("mode", ["full", "exact", "compact"])
def test_a_batch_travels_at_the_size_of_its_rows(mode, monkeypatch):
    """Observations once and the successors of rows where episodes ended, in whatever mode."""
    came = []
    joined = replacing.joined
    monkeypatch.setattr(replacing, "joined", lambda *parts: came.append((joined(*parts), *parts)) or came[-1][0])
    frames = 1024
    with MultiSyncCollector([four] * 2, actor(), frames_per_batch=frames, next_obs=mode, transport=Loopback) as c:
        c.next(), came.clear(), c.next()
    for part, body, arrays in came:
        rows = frames // 2 * sum(x[0, 0].nbytes for x in part.columns.values())
        ends = 0 if mode == "compact" else sum(x.nbytes for x in part.finals.values.values()) + 4 * 16
        assert sum(x.nbytes for x in arrays) + len(body) <= 1.01 * (rows + ends) + 4096
        assert ("next", "observation") not in part.columns


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("back", [True, False], ids=["goes on there", "goes on here"])
def test_a_run_goes_on_half_way_there_or_here(kind, back):
    def make(elsewhere):
        options = {"transport": Loopback} if elsewhere else {"start_method": "fork"}
        return kind([four] * 2, actor(), frames_per_batch=80, seed=3, next_obs="exact", episode_seeds=True, **options)

    with make(True) as first:
        assert first.remember_episodes(1000)
        for _ in range(3):
            first.deliver()
        published(first, first.policy)
        state = decode_state(b"".join(map(bytes, encode_state(first.state_dict()))), "a checkpoint")
        expected = [first.deliver() for _ in range(5)]
    with make(back) as second:
        published(second, second.policy)
        second.remember_episodes(1000)
        assert second.load_state_dict(state) == [] and second.frames == 3 * 80
        found = [second.deliver() for _ in range(5)]
        assert kind is MultiSyncCollector or second.lag >= 0
    if kind is MultiAsyncCollector:  # who is first is chance: what the first worker gave, as far as both have it
        expected, found = ([d for d in each if not d.lanes.start] for each in (expected, found))
        assert expected and found
    for a, b in zip(expected, found, strict=kind is MultiSyncCollector):
        same(a.raw.exclude(VERSION), b.raw.exclude(VERSION))


def test_versions_advance_on_every_worker_that_does_not_wait():
    policy, seen = actor(), [set(), set()]
    options = {"frames_per_batch": 40, "max_lag": 8, "on_lag": "block"}  # else one may wait as long as it likes
    with MultiAsyncCollector([four] * 2, policy, **options, transport=Loopback) as c:
        for n in range(40):
            delivered = c.deliver()
            versions = delivered.raw[VERSION].unique().tolist()
            assert len(versions) == 1 and 0 <= n - versions[0] <= 8
            seen[delivered.lanes.start // 4] |= {*versions}
            published(c, policy)
        assert all(len(versions) > 5 for versions in seen) and 5 < c.processes.remote.carried <= 40
        state = c.state_dict()
    with AsyncCollector([four], policy, frames_per_batch=40, transport=Loopback) as c:
        c.next()
        assert c.lag == 0
    with MultiAsyncCollector([four] * 2, policy, frames_per_batch=40, transport=Loopback) as c:
        c.load_state_dict(state)
        for _ in range(6):
            c.next()
            assert c.lag >= 0 and c.policy_version == 40
    assert max(map(len, c.group.processes.begun())) <= 2


class Teams(MultiAsyncCollector):
    """Two workers fill a batch together, as in a `RayCollector` of such collectors."""

    _together = 2


@pytest.mark.parametrize("where", [{"transport": Loopback}, {"start_method": "fork"}], ids=["elsewhere", "here"])
@pytest.mark.parametrize("case", ["full", "compact", "delta", "single envs", "recurrent"])
def test_workers_that_wait_for_each_other_give_what_a_collector_of_them_gives(case, where):
    env, policy, more = CASES[case]
    options = {"seed": 3, "track_policy_version": False, "episode_seeds": True} | more
    with MultiSyncCollector([env] * 4, policy(), frames_per_batch=320, start_method="fork", **options) as c:
        rows = [c.rollout() for _ in range(4)]
    options["frames_per_batch"] = 160
    with Teams([env] * 4, policy(), **options, **where) as c:
        c.remember_episodes(1000)
        deliveries = [c.deliver() for _ in range(6)]
        assert c.frames == sum(each.raw["next", "done"].numel() for each in deliveries)
        state = decode_state(b"".join(map(bytes, encode_state(c.state_dict()))), "a checkpoint")
    with Teams([env] * 4, policy(), **options, **where) as c:
        assert c.load_state_dict(state) == []
        deliveries, batch = [*deliveries, *(c.deliver() for _ in range(6))], c.next()
    half = rows[0].shape[0] // 2
    for first in (0, half):
        given = [each.raw for each in deliveries if each.lanes == range(first, first + half)]
        assert len(given) > 1
        for expected, found in zip(rows, given, strict=False):
            same(expected[first : first + half], found)
    assert batch.shape == ((2, 4, 20) if env is four else (2, 80)) and batch.names[-1] == "time"


def test_workers_that_wait_for_each_other_have_as_many_envs():
    three = partial(SerialEnv, 3, cartpole)
    with refused(ArgumentError, "workers envs 4 3"):
        Teams([four, three], None, frames_per_batch=40, transport=Loopback)
    with Teams([four, four, three, three], None, frames_per_batch=40, transport=Loopback) as c:
        assert {c.next().shape[:2] for _ in range(8)} <= {(2, 4), (2, 3)}


def test_a_state_of_workers_that_did_not_wait_is_refused_by_those_that_do():
    options = {"frames_per_batch": 40, "seed": 3, "transport": Loopback}
    with MultiAsyncCollector([four] * 4, actor(), **options) as c, Teams([four] * 4, actor(), **options) as teams:
        c.next()
        alone = c.state_dict()
        assert len(teams.next().reshape(-1)) == 40
        with refused(ArgumentError, "state other teams"):
            teams.load_state_dict(alone)
        assert teams.frames == 40 and teams.next().shape == (2, 4, 5)
        c.load_state_dict(teams.state_dict())
        assert c.frames == 80 and c.next().shape == (4, 5)  # one worker's part


@pytest.mark.parametrize("kind", [MultiAsyncCollector, Teams])
def test_rows_go_into_a_buffer_that_is_here_while_a_thread_collects(kind):
    buffer = ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=32)
    with kind([four] * 2, None, frames_per_batch=80, replay_buffer=buffer, transport=Loopback) as c:
        c.start()
        while len(buffer) < 2000:
            c.background.thread.join(0.01)
            assert c.background.failure is None
        c.async_shutdown()
    assert buffer.sample()["observation"].shape == (32, 4)


# ---- what befalls workers --------------------------------------------------------------------------------------------
class Fatal(gym.Wrapper):
    """Raises, or ends its process, at a step."""

    def __init__(self, how):
        super().__init__(gym.make("CartPole-v1"))
        self.how, self.t = how, 0

    def step(self, action):
        self.t += 1
        if self.t == 30 and self.how != "lives":
            if self.how == "exits":
                os._exit(7)
            while self.how == "hangs":
                time.sleep(0.01)
            raise ZeroDivisionError
        return super().step(action)


def fatal(how):
    env = SerialEnv(1, lambda: GymEnv(Fatal(how), categorical_action_encoding=True))
    env.vec_env.step_timeout = 0.4 if how == "hangs" else None
    return env


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["exits", "raises", "hangs", "killed"])
def test_a_worker_that_fails_is_named(kind, how):
    makers = [lambda: SerialEnv(1, cartpole), partial(fatal, how) if how != "killed" else partial(fatal, "lives")]
    words = {"exits": "worker exited code 7 1, env", "raises": "ZeroDivisionError env 1 episode step",
             "hangs": "no answer 0.4 env 1 episode step", "killed": "killed SIGKILL worker 1"}  # fmt: skip
    with kind(makers, None, frames_per_batch=40, seed=0, transport=Loopback) as c:
        if how == "killed":  # others may fail before anybody's first batch is there
            c.next()
            os.kill(c.processes.workers[1].process.pid, signal.SIGKILL)
        with refused(EnvError, words[how]):
            for _ in range(2000):
                c.next()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_frames_are_exact_whatever_kills_workers(kind, kills, tmp_path, monkeypatch):
    monkeypatch.setattr(replacing, "RESTARTS", 10**6)
    rng, seed = random.Random(), random.randrange(1 << 30)
    print("seed", seed)
    rng.seed(seed)
    paths = [tmp_path / str(index) for index in range(2)]
    makers = [partial(pair, path, 7) for path in paths]
    options = {"frames_per_batch": 200, "next_obs": "exact", "seed": 0, "on_worker_error": "restart"}
    policy = two_numbers()
    with kind(makers, policy, transport=Loopback, track_policy_version=True, **options) as c:
        frames = killed_at_random(c, rng, kills, partial(published, c, policy))
        while {worker.version for worker in c.workers} != {c.policy_version}:
            frames += c.next().numel()
        assert all("killed" in worker.cause for worker in c.workers if worker.restarts)
        waiting = sum(np.prod(part["shape"]) for _, part in c.state_dict().get("ready", ()))
        lost = sum(frames for _, frames in c.restarts)
        seen = steps_seen(*paths)
    assert 0 <= seen - frames - waiting <= lost  # what was asked for and did not come: at most
    assert lost <= 2 * 2 * 200 * kills


def test_a_loop_of_failures_ends_with_its_first_cause():
    with (
        MultiSyncCollector([partial(fatal, "raises")] * 2, None, frames_per_batch=80, transport=Loopback,
                           on_worker_error="restart") as c,
        refused(EnvError, "restarted more ZeroDivisionError"),
    ):  # fmt: skip
        c.next()


def test_a_stopped_worker_is_killed_where_steps_have_a_limit(monkeypatch, tmp_path):
    def limited():
        env = SerialEnv(2, partial(counting, tmp_path / "steps"))
        env.vec_env.step_timeout = 0.2
        return env

    monkeypatch.setattr(watchdog, "LOOK", 0.05)
    with MultiSyncCollector([limited] * 2, None, frames_per_batch=20, transport=Loopback) as c:
        c.next()
        os.kill(c.processes.workers[1].process.pid, signal.SIGSTOP)
        with refused(EnvError, "killed not answering worker 1 envs 2 to 3"):
            c.next()


@pytest.mark.parametrize("kind", KINDS)
def test_collecting_goes_on_wherever_ctrl_c_came(kind):
    files, rng = {group.__file__, remote_group.__file__, replacing.__file__}, random.Random(0)
    policy = actor()
    with kind([cartpole] * 2, policy, frames_per_batch=8, seed=0, transport=Loopback) as c:
        c.next()
        all_of_it = instructions(files, c.next)
        for _ in range(40):
            published(c, policy)
            instructions(files, c.next, at=rng.randrange(all_of_it))
            for _ in range(100):
                follows(c.next())
                if all(record.version == c.policy_version for record in c.group.records):
                    break
            else:
                raise AssertionError(f"{c.policy_version}: {c.group.records}")


def test_nothing_is_locked_while_answers_are_waited_for(monkeypatch):
    """A Ctrl-C there would keep it locked for ever."""
    locking, found, counts = {threading.__file__, concurrent.futures._base.__file__}, [], []
    with MultiAsyncCollector([cartpole] * 2, None, frames_per_batch=8, transport=Loopback) as c:
        ready = c.processes._ready

        def watched(heads):
            counts.append(instructions(locking, lambda: found.append(ready(heads))))
            return found[-1]

        monkeypatch.setattr(c.processes, "_ready", watched)
        for _ in range(10):
            c.next()
    assert counts and not any(counts)


@pytest.mark.parametrize("kind", [MultiAsyncCollector, Teams])
@pytest.mark.parametrize("where", [{"transport": Loopback}, {"start_method": "fork"}], ids=["elsewhere", "here"])
def test_rows_that_ctrl_c_loses_are_no_part_of_a_trajectory(kind, where, tmp_path):
    """Nor are rows given twice, or written anew while somebody has them."""
    files, rng, last = {module.__file__ for module in (asynchronous, batches, group)}, random.Random(0), {}
    makers = [partial(pair, tmp_path / str(index)) for index in range(4)]
    with kind(makers, None, frames_per_batch=40, next_obs="exact", seed=0, **where) as c:
        numbers = [(call, instructions(files, call)) for call in (c.rollout, c.state_dict)]
        last = {lane: None for lane in range(8)}
        for n in range(120):
            call, count = numbers[n % 2]
            given = []
            instructions(files, lambda call=call, given=given: given.append(call()), at=rng.randrange(count))
            if given and call == c.rollout:  # nobody knows whose rows these are
                last.clear()
            delivered = c.deliver()
            follows(delivered.raw)
            for lane, rows in zip(delivered.lanes, delivered.raw, strict=True):
                seen, (number, after) = rows["observation"][0], last.get(lane) or (None, None)
                assert rows[IDS][0] != number or torch.equal(seen, after), (n, lane, after, seen)
                last[lane] = rows[IDS][-1], torch.as_tensor(rows["next", "observation"])[-1]


class Often(gym.Wrapper):
    """Raises at every step, or takes its time for each."""

    def __init__(self, fails: bool) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.fails = fails

    def step(self, action):
        if self.fails:
            raise ZeroDivisionError
        time.sleep(0.02)
        return super().step(action)


def often(fails):
    return SerialEnv(1, lambda: GymEnv(Often(fails), categorical_action_encoding=True))


def test_a_team_goes_on_whichever_of_it_fails():
    with Teams([partial(often, False), partial(often, True)], None, frames_per_batch=10, transport=Loopback) as c:
        for _ in range(8):
            with refused(EnvError, "ZeroDivisionError env 1 step"):
                c.next()
        assert not c.frames


@pytest.mark.parametrize("kind", KINDS)
def test_who_waited_is_counted(kind, monkeypatch):
    now = 100.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(group, "time", clock)
    monkeypatch.setattr(replacing, "time", clock)
    with kind([cartpole], actor(), transport=Loopback, frames_per_batch=16) as c:
        first = c.group.processes.first

        def slow():
            nonlocal now
            begun, answer = now, first()
            now = begun + 5
            c.group.processes.came = begun + 3 if c.frames == 0 else begun - 2
            return answer

        monkeypatch.setattr(c.group.processes, "first", slow)
        c.next()
        assert c.workers[0].waited == (3.0, 0.0)
        c.next()
        assert c.workers[0].waited == (3.0, 2.0) and c.figures()["workers"][0]["waited"] == (3.0, 2.0)


class Away(MultiCollector):
    """A user's own, which decides by itself whether workers wait for each other."""

    def __init__(self, makers, *, waits: bool, **options):
        super().__init__(makers, transport=Loopback, sync=waits, **options)


@pytest.mark.parametrize(("waits", "kind"), [(True, MultiSyncCollector), (False, MultiAsyncCollector)])
def test_a_subclass_may_say_whether_workers_wait(waits, kind):
    with Away([cartpole] * 2, waits=waits, frames_per_batch=64, total_frames=128) as c:
        assert isinstance(c, (Away, kind)) and type(c).__name__ == "Away" and len(c.next()) == (2 if waits else 64)


# ---- what cannot be --------------------------------------------------------------------------------------------------
REFUSED = {
    "preemptive_threshold": {"preemptive_threshold": 0.5},
    "weights_swap step": {"weights_swap": "step"},
    "SharedMemWeightSyncScheme policy": {"weight_sync_schemes": {"policy": SharedMemWeightSyncScheme()}},
    "start_method": {"start_method": "spawn"},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_needs_one_machine_is_refused_before_anything_starts(words):
    def never(workers):
        raise AssertionError("was started")

    refused(ArgumentError, words, lambda: MultiSyncCollector([cartpole], actor(), transport=never, **REFUSED[words]))


def test_models_go_by_the_schemes_that_are_messages():
    schemes = {"policy": MultiProcessWeightSyncScheme(strategy="state_dict"), "value": NoWeightSyncScheme()}
    with (
        MultiSyncCollector([cartpole], actor(), transport=Loopback, weight_sync_schemes=schemes) as c,
        pytest.warns(UserWarning),
    ):
        published(c, c.policy)
        c.next()
        assert c.workers[0].version == 1
