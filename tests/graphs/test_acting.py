"""Policies that act on another device: the same batches as here, bit for bit, by a few operations a step."""

from functools import partial

import pytest
import torch
from standin import act_elsewhere
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical

import rlcli
from rlcli.collectors import Collector
from rlcli.collectors.actors import on_device
from rlcli.data.next_obs import Rows
from rlcli.envs import GymEnv, SerialEnv
from rlcli.graphs.captured import same_bits
from rlcli.graphs.static import Twins
from rlcli.modules import ProbabilisticActor
from rlcli.modules.build import build_actor_critic
from rlcli.modules.recurrent import Recurrence


def env():
    return SerialEnv(4, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True))


def single():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def pendulum():
    return SerialEnv(4, lambda: GymEnv("Pendulum-v1"))


def built(make, **options):
    made = make()
    return build_actor_critic(made.observation_spec, made.action_spec, hidden=[16, 16], generator=0, **options).actor


def called():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    net = TensorDictModule(layers, ["observation"], ["logits"])
    return ProbabilisticActor(net, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True)


def gru_cell(given, gates, h, bias_ih=None, bias_hh=None):
    """What a GPU has in one launch, in the order of a CPU's cell."""
    gates, units = gates.clone(), h.shape[1]
    reset, update, candidate = gates.chunk(3, 1)
    gates[:, : 2 * units].add_(given[:, : 2 * units])
    for gate in (reset, update):
        gate.sigmoid_()
    new = (given[:, 2 * units :] + candidate.mul_(reset)).tanh_()
    return (h - new) * update + new, h.new_empty(len(h), 5 * units)


def lstm_cell(given, gates, c, bias_ih=None, bias_hh=None):
    enter, forget, candidate, leave = (gates + given).chunk(4, 1)
    new = forget.sigmoid() * c + candidate.tanh() * enter.sigmoid()
    return leave.sigmoid() * new.tanh(), new, torch.empty_like(given)


POLICIES = {
    "categorical": (env, lambda: built(env)),
    "normal": (pendulum, lambda: built(pendulum)),
    "gru": (env, lambda: built(env, recurrence=Recurrence("gru", 8, 1, {}))),
    "gru of two layers": (env, lambda: built(env, recurrence=Recurrence("gru", 8, 2, {}))),
    "lstm": (env, lambda: built(env, recurrence=Recurrence("lstm", 8, 2, {}))),
    "called": (env, called),
    "single": (single, lambda: built(single)),
}


@pytest.fixture
def elsewhere(monkeypatch):
    with torch.library._scoped_library("aten", "IMPL") as fused:
        fused.impl("_thnn_fused_gru_cell", gru_cell, "CPU")
        fused.impl("_thnn_fused_lstm_cell", lstm_cell, "CPU")
        yield partial(act_elsewhere, monkeypatch)


def batches(make, policy, count=4):
    with Collector(make, policy, frames_per_batch=64, seed=0) as c:
        for _ in range(count):
            yield c.next().clone(), c._engine.actor
            with torch.no_grad():
                for p in policy.parameters():
                    p.mul_(0.9)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_elsewhere_acts_as_it_does_here(name, elsewhere):
    make, policy = POLICIES[name]
    here = [*batches(make, policy())]
    graphs = elsewhere()
    there = [*batches(make, policy())]
    actor = there[-1][1]
    assert actor.on_device is not None and actor.on_device.captured.proven, actor.on_device.captured.why
    (recorded,) = graphs
    assert recorded.launches <= 20
    for (a, _), (b, _) in zip(here, there, strict=True):
        assert {*a.keys(True, True)} == {*b.keys(True, True)}
        assert all(torch.equal(a[key], b[key]) for key in a.keys(True, True))


@pytest.mark.parametrize("name", ["categorical", "lstm", "called"])
def test_weights_that_are_given_other_memory_are_acted_with(name, elsewhere):
    def some(policy):
        with Collector(make, policy, frames_per_batch=64, seed=0) as c:
            for _ in range(4):
                yield c.next().clone()
                for p in policy.parameters():  # as what gathers them in one piece does
                    p.data = p.detach() * 0.9

    make, policy = POLICIES[name]
    here = [*some(policy())]
    graphs = elsewhere()
    there = [*some(policy())]
    assert graphs
    for a, b in zip(here, there, strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a.keys(True, True))


def test_acting_is_recorded_anew_where_torch_is_told_to_be_deterministic(elsewhere, monkeypatch):
    graphs = elsewhere()
    with Collector(env, built(env), frames_per_batch=64, seed=0) as c:
        c.next()
        one, before = c._engine.actor.on_device, len(graphs)
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        c.next()
        assert c._engine.actor.on_device is not one and len(graphs) == before + 1


@pytest.mark.parametrize("words", [[], ["policy=gru"]])
def test_evaluations_of_a_run_record_their_acting_once(words, elsewhere, monkeypatch, tmp_path):
    graphs, steps = elsewhere(), []
    made = on_device.OnDevice._step
    monkeypatch.setattr(on_device.OnDevice, "_step", lambda self: steps.append(self) or made(self))
    brief = ["total_frames=512", "collector.frames_per_batch=128", "console=off", "logger=none", *words]
    often = ["run.eval_every=128", "run.eval_episodes=3", "run.eval_max_steps=70"]
    run = rlcli.train([*brief, *often, f"run.dir={tmp_path}/run"])
    assert len([x for x in run.metrics() if "eval_return" in x]) == 4
    acting, evaluating = dict.fromkeys(steps)  # the run's own, and what is kept for evaluations
    assert acting.captured.proven and evaluating.captured.proven and len(graphs) >= 2


FEW = ["observation", ("next", "observation"), "action", ("next", "reward"), ("next", "done")]
STAYS = {"storing": torch.device("cpu"), "storing_is_elsewhere": True}
LAYOUTS = {
    "full": {"next_obs": "full"},
    "exact": {"next_obs": "exact"},
    "compact": {"next_obs": "compact"},
    "random": {"init_random_frames": 80},
    "ended": {"reset_when_done": False},
    "sparse": {"next_obs": "exact", "recurrent_state_stride": 4},
    "kept": {
        "next_obs": "full",
        "keep_keys": FEW,
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["categorical", "gru", "lstm", "single"])
def test_rows_that_were_taken_up_to_act_stay_for_the_update(name, layout, elsewhere, monkeypatch):
    make, policy = POLICIES[name]
    options = LAYOUTS[layout]
    with Collector(make, policy(), frames_per_batch=64, seed=0, **options) as c:
        here = [c.next() for _ in range(5)]
    graphs = elsewhere(**STAYS)
    bytes_sent, send = [], Twins.send
    monkeypatch.setattr(Twins, "send", lambda twins: bytes_sent.append(len(twins._here)) or send(twins))
    with Collector(make, policy(), frames_per_batch=64, seed=0, **options) as c:
        there, sent = [], []
        for _ in range(5):
            there.append(c.next())  # all are kept: none is written into by those that follow
            sent.append([*bytes_sent])
            bytes_sent.clear()
        acting = c._engine.actor.on_device
        assert acting.captured.proven, acting.captured.why
        assert graphs[0].launches <= 20
    for a, b in zip(here, there, strict=True):
        assert {*a.keys(True, True)} == {*b.keys(True, True)}
        assert all(same_bits(a[key], b[key]) for key in a.keys(True, True))
        assert all(type(a.get(key)) is type(b.get(key)) for key in a.keys(True, True))
    if layout == "random":
        return  # one batch that went up whole, and those after it
    (rest,) = sent[-1]  # acting is a graph by then, with one copy a step
    (up,) = [op for op in graphs[0].ops if op[0] is torch.ops.aten.copy_.default and op[1][1] is acting._given._here]
    assert up[1][0] is acting._given._there
    assert rest == sum(-(-nbytes // 64) * 64 for nbytes in apart(there[-1]))


def test_of_what_was_sent_together_each_column_may_be_written(elsewhere):
    elsewhere(**STAYS)
    with Collector(env, built(env), frames_per_batch=64, seed=0, next_obs="exact") as c:
        batch = c.next()
    before = batch["next", "observation"].clone()
    for key in ("action", "done", ("next", "reward"), ("next", "done")):
        batch[key].fill_(0)
    assert torch.equal(batch["next", "observation"], before)


def apart(batch):
    """Bytes of what no step had to take up: the columns beside observations and states, and rows of ends."""
    states = {"recurrent_state", "recurrent_state_h", "recurrent_state_c"} & {*batch.keys()}
    shown = {"observation", *states}
    rows = {key: batch.get(("next", key), None) for key in shown}
    rows = {key: x for key, x in rows.items() if x is not None}
    ends = batch["next", "done"].squeeze(-1).clone()
    ends[..., -1] = True
    count = int(ends.sum())
    for key, x in batch.items(True, True):
        if isinstance(x, Rows) and x.sparse:
            yield from (8 * len(x.extra), x.extra.nbytes)
        elif key not in shown and not (isinstance(key, tuple) and key[1] in shown):
            yield x.nbytes
    yield from (count * (x.nbytes // ends.numel()) for x in rows.values())
    if rows:
        yield 4 * count


def doubles(td):
    """A policy that no graph holds: it overwrites what it reads, in place or anew."""
    action = (td["observation"].sum(-1) > 0).long()
    if td["observation"][0, 0] > 0:
        td["observation"].mul_(2)
    return td.set("action", action).set("twice", td["observation"] + 1)


def test_of_a_policy_that_is_called_elsewhere_comes_back_what_it_wrote(elsewhere, monkeypatch):
    with Collector(env, doubles, frames_per_batch=64, seed=0) as c:
        here = [c.next().clone() for _ in range(3)]
    elsewhere()
    brought, cpu = [], TensorDict.cpu
    monkeypatch.setattr(TensorDict, "cpu", lambda td, **given: brought.append({*td.keys()}) or cpu(td, **given))
    with Collector(env, doubles, frames_per_batch=64, seed=0) as c:
        there = [c.next().clone() for _ in range(3)]
    assert [*map(frozenset, brought)].count(frozenset({"action", "twice"})) > 0
    assert {frozenset(keys) - {"observation"} for keys in brought} == {frozenset({"action", "twice"})}
    for a, b in zip(here, there, strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a.keys(True, True))
