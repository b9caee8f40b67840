"""Recurrent layers and updates as on a GPU: what a layer launches, and a PPO update of a GRU by replays, bit for bit.

Each launch of a Triton kernel is one operation of torch here, which runs the kernel in Triton's interpreter.
"""

import copy

import pytest
import torch
from face import Recurrence, Update
from standin import NotCapturable, StandIn

from rlcli.collectors import Collector
from rlcli.envs import GymEnv, SerialEnv
from rlcli.graphs import graph, host
from rlcli.learning.minibatches import folded, shuffled_sequences
from rlcli.learning.optimizer import Linear
from rlcli.modules import build_actor_critic
from rlcli.objectives import ClipPPOLoss
from rlcli.objectives.value import GAE
from tests.kernels.test_recurrent_triton import Call, at_once, furthest, kernels, reference, split

__all__ = ["kernels", "split"]
pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled there")
CALLS = []
LIBRARY = torch.library.Library("rlcli_tests", "DEF")
LIBRARY.define("launch(Tensor(a!)[] given, int call) -> ()")
CELLS = {"gru": "recurrent_state", "lstm": "recurrent_state_h"}


def run(tensors, call):
    kernel, programs, given, constants = CALLS[call]
    tensors = iter(tensors)
    given = [next(tensors) if x is None else x for x in given]
    if constants.get("launch_cooperative_grid"):
        at_once(kernel, programs, *given, **constants)
    else:
        kernel[programs](*given, **constants)


LIBRARY.impl("launch", run, "CPU")


@pytest.fixture
def operations(kernels, monkeypatch):
    """Launches are operations."""

    def launch(kernel, programs, *given, **constants):
        tensors = [x for x in given if isinstance(x, torch.Tensor)]
        CALLS.append((kernel, programs, [None if isinstance(x, torch.Tensor) else x for x in given], constants))
        torch.ops.rlcli_tests.launch(tensors, len(CALLS) - 1)

    monkeypatch.setattr(kernels, "_launch", launch)
    monkeypatch.setattr(host, "may_ask", lambda x: False)


# ---- one layer -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("precision", ["ieee", "tf32"], ids=["streamed", "resident"])
@pytest.mark.parametrize("cell", CELLS)
def test_a_layer_is_8_launches_forwards_and_backwards_and_the_host_reads_nothing(operations, cell, precision):
    layer_is_8_launches(Call(cell, 3, 5, 4, 16), precision)


@pytest.mark.parametrize("cell", CELLS)
def test_so_is_a_layer_whose_units_are_split(operations, kernels, monkeypatch, split, cell):
    monkeypatch.setattr(kernels, "MEETING", True)
    layer_is_8_launches(Call(cell, 1 if split == "ieee" else 3, 5, 4, 48), split)


def layer_is_8_launches(call, precision):
    g = torch.Generator().manual_seed(0)
    of = [torch.randn(*call.source.shape, state.shape[1], generator=g).to(call.x) for state in call.states]

    def everything(module, **options):
        outputs = call.run(module, **options)
        return [*outputs, *torch.autograd.grad(outputs, call.inputs, of)]

    call.run(None, precision=precision)  # the first on a stream makes its counters
    found = []
    recorded = StandIn.record(lambda: found.append(everything(None, precision=precision)))
    names = [func.overloadpacket.__name__ for func, *_, kind in recorded.ops if kind != "view"]
    assert len(names := [name for name in names if name not in ("empty", "new_empty", "empty_like")]) <= 8, names
    recorded.replay()
    assert furthest(found[0], everything(reference)) < 1e-5


# ---- minibatches -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(5))
def test_folded_minibatches_hold_the_rows_of_flat_ones_in_their_order(seed):
    g = torch.Generator().manual_seed(seed)
    begins = torch.rand(100, generator=g) < 0.15
    begins[0] = True
    order, ends = shuffled_sequences({"is_init": begins}, 20, g)
    places, (rows, steps) = folded(order, ends, begins)
    for part, start, end in zip(places.view(-1, rows, steps), [0, *ends], ends, strict=False):
        assert torch.equal(part[part >= 0], order[start:end])
        first = part[:, 0][part[:, 0] >= 0]
        assert begins[first].all()  # no sequence lies in two rows
        goes_on = (part[:, 1:] >= 0) & ~begins[part[:, 1:].clamp(min=0)]
        assert torch.equal(part[:, 1:][goes_on], part[:, :-1][goes_on] + 1)


# ---- updates ---------------------------------------------------------------------------------------------------------
def cartpole():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


@pytest.fixture(scope="module", params=CELLS)
def batches(request):
    """An actor and a critic, and batches of a policy that does not learn."""
    env = cartpole()
    found = {}
    for backend in ("reference", "triton"):
        memory = Recurrence(request.param, 8, 1, {"recurrent_backend": backend})
        found[backend] = build_actor_critic(
            env.observation_spec, env.action_spec, hidden=[8], recurrence=memory, generator=0
        )
    pair = found["reference"]
    estimator = GAE(gamma=0.99, lmbda=0.9, value_network=pair.critic)
    with Collector(SerialEnv(2, cartpole), pair.actor, frames_per_batch=48, next_obs="exact", seed=0) as collector:
        return found, [estimator(collector.rollout()) for _ in range(3)]


def learned(pair, batches, record, monkeypatch, **options):
    monkeypatch.setattr(graph, "recorder_of", lambda device: record)
    pair = copy.deepcopy(pair)
    update = Update(
        ClipPPOLoss(pair.actor, pair.critic), lr=Linear(1e-2, 0), batch_size=24, epochs=2,
        generator=torch.Generator().manual_seed(1), **options,
    )  # fmt: skip
    return pair, update, [update(batch.clone(), n / 3) for n, batch in enumerate(batches)]


def refused(call):
    raise NotCapturable("nothing is recorded")


@pytest.mark.parametrize("slice_len", [None, 8])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_replayed_steps_of_a_recurrent_policy_are_the_plain_ones(batches, backend, slice_len, operations, monkeypatch):
    pairs, batches = batches
    plain, _, expected = learned(pairs[backend], batches, refused, monkeypatch, slice_len=slice_len)
    captured, update, found = learned(pairs[backend], batches, StandIn.record, monkeypatch, slice_len=slice_len)
    steps = [step.captured for step in update.graphs._of.values()]
    assert any(step.proven for step in steps) and not any(step.why for step in steps), [step.why for step in steps]
    for x, y in zip(plain.parameters(), captured.parameters(), strict=True):
        assert torch.equal(x, y)
    assert found == expected


def test_a_gpu_learns_from_the_rows_that_a_cpu_learns_from(batches, monkeypatch):
    pairs, batches = batches
    flat, _, expected = learned(pairs["reference"], batches, None, monkeypatch)
    monkeypatch.setattr(host, "may_ask", lambda x: False)
    there, _, found = learned(pairs["reference"], batches, None, monkeypatch)
    for x, y in zip(flat.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-5)
    assert expected[0]["loss_objective"] == pytest.approx(found[0]["loss_objective"], abs=1e-5)
