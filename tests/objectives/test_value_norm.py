"""Values in units of their own spread: statistics, targets, and PopArt's promise that nothing moves."""

import copy

import pytest
import torch
from actor_critic_batches import make_actor, make_critic, rollout
from face import refusals, refused
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from rlcli.errors import ArgumentError
from rlcli.modules import ValueOperator, build_actor_critic
from rlcli.objectives import ClipPPOLoss
from rlcli.objectives.value import GAE, PopArt, ValueNorm
from rlcli.specs import Categorical, Composite, Unbounded


def test_equal_weights_give_the_moments_of_all_targets():
    torch.manual_seed(0)
    norm, parts = ValueNorm(decay=1), [torch.randn(4, 10, 1, dtype=torch.float64) * 7 + 3 for _ in range(5)]
    for part in parts:
        norm.update(part)
    mean, deviation = norm.moments()
    everything = torch.cat(parts)
    torch.testing.assert_close(mean, everything.mean())
    torch.testing.assert_close(deviation, everything.std(correction=0))
    torch.testing.assert_close(norm.restore(norm.normalise(everything)), everything)


def test_the_first_batch_counts_fully_and_masked_rows_not_at_all():
    norm, target = ValueNorm(decay=0.9), torch.tensor([[1.0], [3.0], [float("nan")]])
    assert norm.moments() == (0.0, 1.0)
    norm.update(target, torch.tensor([[True], [True], [False]]))
    mean, deviation = norm.moments()
    assert float(mean) == pytest.approx(2) and float(deviation) == pytest.approx(1)


def test_rescaling_the_last_layer_leaves_every_value_where_it_was():
    torch.manual_seed(0)
    critic = make_critic()
    norm = PopArt(critic, decay=0.5)
    obs = rollout(make_actor())
    for scale in (10.0, 3.0, 500.0):
        before = norm.restore(critic(obs)["state_value"].clone())
        norm.update(torch.randn(50, 1) * scale + scale)
        torch.testing.assert_close(norm.restore(critic(obs)["state_value"]), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [ValueNorm, PopArt])
def test_advantages_are_those_of_the_restored_values_and_targets_are_normalised(kind):
    td, critic = rollout(make_actor(), (4, 25)), make_critic()
    norm = ValueNorm() if kind is ValueNorm else PopArt(critic)
    norm.update(torch.randn(100, 1) * 20 + 5)
    mean, deviation = (float(x) for x in norm.moments())
    plain_critic = copy.deepcopy(critic)
    last = [m for m in plain_critic.modules() if isinstance(m, nn.Linear)][-1]
    with torch.no_grad():  # a critic in units of the reward
        last.weight.mul_(deviation)
        last.bias.mul_(deviation).add_(mean)
    expected = GAE(gamma=0.97, lmbda=0.9, value_network=plain_critic)(td.clone())
    out = GAE(gamma=0.97, lmbda=0.9, value_network=critic, value_norm=norm)(td.clone())
    torch.testing.assert_close(out["advantage"], expected["advantage"], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(norm.restore(out["value_target"]), expected["value_target"], rtol=1e-4, atol=1e-3)
    written = critic(td.clone())["state_value"]  # PopArt has rescaled the critic by now
    torch.testing.assert_close(out["state_value"], written, rtol=1e-4, atol=1e-4)


test_what_cannot_be_rescaled_is_refused = refusals(
    (ArgumentError, "linear", lambda: PopArt(nn.Sequential(nn.Tanh()))),
    (ArgumentError, "bias", lambda: PopArt(nn.Linear(3, 1, bias=False))),
    (ArgumentError, "decay", lambda: ValueNorm(decay=0.0)),
)  # fmt: skip


class Critic(nn.Module):
    """A critic of the user's, that makes its head before its body."""

    def __init__(self, after=lambda value: value):
        super().__init__()
        self.head, self.body, self.after = nn.Linear(8, 1), nn.Linear(4, 8), after

    def forward(self, observation):
        return self.after(self.head(self.body(observation).tanh()))


def estimated(network, norm, **options):
    return GAE(gamma=0.9, lmbda=0.9, value_network=network, value_norm=norm, **options)(rollout(make_actor(), (4, 25)))


@pytest.mark.parametrize(
    "network",
    [
        Critic(),
        Critic(lambda value: value.squeeze(-1).unsqueeze(-1)),
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), nn.Identity()),
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 1), nn.Flatten()),
    ],
)
def test_a_call_shows_the_layer_where_the_structure_does_not_say_it(network):
    critic = ValueOperator(network)
    norm = PopArt(critic, decay=0.5)
    assert norm.layer is None
    refused(ArgumentError, "called", lambda: norm.update(torch.randn(50, 1)))
    out = estimated(critic, norm)
    assert norm.layer is (network.head if isinstance(network, Critic) else network[2])
    assert not any(m._forward_hooks for m in critic.modules())
    rows = out.reshape(-1)
    torch.testing.assert_close(critic(rows.clone())["state_value"], rows["state_value"], rtol=1e-4, atol=1e-5)
    before = norm.restore(rows["state_value"])
    norm.update(torch.randn(50, 1) * 30 + 7)
    torch.testing.assert_close(norm.restore(critic(rows)["state_value"]), before, rtol=1e-4, atol=1e-3)


def test_a_call_shows_it_in_lower_precision_in_parts_and_of_a_plain_module():
    for options in ({"compute_dtype": torch.bfloat16}, {"num_chunks": 3}, {"shifted": True}):
        network = Critic()
        norm = PopArt(network)
        estimated(ValueOperator(network), norm, **options)
        assert norm.layer is network.head


@pytest.mark.parametrize("options", [{}, {"fullgraph": True}])
def test_a_compiled_network_shows_its_layer_too(options):
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    norm = PopArt(critic := ValueOperator(torch.compile(network, backend="eager", **options)))
    estimated(critic, norm)
    assert norm.layer is network[-1]


def test_a_lazy_layer_is_found_in_the_call_that_makes_it():
    critic = ValueOperator(nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1)))
    norm = PopArt(critic)
    estimated(critic, norm)
    assert norm.layer is critic.module[-1]


def test_to_find_the_layer_leaves_no_trace():
    network = nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.5), nn.Linear(1, 1), nn.Linear(1, 1), nn.Identity())
    critic = ValueOperator(network)
    before = [x.clone() for x in network[:3].state_dict().values()]
    norm = PopArt(critic)
    rows, drawn = rollout(make_actor(), (100,)), []
    for _ in range(2):
        torch.manual_seed(3)
        GAE(gamma=0.9, lmbda=0.9, value_network=critic, value_norm=norm)(rows.clone())
        drawn.append(torch.rand(()))
        assert norm.layer is network[3]
        assert network.training
        assert all(map(torch.equal, before, network[:3].state_dict().values()))
    assert drawn[0] == drawn[1]


TIED = nn.Linear(4, 4)


class UsedTwice(Critic):
    """The weight of its head is also used where no module shows it."""

    def forward(self, observation):
        return super().forward(observation * nn.functional.linear(self.body(observation), self.head.weight))


def with_tied_memory(network, body, head):
    tied = network.get_submodule(head).weight
    tied.data = network.get_submodule(body).weight.data.view(-1)[: tied.numel()].view_as(tied)
    return network


@pytest.mark.parametrize(
    "network",
    [
        nn.Sequential(nn.Linear(4, 1), nn.Softplus()),
        Critic(torch.relu_),
        Critic(lambda value: 2 * value),
        Critic(lambda value: (value.data.mul_(3), value)[1]),
        Critic(lambda value: (torch._foreach_mul_([value.data], 3), value)[1]),
        UsedTwice(),
        with_tied_memory(Critic(), "body", "head"),
        with_tied_memory(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), "0", "2"),
        nn.Sequential(TIED, nn.Tanh(), TIED, nn.Identity()),
        nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 1))),
        TensorDictSequential(
            ValueOperator(nn.Linear(4, 1)),
            TensorDictModule(nn.Softplus(), ["state_value"], ["state_value"]),
            TensorDictModule(nn.Linear(4, 8), ["observation"], ["hidden"]),
        ),
    ],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_layer_that_may_not_write_the_value_is_not_rescaled(network, mode):
    critic = network if isinstance(network, TensorDictSequential) else ValueOperator(network)
    with (
        refused(ArgumentError, "value.normaliser=running"),
        mode(),
    ):
        estimated(critic, PopArt(critic))
    assert not any(m._forward_hooks for m in critic.modules())


def test_a_layer_that_is_given_must_be_one_that_can_be_rescaled():
    network = ValueOperator(Critic(lambda value: value * 1.0))
    told = network.module.head
    norm = PopArt(network, layer=told)
    assert norm.layer is told
    refused(ArgumentError, "layer", lambda: PopArt(network, layer=nn.Linear(8, 1)))
    refused(ArgumentError, "nn.Linear", lambda: PopArt(network, layer=nn.Tanh()))
    with refused(ArgumentError, "layer"):
        PopArt(network, layer=torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 1)))
    refused(ArgumentError, "layer", lambda: estimated(network, PopArt(network, layer=network.module.body)))
    network.module.head = nn.Linear(8, 1)
    refused(ArgumentError, "replaced", lambda: estimated(network, norm))


@pytest.mark.parametrize("network", [Critic(), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))])
def test_a_layer_that_was_replaced_is_found_again(network):
    critic = ValueOperator(network)
    norm = PopArt(critic)
    estimated(critic, norm)
    head = nn.Linear(8, 1)
    if isinstance(network, Critic):
        network.head = head
    else:
        network[-1] = head
    estimated(critic, norm)
    assert norm.layer is head


def test_the_layer_that_writes_the_value_is_found_wherever_it_was_made():
    head, body = nn.Linear(8, 1), nn.Linear(4, 8)
    critic = TensorDictSequential(
        TensorDictModule(body, ["observation"], ["hidden"]),
        ValueOperator(nn.Sequential(nn.Tanh(), nn.Sequential(head)), ["hidden"]),
        TensorDictModule(nn.Linear(8, 3), ["hidden"], ["other"]),
    )
    assert PopArt(critic).layer is head
    spec = Composite({"a": Unbounded((3,)), "b": Unbounded((2,))})
    built = build_actor_critic(spec, Categorical(2), hidden=(8,)).critic
    assert PopArt(built).layer is built.module.mlp[-1]


def test_without_a_network_there_is_nothing_to_rescale():
    refused(ArgumentError, "network", lambda: PopArt(None))


@pytest.mark.parametrize("kind", [ValueNorm, PopArt])
def test_the_stored_value_is_what_the_network_says_when_the_update_begins(kind):
    actor, critic = make_actor(), make_critic()
    td = rollout(actor, (4, 25))
    td["next", "reward"] *= 50
    norm = ValueNorm() if kind is ValueNorm else PopArt(critic)
    out = GAE(gamma=0.97, lmbda=0.9, value_network=critic, value_norm=norm)(td)
    terms = ClipPPOLoss(actor, critic, clip_value=0.2)(out)
    assert terms["value_clip_fraction"] == 0


def test_popart_is_refused_where_gradients_flow():
    critic = make_critic()
    with refused(ArgumentError, "PopArt differentiable"):
        GAE(gamma=0.9, lmbda=0.9, value_network=critic, value_norm=PopArt(critic), differentiable=True)
