"""Minibatches made of slices of a recurrent policy's sequences: where they are cut, what they begin with, and that
nothing else about an update is another."""

from __future__ import annotations

import pytest
import torch
from face import Recurrence, Update, refused
from hypothesis import given
from hypothesis import strategies as st

from rlcli.collectors import Collector
from rlcli.data.next_obs.sparse import Sparse, sparse_rows
from rlcli.envs import GymEnv, SerialEnv
from rlcli.errors import ArgumentError, MissingKeyError
from rlcli.learning.minibatches import with_slices
from rlcli.modules import build_actor_critic, set_recurrent_mode
from rlcli.objectives import A2CLoss, ClipPPOLoss, ReinforceLoss
from rlcli.objectives.value import GAE

CELLS = {"gru": ["recurrent_state"], "lstm": ["recurrent_state_h", "recurrent_state_c"]}
LANES, STEPS = 3, 40


def cartpole():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def networks(kind="gru", layers=2):
    env = cartpole()
    recurrence = Recurrence(kind, 8, layers, {})
    policy = build_actor_critic(env.observation_spec, env.action_spec, hidden=[8], recurrence=recurrence, generator=0)
    moved(policy)  # first weights of the last layer are so small that every state would act alike
    return policy


@torch.no_grad()
def moved(policy):
    generator = torch.Generator().manual_seed(1)
    for p in policy.parameters():
        p += 0.3 * torch.randn(p.shape, generator=generator)


def batches_of(policy, stride, count=3, **options):
    """Batches `[LANES, STEPS]` of a policy that does not learn, valued; most begin inside of an episode."""
    options = {"next_obs": "exact"} | options
    estimator = GAE(gamma=0.99, lmbda=0.9, value_network=policy.critic)
    with Collector(
        SerialEnv(LANES, cartpole), policy.actor, frames_per_batch=LANES * STEPS, recurrent_state_stride=stride, seed=0,
        **options,
    ) as collector:  # fmt: skip
        return [estimator(collector.rollout()) for _ in range(count)]


def starts_of(columns):
    return columns["is_init"].reshape(-1).nonzero().squeeze(1).tolist()


# ---- where they are cut ---------------------------------------------------------------------------------------------
def cut_in_turn(begins, kept, length):
    """The rows at which slices begin, one after the other."""
    found, at, n = [], 0, len(begins)
    while at < n:
        found.append(at)
        end = next((row for row in range(at + 1, n) if begins[row]), n)
        possible = [row for row in range(at + 1, end + 1) if row == end or kept[row]]
        within = [row for row in possible if row <= at + length]
        at = within[-1] if within else possible[0]
    return found


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40), st.integers(1, 12), st.booleans())
def test_a_slice_is_as_long_as_the_states_that_are_kept_let_it_be(flags, length, sparse):
    begins, kept = (torch.tensor(x) for x in zip(*flags, strict=True))
    begins[0] = True
    kept = kept | begins
    at = kept.nonzero().squeeze(1)
    states = sparse_rows([len(kept)], Sparse(at, torch.randn(len(at), 2, 3), float("nan")))
    columns = {"is_init": begins.unsqueeze(1), "state": states if sparse else states.full()}
    assert starts_of(with_slices(columns, ["state"], length)) == cut_in_turn(begins, kept, length)
    assert torch.equal(columns["is_init"].squeeze(1), begins)  # the batch's own stay


def test_where_every_state_is_kept_slices_have_the_length_that_was_asked_for():
    columns = {"is_init": torch.zeros(11, 1, dtype=torch.bool), "state": torch.zeros(11, 1, 2)}
    columns["is_init"][[0, 7]] = True
    assert starts_of(with_slices(columns, ["state"], 3)) == [0, 3, 6, 7, 10]
    assert starts_of(with_slices({k: x[:0] for k, x in columns.items()}, ["state"], 3)) == []


def test_slices_without_a_state_to_begin_with_are_refused():
    columns = {"is_init": torch.ones(4, 1, dtype=torch.bool)}
    refused(MissingKeyError, "state_a", lambda: with_slices(columns, ["state_a", "b"], 2))
    refused(MissingKeyError, "networks", lambda: with_slices(columns, [], 2))


# ---- an update on them ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("stride", [1, 5])
@pytest.mark.parametrize("mode", ["exact", "compact"])
@pytest.mark.every(2)
def test_rows_are_valued_step_by_step_from_the_state_that_their_slice_begins_with(kind, stride, mode):
    policy = networks(kind)
    whole = batches_of(policy, 1, next_obs=mode)[-1].reshape(-1)
    batch = batches_of(policy, stride, next_obs=mode)[-1]
    moved(policy)  # to weights that the states were not computed with
    update = Update(ClipPPOLoss(policy.actor, policy.critic), batch_size=LANES * STEPS, slice_len=5)
    columns = update.columns(batch)
    (minibatch,) = update.minibatches.epoch(columns)

    resets = batch["is_init"].reshape(-1).nonzero().squeeze(1).tolist()
    starts = starts_of(columns)
    sizes = torch.diff(torch.tensor([*starts, LANES * STEPS]))
    assert {*resets, *range(0, LANES * STEPS, STEPS)} < set(starts) and any(row % STEPS for row in resets)
    assert sizes.max() == 5 and (sizes == 5).sum() > len(sizes) // 2
    for key in ("advantage", "value_target"):  # those of whole trajectories
        assert torch.equal(columns[key], batch[key].reshape(columns[key].shape))

    logs, values, state = [], [], {}
    for t in range(LANES * STEPS):
        row = whole[t].select("observation", "action", *CELLS[kind])
        if t not in starts:
            row.update(state)
        with set_recurrent_mode(False), torch.no_grad():
            logs.append(policy.actor.get_dist(row.clone()).log_prob(row["action"]))
            row = policy.critic(row)
        state = {key: row["next", key] for key in CELLS[kind]}
        values.append(row["state_value"])
    log_prob, _, written = update.loss.density(columns, columns["action"])
    value = update.loss.criticised(columns, written)["state_value"]
    assert torch.allclose(log_prob, torch.stack(logs), atol=1e-5)
    assert torch.allclose(value, torch.stack(values), atol=1e-5)
    assert sorted(minibatch["advantage"].flatten().tolist()) == sorted(columns["advantage"].flatten().tolist())


def test_the_weights_that_collected_act_in_slices_as_they_acted():
    policy = networks()
    batch = batches_of(policy, 7)[-1]
    update = Update(ClipPPOLoss(policy.actor, policy.critic), batch_size=LANES * STEPS, slice_len=7)
    for minibatch in update.minibatches.epoch(update.columns(batch)):
        terms = update.loss.terms(minibatch)
        assert terms["kl_approx"].abs() < 1e-6 and terms["clip_fraction"] == 0


def parameters_after(kind, loss, slice_len, stride):
    policy = networks(kind)
    update = Update(loss(policy.actor, policy.critic), epochs=2, batch_size=30, slice_len=slice_len)
    for batch in batches_of(policy, stride):
        update(batch)
    return torch.cat([p.detach().flatten() for p in update.loss.parameters()])


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("loss", [ClipPPOLoss, A2CLoss, ReinforceLoss])
@pytest.mark.every(2)
def test_slices_as_long_as_rows_change_no_bit(kind, loss):
    whole = parameters_after(kind, loss, None, 1000)
    for stride in (1, STEPS, 1000):
        assert torch.equal(parameters_after(kind, loss, STEPS, stride), whole)
    assert not torch.equal(parameters_after(kind, loss, 8, 8), whole)


def test_masked_rows_are_cut_away_first():
    policy = networks()
    batch = batches_of(policy, 1)[-1]
    batch["mask"] = torch.arange(STEPS).expand(LANES, STEPS) < torch.tensor([[40], [13], [26]])
    columns = Update(ClipPPOLoss(policy.actor, policy.critic), slice_len=10).columns(batch)
    assert len(columns["is_init"]) == 79 and {0, 40, 53} <= set(starts_of(columns))
    assert torch.diff(torch.tensor([*starts_of(columns), 79])).max() == 10


def test_a_loss_that_does_not_remember_has_no_slices():
    env = cartpole()
    policy = build_actor_critic(env.observation_spec, env.action_spec, hidden=[8], generator=0)
    refused(ArgumentError, "slice_len", lambda: Update(ClipPPOLoss(policy.actor, policy.critic), slice_len=8))
    policy = networks()
    refused(ArgumentError, "slice_len", lambda: Update(ClipPPOLoss(policy.actor, policy.critic), slice_len=0))


@pytest.mark.parametrize("slice_len", [None, 10])
def test_padding_behind_rows_needs_no_state(slice_len):
    """Workers that are preempted leave rows of which none keeps a state."""
    policy, found = networks(), []
    mask = torch.arange(STEPS).expand(LANES, STEPS) < torch.tensor([[40], [13], [26]])
    for stride in (1, 10):
        batch = batches_of(policy, stride)[-1].exclude("advantage", "value_target", "state_value")
        batch["collector", "mask"] = mask
        batch = GAE(gamma=0.99, lmbda=0.9, value_network=policy.critic)(batch)
        columns = Update(ClipPPOLoss(policy.actor, policy.critic), slice_len=slice_len).columns(batch)
        found.append(columns["value_target"])
    assert len(found[0]) == 79 and torch.equal(*found)


@pytest.mark.parametrize("first", [0, 5])
def test_what_follows_masked_rows_begins_from_its_own_state(first):
    policy = networks()
    batch = batches_of(policy, 1)[-1]
    steps = torch.arange(STEPS).expand(LANES, STEPS)
    batch["mask"] = (steps < first) | (steps >= first + 4)
    update = Update(ClipPPOLoss(policy.actor, policy.critic), batch_size=LANES * STEPS)
    columns = update.columns(batch)
    batch["is_init"][:, 0] = True  # as flat rows say it
    found = [update.loss.terms(columns), update.loss(batch), update.loss(batch.reshape(-1))]
    found += [update.loss.terms(minibatch) for minibatch in update.minibatches.epoch(columns)]
    for terms in found:  # the weights that collected act as they acted
        assert terms["kl_approx"].abs() < 1e-6
        assert torch.isclose(terms["explained_variance"], found[0]["explained_variance"], atol=1e-5)
    values = columns["value_target"] - columns["advantage"]
    log_prob, _, written = update.loss.density(columns, columns["action"])
    assert torch.allclose(log_prob, columns["sample_log_prob"], atol=1e-5)
    assert torch.allclose(update.loss.criticised(columns, written)["state_value"], values, atol=1e-5)


@pytest.mark.parametrize("slice_len", [None, 7])
def test_batches_that_cannot_be_learned_from_are_refused(slice_len):
    policy = networks()
    batch = batches_of(policy, 1)[-1]
    update = Update(ClipPPOLoss(policy.actor, policy.critic), slice_len=slice_len)
    for empty in (batch[:, :0], batch[:0]):
        with refused(ArgumentError, "rows"):
            update(empty)
    refused(MissingKeyError, "recurrent_state", lambda: update(batch.exclude("recurrent_state")))
    batch["mask"] = torch.zeros(LANES, STEPS, dtype=torch.bool)
    refused(ArgumentError, "counts", lambda: update(batch))


def test_rows_that_begin_with_their_trajectories_need_no_state():
    policy = networks()
    batch = batches_of(policy, 1, count=1)[0]  # what is reset begins from zeros
    update, losses = Update(ClipPPOLoss(policy.actor, policy.critic), batch_size=LANES * STEPS), []
    for rows in (batch, batch.exclude("recurrent_state")):
        losses.append(update.loss.terms(update.columns(rows))["loss_objective"])
    assert torch.equal(*losses)


def test_a_row_of_nothing_but_padding_needs_no_state_either():
    policy = networks()
    batch = batches_of(policy, 1, count=1)[0]
    without = batch.exclude("recurrent_state", "advantage", "value_target", "state_value", ("next", "state_value"))
    without["mask"] = (torch.arange(LANES) > 0)[:, None].expand(LANES, STEPS).clone()
    without["is_init"][0] = False
    GAE(gamma=0.99, lmbda=0.9, value_network=policy.critic)(without)
    columns = Update(ClipPPOLoss(policy.actor, policy.critic)).columns(without)
    assert torch.allclose(columns["advantage"], batch["advantage"][1:].reshape(-1, 1), atol=1e-5)
