"""The value stage as on a GPU: recorded once a bucket of extra rows, replayed on other batches, bit for bit."""

import dataclasses

import pytest
import torch
from face import Update
from standin import NotCapturable, StandIn
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from rlcli.collectors import Collector, collector
from rlcli.data.next_obs.modes import build_exact
from rlcli.envs import GymEnv, SerialEnv
from rlcli.graphs import graph, host
from rlcli.graphs.captured import MOST, same_bits
from rlcli.learning import captured_step
from rlcli.learning.loops import OnPolicy
from rlcli.modules.build import build_actor_critic
from rlcli.objectives import ClipPPOLoss
from rlcli.objectives.value import GAE
from rlcli.objectives.value.captured import CapturedValues
from rlcli.objectives.value.normaliser import PopArt, ValueNorm
from rlcli.objectives.value.td import TD0Estimator, TDLambdaEstimator


def none(call):
    raise NotCapturable("nothing is recorded")


def batch(n, ends, mode="exact", lanes=4, steps=20):
    """One of a collector: `ends` steps in the middle end an episode, some of them truncated."""
    generator = torch.Generator().manual_seed(n)
    obs = torch.randn(lanes, steps, 3, generator=generator)
    order = torch.randperm(lanes * (steps - 1), generator=generator)[:ends].tolist()
    places = [(i % (steps - 1), i // (steps - 1)) for i in order]
    done = torch.zeros(lanes, steps, 1, dtype=torch.bool)
    for t, lane in places:
        done[lane, t] = True
    terminated = done & (torch.rand(done.shape, generator=generator) < 0.5)
    td = TensorDict({"observation": obs}, (lanes, steps), names=[None, "time"])
    td["next"] = {"reward": torch.randn(done.shape, generator=generator), "done": done, "terminated": terminated}
    following = build_exact(
        {"observation": td["observation"]}, {"observation": torch.randn(lanes, 3, generator=generator).numpy()}, places,
        {"observation": torch.randn(ends, 3, generator=generator).numpy()},
    )["observation"]  # fmt: skip
    if mode != "compact":
        td.set(("next", "observation"), following if mode == "exact" else following.full())
    return td


def critic():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    return TensorDictModule(net, ["observation"], ["state_value"])


def gae(net, **options):
    return GAE(gamma=0.99, lmbda=0.95, value_network=net, backend="reference", **options)


ESTIMATORS = {
    "gae": lambda net: gae(net, average_gae=True),
    "chunks": lambda net: gae(net, num_chunks=3),
    "shifted": lambda net: gae(net, shifted=True, shifted_budget=3),
    "normalised": lambda net: gae(net, value_norm=ValueNorm()),
    "lambda": lambda net: TDLambdaEstimator(gamma=0.99, lmbda=0.9, value_network=net, backend="reference"),
    "td0": lambda net: TD0Estimator(gamma=torch.tensor(0.9), value_network=net),
}


def valued(estimate, batches):
    """Batches with what an estimator wrote, after each of which its network is another."""
    of = getattr(estimate, "estimator", estimate)
    for td in batches:
        assert estimate(td) is td
        yield td, (of.last_rows, of.last_approximated, of.last_dropped)
        with torch.no_grad():
            for p in of.value_network.parameters():
                p.mul_(1.01)


SIZES = [5, 9, 7, 11, 4, 12, 0, 1, 0, 0, 3, 30]  # 4, 8, 16 or 64 rows of next observations apart, with the lanes' last


@pytest.mark.parametrize("mode", ["exact", "full", "compact"])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_replays_give_what_plain_calls_give(name, mode, monkeypatch):
    monkeypatch.setattr(host, "may_ask", lambda x: False)
    plain, captured = (CapturedValues(ESTIMATORS[name](critic()), record) for record in (none, StandIn.record))
    found = [
        [*valued(estimate, [batch(n, ends, mode) for n, ends in enumerate(SIZES)])]
        for estimate in (plain, captured, ESTIMATORS[name](critic()))
    ]
    for (a, counts), (b, replayed), (c, usual) in zip(*found, strict=True):
        assert {*a.keys(True, True)} == {*b.keys(True, True)} == {*c.keys(True, True)}
        assert counts == replayed == usual
        for key in a.keys(True, True):
            assert same_bits(a[key], b[key])
            torch.testing.assert_close(a[key], c[key], rtol=1e-5, atol=1e-5)
    kept = [stage.captured for stage in captured._of.values()]
    assert len(kept) == (4 if mode == "exact" else 1)
    assert sum(one.proven for one in kept) == len(kept) - (mode == "exact"), [one.why for one in kept]  # 64 came once
    for stage in captured._of.values():
        memory = [*stage.columns.values(), *stage.index, *(extra for _, extra in stage.extra.values())]
        memory += [*captured.estimator.parameters(), *captured.estimator.buffers(), *stage.out.values()]
        memory += [x for x in vars(captured.estimator).values() if isinstance(x, torch.Tensor)]
        recorded = stage.captured._graph
        if recorded is not None:  # beside constants, which a device fills in
            assert {*recorded.undeclared(memory)} <= {("lift_fresh", ())}


def test_a_graph_is_made_anew_where_what_it_holds_for_good_has_changed(monkeypatch):
    monkeypatch.setattr(host, "may_ask", lambda x: False)
    (captured, usual) = CapturedValues(gae(critic()), StandIn.record), gae(critic())
    for n in range(20):
        if n == 7:
            captured.estimator.gamma = usual.gamma = 0.5
        if n == 14:
            captured.estimator.value_network.module[1] = usual.value_network.module[1] = nn.ReLU()
        a, b = captured(batch(n, 4)), usual(batch(n, 4))
        torch.testing.assert_close(a["advantage"], b["advantage"], rtol=1e-5, atol=1e-5)
        assert len(captured._of) == 1
    assert all(stage.captured.proven for stage in captured._of.values())


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch before 2.9")
def test_products_of_another_precision_are_another_graph():
    values, loss = CapturedValues(gae(critic()), StandIn.record), nn.Identity()

    def held():
        return values._settings(), captured_step._settings(loss)

    matmul, before = torch.backends.cuda.matmul, held()
    assert held() == before
    was = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"  # from then on torch raises where it is asked by the older name
        assert all(new != old for new, old in zip(held(), before, strict=True))
    finally:
        matmul.fp32_precision = was


def test_few_kinds_are_kept_and_what_hangs_on_data_is_called_as_it_is(monkeypatch):
    monkeypatch.setattr(host, "may_ask", lambda x: False)
    many = CapturedValues(gae(critic()), StandIn.record)
    for n in range(3 * (MOST + 2)):
        td = batch(n, 2, steps=5 + n % (MOST + 2))
        usual = gae(critic())(td.copy())["advantage"]
        torch.testing.assert_close(many(td)["advantage"], usual, rtol=1e-5, atol=1e-5)
    assert len(many._of) == MOST and len(many._memory) == MOST * len(next(iter(many._of.values())).columns)
    for _ in range(4):
        many(batch(0, 2, steps=9))
    assert [*many._of.values()][-1].captured.proven  # of the kind that came last
    net, hooked = critic(), critic()
    hooked.module[0].register_forward_hook(lambda *given: None)
    refused = {
        "hooks": (CapturedValues(gae(hooked), StandIn.record), batch(0, 3)),
        "rescales": (CapturedValues(gae(net, value_norm=PopArt(net)), StandIn.record), batch(0, 3)),
        "rows of the batch": (CapturedValues(gae(critic()), StandIn.record), batch(0, 3)[:, 3:]),
        "trajectories end": (CapturedValues(gae(critic(), shifted=True), StandIn.record), batch(0, 3).reshape(-1)),
    }
    for why, (captured, td) in refused.items():
        for _ in range(6):
            captured(td.copy())
        assert why in captured._refused.why and not captured._of


@pytest.mark.parametrize("mode", ["exact", "full"])
def test_a_run_whose_rows_stay_on_the_device_learns_what_one_of_plain_calls_does(mode, monkeypatch):
    monkeypatch.setattr(host, "may_ask", lambda x: False)
    here, there, place = (
        torch.device("cpu"),
        {"policy_is_elsewhere": True, "storing_is_elsewhere": True},
        collector.place,
    )
    monkeypatch.setattr(
        collector, "place", lambda *given: dataclasses.replace(place(*given), policy=here, storing=here, **there)
    )
    learned = []
    for record in (none, StandIn.record):
        monkeypatch.setattr(graph, "recorder_of", lambda device, record=record: record)
        env = SerialEnv(4, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True))
        policy = build_actor_critic(env.observation_spec, env.action_spec, hidden=[16, 16], generator=0)
        loss = ClipPPOLoss(policy.actor, policy.critic)
        update = Update(loss, lr=1e-2, batch_size=32, generator=torch.Generator().manual_seed(0))
        with Collector(env, policy.actor, frames_per_batch=128, seed=0, next_obs=mode) as c:
            loop = OnPolicy(c, gae(policy.critic), update, 128 * 8)
            loop.run()
        learned.append((update.flat.tensor.detach().clone(), loop))
    (plain, _), (captured, loop) = learned
    assert torch.equal(plain, captured)
    stages = [*loop._estimate._of.values()]
    assert stages and all(stage.captured.proven or stage.captured._calls < 3 for stage in stages)
    assert any(stage.captured.proven for stage in stages)
