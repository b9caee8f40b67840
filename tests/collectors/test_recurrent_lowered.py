"""A recurrent actor that is taken apart gives what the same actor gives where it is called, bit for bit."""

from __future__ import annotations

import pickle
from functools import partial

import pytest
import torch
from face import FastActor, TensorDictActor, refused
from tensordict.nn import InteractionType, TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn

from rlcli.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from rlcli.envs import GymEnv, SerialEnv, TransformedEnv, make_native
from rlcli.errors import ArgumentError, NumericsError
from rlcli.modules import (
    Categorical,
    EGreedyModule,
    GRUModule,
    IndependentNormal,
    LSTMModule,
    NormalParamExtractor,
    ProbabilisticActor,
    QValueActor,
    set_recurrent_mode,
)
from rlcli.specs import Categorical as SpecCategorical
from rlcli.specs import Unbounded
from rlcli.transforms import TensorDictPrimer

MODE, RANDOM = InteractionType.MODE, InteractionType.RANDOM
CELLS = {"gru": GRUModule, "lstm": LSTMModule}
STATES = {"gru": ["recurrent_state"], "lstm": ["recurrent_state_h", "recurrent_state_c"]}
UNITS = 16


def cartpole():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def serial(lanes: int):
    return SerialEnv(lanes, cartpole)


def net(kind: str = "gru", layers: int = 1, out: str = "logits", head: nn.Module | None = None, **options):
    """observation -> encoded -> hidden -> out."""
    torch.manual_seed(0)
    cells = CELLS[kind](8, UNITS, layers, in_key="encoded", out_key="hidden", **options)
    encoder = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    return TensorDictSequential(
        TensorDictModule(encoder, ["observation"], ["encoded"]), cells,
        TensorDictModule(head or nn.Linear(UNITS, 2), ["hidden"], [out]),
    )  # fmt: skip


def actor(kind: str = "gru", layers: int = 1, **options) -> ProbabilisticActor:
    return ProbabilisticActor(
        net(kind, layers, **options), ["logits"], distribution_class=Categorical, return_log_prob=True
    )


def values(kind: str = "gru", layers: int = 1) -> TensorDictSequential:
    greedy = QValueActor(net(kind, layers, "action_value"), action_space="categorical")
    return TensorDictSequential(greedy, EGreedyModule(SpecCategorical(2), 0.5, 0.5))


class Called(TensorDictModuleBase):
    """The same policy as a class of its own, which takes the actions that it is given."""

    def __init__(self, policy, actions=()):
        super().__init__()
        self.policy, self.in_keys, self.out_keys = policy, policy.in_keys, policy.out_keys
        self.actions = iter(actions)

    def forward(self, td):
        out = self.policy(td)
        action = next(self.actions, None)
        if action is not None:
            out["action"] = action
            if "sample_log_prob" in self.out_keys:
                out["sample_log_prob"] = self.policy.get_dist(out).log_prob(action)
        return out


def rolled(env, policy, steps: int, batches: int, program: type, **options):
    lanes = env.batch_size.numel()
    with Collector(env, policy, frames_per_batch=lanes * steps, seed=2, **options) as collector:
        assert type(collector._engine.actor) is program, getattr(collector._engine.actor, "why", "")
        return torch.cat([collector.rollout() for _ in range(batches)], -1)


def lowered_and_called(make, policy, steps: int, batches: int, **options):
    """Batches of the policy taken apart, and of the policy called, along the same actions."""
    ours = rolled(make(), policy, steps, batches, FastActor, **options)
    random = options.get("init_random_frames", 0) // (ours.shape[0] if ours.ndim == 2 else 1)
    actions = ours["action"].unbind(ours.ndim - 1)[random:]
    return ours, rolled(make(), Called(policy, actions), steps, batches, TensorDictActor, **options)


def assert_same(ours, theirs, close=("sample_log_prob",)) -> None:
    keys = set(ours.keys(True, True))
    assert keys == set(theirs.keys(True, True))
    for key in keys:
        x, y = ours[key], theirs[key]
        assert x.dtype == y.dtype and x.shape == y.shape, key
        assert torch.allclose(x, y, atol=1e-6) if key in close else torch.equal(x, y), key


ENVS = {
    "one": cartpole,
    "serial": partial(serial, 3),
    "eight": partial(serial, 8),
    "native": lambda: make_native("CartPole-v1", 4),
}


@pytest.mark.parametrize("steps", [1, 7, 32])
@pytest.mark.parametrize("env", ENVS)
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.every(8)
def test_every_column_is_that_of_the_policy_called(kind, layers, env, steps):
    ours, theirs = lowered_and_called(ENVS[env], actor(kind, layers), steps, max(2, 64 // steps))
    assert_same(ours, theirs)
    assert (
        ours["next", "done"].any() and ours["next", "recurrent_state" if kind == "gru" else "recurrent_state_c"].any()
    )


@pytest.mark.parametrize("mode", ["full", "exact", "compact"])
@pytest.mark.parametrize("kind", CELLS)
def test_values_explored_are_those_of_the_policy_called(kind, mode):
    ours, theirs = lowered_and_called(partial(serial, 3), values(kind, 2), 20, 3, next_obs=mode)
    assert_same(ours, theirs)
    assert ours["next", "done"].any() and (ours["action"] != ours["action_value"].argmax(-1)).any()


@pytest.mark.parametrize(
    "options", [{"init_random_frames": 12}, {"max_frames_per_traj": 5}, {"reset_at_each_iter": True}]
)
def test_options_that_reset_or_hold_the_state_do_so(options):
    assert_same(*lowered_and_called(partial(serial, 3), actor("lstm"), 10, 4, **options))


@pytest.mark.parametrize("bias", [True, False])
def test_the_mode_is_that_of_the_policy_called(bias):
    policy = actor(bias=bias)
    ours = rolled(serial(3), policy, 30, 3, FastActor, exploration_type=MODE)
    assert_same(ours, rolled(serial(3), Called(policy), 30, 3, TensorDictActor, exploration_type=MODE))


@pytest.mark.parametrize("kind", CELLS)
def test_a_default_dtype_of_others_changes_nothing(kind):
    policy = actor(kind, 2)
    torch.set_default_dtype(torch.float64)
    try:
        assert_same(*lowered_and_called(partial(serial, 3), policy, 20, 2))
    finally:
        torch.set_default_dtype(torch.float32)


def test_real_actions_and_two_recurrent_parts():
    torch.manual_seed(0)
    first = GRUModule(3, 8, in_key="observation", out_key="low")
    second = LSTMModule(8, 8, 2, in_keys=["low", "h", "c"], out_keys=["high", ("next", "h"), ("next", "c")])
    head = TensorDictModule(nn.Sequential(nn.Linear(8, 2), NormalParamExtractor()), ["high"], ["loc", "scale"])
    policy = ProbabilisticActor(
        TensorDictSequential(first, second, head), ["loc", "scale"], distribution_class=IndependentNormal,
        return_log_prob=True,
    )  # fmt: skip
    assert_same(*lowered_and_called(lambda: SerialEnv(3, lambda: GymEnv("Pendulum-v1")), policy, 40, 2))


class Doubles(nn.Module):
    def forward(self, x):
        return x.mul_(2)  # in place, on what the recurrent layers read


@pytest.mark.parametrize("lanes", [0, 3])
@pytest.mark.parametrize(("doubles", "dropout"), [(True, 0.0), (False, 0.5), (True, 0.5)])
@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.every(3)
def test_layers_that_have_to_be_called_see_and_write_what_they_would(kind, doubles, dropout, lanes):
    parts = [*net(kind, 2, dropout=dropout).module]
    if doubles:
        parts.insert(1, TensorDictModule(Doubles(), ["encoded"], ["twice"]))
    policy = ProbabilisticActor(
        TensorDictSequential(*parts), ["logits"], distribution_class=Categorical, return_log_prob=True
    ).eval()
    ours, theirs = lowered_and_called(partial(serial, lanes) if lanes else cartpole, policy, 30, 2)
    assert_same(ours, theirs)
    assert ours["next", "done"].any()


# ---- along a run ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", CELLS)
def test_weights_are_followed_however_they_change(kind):
    policy = actor(kind, 2)
    with Collector(serial(3), policy, frames_per_batch=3 * 8, seed=0) as collector:

        def check():
            batch = collector.rollout()
            with torch.no_grad():
                for t in range(8):
                    td = policy(batch[:, t].select(*policy.in_keys).clone())
                    assert torch.equal(td["logits"], batch["logits"][:, t]), t

        check()
        optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
        policy.get_dist(collector.rollout().select(*policy.in_keys)[:, 0]).entropy().mean().backward()
        optimizer.step()
        check()
        policy.load_state_dict({name: x * 0.7 for name, x in policy.state_dict().items()})
        check()
        policy.load_state_dict({name: x * 1.2 for name, x in policy.state_dict().items()}, assign=True)
        check()
        for p in policy.parameters():
            p.data = p.data * 1.1
        check()
        layers = policy.module[0][1].layers
        layers.weight_hh_l1 = nn.Parameter(layers.weight_hh_l1.detach() * 2)
        check()


@pytest.mark.parametrize("kind", CELLS)
def test_a_resumed_collector_goes_on_with_the_same_memory(kind):
    def make():
        collector = Collector(serial(3), actor(kind, 2), frames_per_batch=3 * 11, seed=3, episode_seeds=True)
        collector.vec_env.history_limit = 1000
        return collector

    collector = make()
    for _ in range(3):
        collector.rollout()
    saved = pickle.dumps(collector.state_dict())
    expected = [collector.rollout() for _ in range(4)]
    again = make()
    assert again.load_state_dict(pickle.loads(saved)) == []
    for batch in expected:
        assert_same(again.rollout(), batch, close=())


@pytest.mark.parametrize("kind", CELLS)
def test_one_worker_gives_what_a_collector_gives(kind):
    options = {"frames_per_batch": 40, "total_frames": 120, "seed": 5}
    with (
        Collector(partial(serial, 4), actor(kind), **options) as one,
        MultiSyncCollector([partial(serial, 4)], actor(kind), cat_results=0, **options) as other,
    ):
        for a, b in zip(one, other, strict=True):
            assert_same(a, b, close=())


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("made", [MultiSyncCollector, MultiAsyncCollector])
def test_states_of_workers_follow_the_policy(made, kind):
    policy, options = actor(kind), {"frames_per_batch": 4 * 30, "total_frames": 4 * 30 * 4, "seed": 5}
    options |= {"cat_results": 0} if made is MultiSyncCollector else {}
    with made([partial(serial, 4)] * 2, policy, **options) as collector, torch.no_grad():
        for batch in collector:
            for rows in batch.split(4):  # of one worker: the last bits of a product depend on the number of rows
                for t in range(rows.shape[1] - 1):
                    out = policy(rows[:, t].select(*policy.in_keys).clone())
                    assert torch.equal(out["logits"], rows["logits"][:, t])
                    over = rows["next", "done"][:, t, None]
                    for key in STATES[kind]:
                        assert torch.equal(torch.where(over, 0.0, out["next", key]), rows[key][:, t + 1])


# ---- what is stored ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", CELLS)
def test_a_state_that_nobody_asked_for_has_two_rows(kind):
    policy = actor(kind)
    everything = rolled(serial(3), policy, 40, 2, FastActor)
    with Collector(
        serial(3), policy, frames_per_batch=120, seed=2, keep_keys=["observation", "action", "sample_log_prob"]
    ) as collector:
        few = torch.cat([collector.rollout() for _ in range(2)], -1)
        bound = collector._engine.pool.take(40)
        for key in STATES[kind]:
            rows = bound.columns.rows[key]
            assert key not in bound.columns.data and len({row.ctypes.data for row in rows}) == 3  # and the carrier
        assert "hidden" not in bound.actor.kept
    assert {"observation", "action", "sample_log_prob"} == few.keys() - {"next"}
    for key in ("observation", "action", "sample_log_prob"):
        assert torch.equal(few[key], everything[key]), key


@pytest.mark.parametrize("kind", CELLS)
def test_states_of_which_few_rows_are_kept_are_those_of_the_policy_called(kind):
    ours, theirs = lowered_and_called(partial(serial, 3), actor(kind), 60, 1, recurrent_state_stride=4)
    for key in STATES[kind]:
        x, y = (batch.pop(key) for batch in (ours, theirs))
        assert torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num())
        assert 0.5 < x.isnan().double().mean() < 0.8
    assert_same(ours, theirs)


# ---- what is not taken apart ---------------------------------------------------------------------------------------
class Own(GRUModule):
    def on_tensors(self, x, *rest):
        return super().on_tensors(2 * x, *rest)


def with_cells(make):
    policy = actor()
    policy.module[0].module[1] = make(8, UNITS, in_key="encoded", out_key="hidden")
    return policy


def changed(change):
    policy = actor()
    change(policy.module[0][1])
    return policy


class AsDouble(nn.Module):
    def forward(self, x):
        return x.double()


def of_float64():
    policy = actor().double()
    policy.module[0].module[0].module.insert(0, AsDouble())
    return policy


def under_another_name():
    cells = GRUModule(4, 8, in_keys=["observation", "a"], out_keys=["hidden", ("next", "b")])
    head = TensorDictModule(nn.Linear(8, 2), ["hidden"], ["logits"])
    return ProbabilisticActor(TensorDictSequential(cells, head), ["logits"], distribution_class=Categorical)


REFUSED = {
    "a class of its own": (lambda: with_cells(Own), "a class of its own"),
    "a hook": (lambda: changed(lambda cells: cells.register_forward_hook(lambda *_: None)), "a hook"),
    "weights that are computed": (
        lambda: changed(lambda cells: nn.utils.parametrizations.weight_norm(cells.gru, "weight_hh_l0")), "of its own",
    ),
    "sequences by default": (lambda: actor(default_recurrent_mode=True), "default_recurrent_mode=True"),
    "float64": (of_float64, "not float32"),
    "a state under another name": (under_another_name, "another name"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_more_than_its_layers_is_called_and_says_why(case):
    make, why = REFUSED[case]
    env = TransformedEnv(serial(3), TensorDictPrimer({name: Unbounded((1, 8)) for name in "ab"}))
    with Collector(env, make(), frames_per_batch=30) as collector:
        assert type(collector._engine.actor) is TensorDictActor
        assert why in collector._engine.actor.why
        collector.rollout()


@pytest.mark.parametrize("part", [0, 1, 2], ids=["encoder", "cells", "head"])
def test_weights_of_another_dtype_are_noticed(part):
    policy = actor()
    with Collector(serial(3), policy, frames_per_batch=30) as collector:
        collector.rollout()
        policy.module[0][part].double()
        refused(ArgumentError, "float64 float32", lambda: collector.rollout())


def test_a_hook_that_nobody_would_call_is_refused():
    policy = changed(lambda cells: cells.gru.register_forward_hook(lambda *_: None))
    refused(ArgumentError, "forward", lambda: Collector(serial(3), policy, frames_per_batch=30))


@pytest.mark.parametrize("change", [
    lambda policy: policy.module[0][1].register_forward_hook(lambda *_: None),
    lambda policy: setattr(policy.module[0][1], "default_recurrent_mode", True),
])  # fmt: skip
def test_what_makes_it_more_between_two_batches_is_noticed(change):
    policy = actor()
    with Collector(serial(3), policy, frames_per_batch=30) as collector:
        collector.rollout()
        change(policy)
        refused(ArgumentError, "changed", lambda: collector.rollout())


@pytest.mark.parametrize("kind", CELLS)
def test_layers_that_are_replaced_between_two_batches_are_followed(kind):
    policy = actor(kind)
    with Collector(serial(3), policy, frames_per_batch=30) as collector:
        collector.rollout()
        cells = policy.module[0][1]
        setattr(cells, kind, cells.kind(8, UNITS, batch_first=True))
        batch = collector.rollout()
    with torch.no_grad():
        assert torch.equal(policy(batch[:, 5].select(*policy.in_keys).clone())["logits"], batch["logits"][:, 5])


class Blind(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(UNITS, 2)

    def forward(self, x):
        return self.linear(x.nan_to_num())


@pytest.mark.parametrize("keep", [None, ["action"], ["action", "recurrent_state"]])
@pytest.mark.parametrize("head", [None, Blind()], ids=["plain", "blind"])
def test_a_state_that_is_nan_is_named_whoever_reads_it(head, keep):
    policy = actor(head=head)
    collector = Collector(serial(3), policy, frames_per_batch=30, keep_keys=keep)
    assert type(collector._engine.actor) is FastActor
    collector.rollout()
    policy.module[0][1].gru.weight_hh_l0.data[-1] = torch.nan
    with pytest.raises(NumericsError, match="not finite" if head is None else "hidden|recurrent_state"):
        collector.rollout()


def test_layers_that_drop_features_out_do_so_once_they_train():
    policy = actor("lstm", 2, dropout=0.9).eval()
    collector = Collector(serial(3), policy, frames_per_batch=30)
    assert type(collector._engine.actor) is FastActor
    collector.rollout()
    batch = collector.rollout()
    assert torch.equal(policy(batch[:, 5].select(*policy.in_keys).clone())["logits"], batch["logits"][:, 5])
    policy.train()
    batch = collector.rollout()
    policy.eval()
    assert not torch.equal(policy(batch[:, 5].select(*policy.in_keys).clone())["logits"], batch["logits"][:, 5])


def test_sequences_around_a_collector_are_refused():
    collector = Collector(serial(3), actor(), frames_per_batch=30)
    with set_recurrent_mode(True), refused(ArgumentError, "set_recurrent_mode"):
        collector.rollout()
    assert collector.rollout().shape == (3, 10)
