"""GRU and LSTM on tensordicts: sequences equal steps taken one by one, flat batches equal shaped ones, and what is said
where data do not fit."""

from __future__ import annotations

import threading

import pytest
import torch
from face import refusals, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.nn.utils import prune

from rlcli.envs import GymEnv
from rlcli.errors import ArgumentError, MissingKeyError
from rlcli.modules import GRUModule, LSTMModule, recurrent_mode, set_recurrent_mode
from rlcli.modules.recurrent.sequences import sequences
from rlcli.transforms import TensorDictPrimer

INPUTS, H = 3, 5
CELLS = (GRUModule, LSTMModule)


def module(kind, layers=1, **options):
    torch.manual_seed(0)
    return kind(INPUTS, H, layers, in_key="observation", out_key="features", **options).double()


def data(net, *size, seed=0, rate=0.3):
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*size, *shape, generator=g, dtype=torch.float64)

    states = {key: draw(net.layers.num_layers, H) for key in net.state_keys}
    return TensorDict(
        {"observation": draw(INPUTS), "is_init": torch.rand(*size, 1, generator=g) < rate, **states}, size
    )


def one_by_one(net, td):
    """`td [B, T]` step by step: a state is the stored one where `is_init` is set, and in the first step."""
    rows = []
    for t in range(td.shape[1]):
        row = td[:, t].clone()
        if rows:
            for key in net.state_keys:
                row[key] = torch.where(row["is_init"].unsqueeze(-1), row[key], rows[-1]["next", key])
        with set_recurrent_mode(False):
            rows.append(net(row.exclude("is_init")).set("is_init", row["is_init"]))
    return torch.stack(rows, 1)


@pytest.mark.parametrize("kind", CELLS)
def test_a_step_begins_an_episode_from_zeros_whatever_state_was_carried(kind):
    net = module(kind, 2)
    row = data(net, 4, 1)[:, 0].set("is_init", torch.tensor([[True], [False], [True], [False]]))
    with set_recurrent_mode(False):
        found, carried = net(row.clone()), net(row.exclude("is_init"))
        fresh = net(row.clone().update({key: torch.zeros_like(row[key]) for key in net.state_keys}))
    for key in net.out_keys:
        assert torch.equal(found[key][[0, 2]], fresh[key][[0, 2]])
        assert torch.equal(found[key][[1, 3]], carried[key][[1, 3]])
        assert not torch.equal(found[key][0], carried[key][0])


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_sequences_equal_steps_taken_one_by_one(kind, layers, rate):
    net = module(kind, layers)
    td = data(net, 4, 9, rate=rate)
    with set_recurrent_mode(True):
        out = net(td.clone())
    for key in net.out_keys:
        torch.testing.assert_close(out[key], one_by_one(net, td)[key])


@pytest.mark.parametrize("kind", CELLS)
def test_gradients_equal_those_of_steps_taken_one_by_one(kind):
    net = module(kind, 2)
    td = data(net, 3, 7)
    found = []
    for run in (lambda td: one_by_one(net, td), net):
        leaves = {key: td[key].clone().requires_grad_() for key in ("observation", *net.state_keys)}
        with set_recurrent_mode(True):
            out = run(td.clone().update(leaves))
        weight = torch.arange(out["features"].numel(), dtype=torch.float64).view_as(out["features"]).cos()
        total = (out["features"] * weight).sum() + sum(out[key].square().sum() for key in net.out_keys[1:])
        found.append(torch.autograd.grad(total, [*leaves.values(), *net.parameters()]))
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("kind", CELLS)
def test_parameters_are_those_of_torch(kind):
    net, theirs = module(kind, 2), kind.kind(INPUTS, H, 2, batch_first=True).double()
    theirs.load_state_dict(net.layers.state_dict())
    td = data(net, 4, 9, rate=0.0)
    first = [td[key][:, 0].transpose(0, 1).contiguous() for key in net.state_keys]
    features, last = theirs(td["observation"], first[0] if len(first) == 1 else tuple(first))
    with set_recurrent_mode(True):
        out = net(td)
    torch.testing.assert_close(out["features"], features)
    last = (last,) if isinstance(last, torch.Tensor) else last
    for key, state in zip(net.state_keys, last, strict=True):
        torch.testing.assert_close(out["next", key][:, -1], state.transpose(0, 1))
    name = kind.kind.__name__.lower()
    assert set(net.state_dict()) == {f"{name}.{key}" for key in theirs.state_dict()}
    taken = kind(in_key="observation", out_key="features", **{name: theirs})
    assert taken.layers is theirs


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.sampled_from(CELLS), st.integers(1, 2))
def test_a_flat_batch_is_a_row_of_slices(lengths, kind, layers):
    net = module(kind, layers)
    td = data(net, sum(lengths), rate=0.0)
    for first in [sum(lengths[:i]) for i in range(len(lengths))]:
        td["is_init"][first] = True
    with set_recurrent_mode(True):
        out = net(td.clone())
        alone = torch.cat([net(part.clone().unsqueeze(0)).squeeze(0) for part in td.split(lengths)])
    for key in net.out_keys:
        torch.testing.assert_close(out[key], alone[key])


@pytest.mark.parametrize("kind", CELLS)
def test_rows_of_several_trajectories_end_to_end_each_begin_from_their_own_state(kind):
    net = module(kind)
    td = data(net, 4, 6, rate=0.0)
    td["collector", "traj_ids"] = torch.arange(4).unsqueeze(1).expand(4, 6)
    shuffled = td.reshape(-1)[(order := torch.randperm(24))]
    with set_recurrent_mode(True):
        rows, flat, wide = net(td.clone()), net(td.clone().reshape(-1)), net(td.reshape(2, 12))
        one = net(td.clone().reshape(24, 1)).reshape(-1)
        mixed = net(shuffled.clone())
    for key in net.out_keys:
        torch.testing.assert_close(flat[key], rows[key].flatten(0, 1))
        torch.testing.assert_close(wide[key].flatten(0, 1), rows[key].flatten(0, 1))
    ids = shuffled["collector", "traj_ids"]
    begins = torch.cat([torch.ones(1, dtype=torch.bool), ids[1:] != ids[:-1]])
    for key in net.out_keys:
        torch.testing.assert_close(mixed[key][begins], one[key][order][begins])


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_every_row_of_a_flat_batch_has_one_place_in_its_order(flags):
    is_init = torch.tensor(flags)
    where, place = sequences(is_init), torch.arange(len(flags))
    assert torch.equal(where.in_order(where.laid_out(place)), place)
    starts = is_init.clone()
    starts[0] = True
    assert torch.equal(where.in_order(where.begins), starts) and where.begins[:, 0].all()
    assert torch.equal(where.in_order(where.sources), torch.where(starts, place, -1))
    rows = where.laid_out(place)
    follows = rows[:, 1:] == rows[:, :-1] + 1  # what goes on does so from the row before it, but behind the last step
    ends = where.laid_out(torch.ones_like(place)).cumsum(1)
    assert bool((follows | where.begins[:, 1:] | (rows[:, 1:] == 0)).all()) and ends.shape == rows.shape
    assert where.begins.numel() <= 2 * len(flags)


def test_equal_slices_are_equal_bit_for_bit_flat_or_shaped():
    net = module(GRUModule, 2).float()
    td = data(net, 6, 8, rate=0.0).float()
    td["is_init"][:, 0] = True
    with set_recurrent_mode(True):
        flat, shaped = net(td.clone().reshape(-1)), net(td.clone())
    for key in net.out_keys:
        assert torch.equal(flat[key].reshape(shaped[key].shape), shaped[key])


@pytest.mark.parametrize("size", [(7,), (2, 7), (2, 3, 7)])
def test_any_batch_dims_before_time(size):
    net = module(LSTMModule)
    td = data(net, *size)
    with set_recurrent_mode(True):
        out = net(td.clone())
        rows = net(td.clone().reshape(-1, 7))
    assert out["features"].shape == (*size, H)
    torch.testing.assert_close(out["features"].reshape(-1, 7, H), rows["features"])


def test_states_that_are_not_stored_are_zeros():
    net = module(LSTMModule)
    td = data(net, 4, 6)
    td["is_init"][:, 0] = True
    zeros = td.clone()
    for key in net.state_keys:
        zeros[key].zero_()
    with set_recurrent_mode(True):
        assert torch.equal(net(td.exclude(*net.state_keys))["features"], net(zeros)["features"])


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", CELLS)
def test_what_is_written_to_features_in_place_leaves_the_states_alone(kind, layers):
    net = module(kind, layers)
    td = data(net, 3, 5)
    with set_recurrent_mode(True), torch.no_grad():
        states = [net(td.clone())["next", key] for key in net.state_keys]
        out = net(td.clone())
        out["features"].relu_()
    assert all(torch.equal(out["next", key], state) for key, state in zip(net.state_keys, states, strict=True))


def test_dropout_lies_between_layers_in_training_mode():
    net = module(GRUModule, 2, dropout=0.5)
    td = data(net, 3, 6)
    with set_recurrent_mode(True):
        drawn = [net(td.clone())["features"] for _ in range(2)]
        net.eval()
        still = [net(td.clone())["features"] for _ in range(2)]
    assert not torch.equal(*drawn) and torch.equal(*still)
    single = module(GRUModule, 1, dropout=0.0)
    assert single.training


@pytest.mark.parametrize("size", [(3, 6), (8,)])
@pytest.mark.parametrize("kind", CELLS)
def test_torch_func_maps_over_data_and_weights(kind, size):
    net = module(kind, 2)
    td = torch.stack([data(net, *size, seed=seed) for seed in range(2)])
    tensors = [td[key] for key in net.in_keys]
    found = torch.vmap(net.on_sequences)(*tensors)
    for i in range(2):
        for y, expected in zip(found, net.on_sequences(*(x[i] for x in tensors)), strict=True):
            torch.testing.assert_close(y[i], expected)
    weights = dict(net.named_parameters())

    def total(weights):
        with set_recurrent_mode(True):
            return torch.func.functional_call(net, weights, (td[0].clone(),))["features"].sum()

    of_weights = torch.func.grad(total)(weights)
    for name, expected in zip(weights, torch.autograd.grad(total(weights), list(weights.values())), strict=True):
        torch.testing.assert_close(of_weights[name], expected)


# ---- which mode ------------------------------------------------------------------------------------------------------
def test_the_nearest_mode_counts_and_the_default_where_there_is_none():
    net, by_default = module(GRUModule), module(GRUModule, default_recurrent_mode=True)
    assert (net.runs_over_sequences, by_default.runs_over_sequences) == (False, True)
    with set_recurrent_mode("recurrent"):
        assert net.runs_over_sequences
        with set_recurrent_mode("sequential"):
            assert not by_default.runs_over_sequences
            with set_recurrent_mode(None):
                assert (net.runs_over_sequences, by_default.runs_over_sequences) == (False, True)
        assert recurrent_mode() is True
    assert recurrent_mode() is None


def test_a_mode_is_of_its_thread_and_ends_where_its_code_raises():
    seen = []
    with pytest.raises(KeyError), set_recurrent_mode(True):
        thread = threading.Thread(target=lambda: seen.append(recurrent_mode()))
        thread.start()
        thread.join()
        raise KeyError
    assert seen == [None] and recurrent_mode() is None


def test_a_function_may_be_decorated_with_a_mode():
    @set_recurrent_mode("recurrent")
    def mode(deeper=0):
        return mode(deeper - 1) if deeper else recurrent_mode()

    assert mode.__name__ == "mode" and mode(3) is True and recurrent_mode() is None


def test_torch_compile_traces_a_mode_without_a_graph_break():
    def inside(x):
        with set_recurrent_mode(True):
            y = x + (1 if recurrent_mode() else 2)
        return y if recurrent_mode() is None else -y

    def around(x):
        return x + (1 if recurrent_mode() else 2)

    inside, around = (torch.compile(each, backend="eager", fullgraph=True) for each in (inside, around))
    assert inside(torch.zeros(())) == 1 and recurrent_mode() is None
    assert around(torch.zeros(())) == 2
    with set_recurrent_mode(True):
        assert around(torch.zeros(())) == 1


# ---- envs and keys ---------------------------------------------------------------------------------------------------
def test_keys_are_named_all_or_one_for_the_others_to_follow():
    net = GRUModule(INPUTS, H, in_keys=["obs", "rhs"], out_keys=["features", ("next", "rhs")])
    assert net.in_keys == ["obs", "rhs", "is_init"] and net.state_keys == ["rhs"]
    deep = {"in_keys": ["obs", ("deep", "h"), "c", "is_init"], "out_keys": ["f", ("next", "deep", "h"), ("next", "c")]}
    net = LSTMModule(INPUTS, H, **deep)
    assert net.state_keys == [("deep", "h"), "c"]
    assert module(LSTMModule).in_keys == ["observation", "recurrent_state_h", "recurrent_state_c", "is_init"]
    primer = LSTMModule(INPUTS, H, 2, in_key="o", out_key="f").make_tensordict_primer()
    assert isinstance(primer, TensorDictPrimer)
    assert [primer.primers[key].shape for key in primer.out_keys] == [(2, H), (2, H)]


def test_an_env_is_wired_once_however_often_it_is_told():
    net = GRUModule(4, H, in_key="observation", out_key="features")
    env = GymEnv("CartPole-v1", policy=net)
    again = type(env)(env, policy=net)
    assert [type(t).__name__ for t in again.transforms] == ["InitTracker", "TensorDictPrimer"]
    assert GymEnv("CartPole-v1", policy=None).observation_spec.keys() == GymEnv("CartPole-v1").observation_spec.keys()


def test_two_modules_with_one_state_are_refused():
    first, second = (GRUModule(4, 4, in_key=x, out_key=y) for x, y in (("observation", "low"), ("low", "high")))
    with refused(ArgumentError, "policy recurrent_state"):
        GymEnv("CartPole-v1", policy=TensorDictSequential(first, second))

    class Around(TensorDictSequential):
        def make_tensordict_primer(self):
            return first.make_tensordict_primer()

    env = GymEnv("CartPole-v1", policy=Around(first))
    assert [type(t).__name__ for t in env.transforms] == ["InitTracker", "TensorDictPrimer"]


def test_an_env_with_a_policy_of_its_own_keeps_that_argument():
    class Own(GymEnv):
        def __init__(self, env, *, policy):
            super().__init__(env)
            self.policy = policy

    assert Own("CartPole-v1", policy=module(GRUModule)).policy is not None


# ---- what does not fit -----------------------------------------------------------------------------------------------
def said(td, net=None, mode=True, error=ArgumentError):
    net = module(GRUModule) if net is None else net
    with pytest.raises(error) as raised, set_recurrent_mode(mode):
        net(td)
    return str(raised.value)


def test_what_is_missing_is_named():
    net = module(GRUModule)
    td = data(net, 3, 4)
    assert "the data have no is_init" in said(td.exclude("is_init"), error=MissingKeyError)
    assert "the data have no observation" in said(td.exclude("observation"), error=MissingKeyError)
    assert "the data have no recurrent_state" in said(td.exclude("recurrent_state"), mode=False, error=MissingKeyError)
    td["is_init"].zero_()
    text = said(td.exclude("recurrent_state"), error=MissingKeyError)
    assert "3 of 3 sequences begin inside of a trajectory" in text


def test_shapes_that_do_not_fit_are_named():
    net = module(GRUModule)
    td = data(net, 3, 4)
    td["recurrent_state"] = torch.zeros(3, 4, 1, H + 1, dtype=torch.float64)
    for mode in (True, False):
        assert "expected (3, 4, 1, 5), got (3, 4, 1, 6)" in said(td, mode=mode)
    td = data(net, 3, 4)
    td["observation"] = torch.zeros(3, 4, INPUTS + 1, dtype=torch.float64)
    assert "input_size is 3" in said(td)
    td = data(net, 3, 4)
    td["is_init"] = torch.zeros(3, 4, 2, dtype=torch.bool)
    assert "not one flag a row" in said(td)


@pytest.mark.parametrize("mode", [True, False])
def test_dtypes_that_do_not_fit_are_named(mode):
    net = module(GRUModule).float()
    td = data(net, 3, 4).float()
    double = td.clone().set("observation", td["observation"].double())
    assert said(double, net, mode) == (
        "observation does not fit GRUModule: it is float64, and the weights are float32. Convert one of the two: "
        "DoubleToFloat() does so in an env."
    )
    double = td.clone().set("recurrent_state", td["recurrent_state"].double())
    assert "a stored state does not fit GRUModule: it is float64" in said(double, net, mode)
    with torch.autocast("cpu", torch.bfloat16), set_recurrent_mode(mode):
        assert net(td.set("observation", td["observation"].bfloat16()))["features"].dtype == torch.float32


def test_half_a_state_is_no_state():
    net = module(LSTMModule)
    td = data(net, 3, 4, rate=2.0).exclude("recurrent_state_c")
    assert "the data have no recurrent_state_c (LSTMModule): a state is stored as a whole" in said(
        td, net, error=MissingKeyError
    )


def test_a_step_of_no_envs():
    net = module(LSTMModule, 2)
    out = net(data(net, 0))
    assert out["features"].shape == (0, H) and out["next", "recurrent_state_c"].shape == (0, 2, H)


HOOKED = {
    "forward": lambda gru: gru.register_forward_hook(lambda *_: None),
    "before": lambda gru: gru.register_forward_pre_hook(lambda *_: None),
    "backward": lambda gru: gru.register_full_backward_hook(lambda *_: None),
    "pruned": lambda gru: prune.random_unstructured(gru, "weight_hh_l0", 0.5),
    "its own": lambda gru: setattr(gru, "forward", gru.forward),
}


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("how", HOOKED)
def test_hooks_that_would_not_run_are_refused(how, mode):
    net = module(GRUModule)
    HOOKED[how](net.gru)
    assert "the GRU inside GRUModule has a hook or a forward that would never run" in said(data(net, 3, 4), net, mode)


@pytest.mark.parametrize("mode", [True, False])
def test_weights_that_are_computed_are_followed(mode):
    net = module(GRUModule)
    nn.utils.parametrizations.weight_norm(net.gru, "weight_hh_l0")
    td = data(net, 3, 4)
    with set_recurrent_mode(mode):
        before = net(td.clone())["features"]
        with torch.no_grad():
            net.gru.parametrizations.weight_hh_l0.original0.mul_(2)
        assert not torch.allclose(net(td.clone())["features"], before)


@pytest.mark.parametrize("written", ["h", ("next", "g")])
def test_a_state_that_is_written_where_no_step_finds_it_is_refused_by_envs(written):
    net = GRUModule(4, H, in_keys=["observation", "h"], out_keys=["features", written])
    refused(ArgumentError, "forget", lambda: GymEnv("CartPole-v1", policy=net))


def test_data_without_time_are_no_sequences():
    assert "the data have no time" in said(data(module(GRUModule), 3)[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"in_keys": ["a"], "out_keys": ["b", ("next", "c")]}, "in_keys"),
        ({"in_keys": ["a", "h", "reset"], "out_keys": ["b", ("next", "h")]}, "is_init"),
        ({"in_key": "a", "out_keys": ["b"]}, "out_keys"),
        ({"in_key": "a"}, "out_key out_keys"),
        ({"in_key": "a", "in_keys": ["a", "h"], "out_key": "b"}, "in_keys in_key"),
        ({"in_key": "a", "out_key": "b", "recurrent_backend": "cudnn"}, "recurrent_backend"),
        ({"in_key": "a", "out_key": "b", "bidirectional": True}, "seen comes"),
        ({"in_key": "a", "out_key": "b", "batch_first": False}, "batch_first"),
        ({"in_key": "a", "out_key": "b", "gru": nn.GRU(INPUTS, H, batch_first=True)}, "layers sizes"),
        ({"in_keys": ["a", "a"], "out_key": "b"}, "in_keys"),
        ({"in_key": "a", "out_key": "b", "recurrent_recompute": "gates"}, "recurrent_recompute='gates'"),
        ({"in_key": "a", "out_key": "b", "recurrent_recompute": ["full"]}, "recurrent_recompute=['full']"),
    ],
)
def test_arguments_that_cannot_be_are_refused(options, words):
    refused(ArgumentError, words, lambda: GRUModule(INPUTS, H, **options))


class OwnForward(nn.GRU):
    def forward(self, *given):
        return super().forward(*given)


@pytest.mark.parametrize(
    ("layers", "options", "words"),
    [
        (nn.LSTM(INPUTS, H, batch_first=True), {}, "torch.nn.GRU LSTM"),
        ("gru", {}, "given str"),
        (OwnForward(INPUTS, H, batch_first=True), {}, "OwnForward"),
        (nn.GRU(INPUTS, H, batch_first=True), {"num_layers": 2}, "layers sizes"),
        (nn.GRU(INPUTS, H, batch_first=True), {"dropout": 0.5}, "layers sizes"),
    ],
)
def test_layers_that_it_cannot_run_are_refused(layers, options, words):
    refused(ArgumentError, words, lambda: GRUModule(gru=layers, in_key="a", out_key="b", **options))


@pytest.mark.parametrize(("given", "taken"), [(True, True), ("full", True), (False, False), ("none", False)])
def test_what_is_kept_for_the_backward_pass_is_a_word_or_a_flag(given, taken):
    assert module(GRUModule, recurrent_recompute=given).recurrent_recompute is taken


test_refused = refusals(
    ("sizes are needed", ArgumentError, "input_size hidden_size", lambda: GRUModule(in_key="a", out_key="b")),
    ("an unknown mode is refused", ArgumentError, "both", lambda: set_recurrent_mode("both")),
)  # fmt: skip


def test_a_policy_that_is_stepped_without_its_state_is_an_error():
    net = GRUModule(4, H, in_key="observation", out_key="features")
    head = TensorDictModule(lambda x: nn.functional.one_hot(x[..., :2].argmax(-1), 2), ["features"], ["action"])
    refused(MissingKeyError, "goes state", lambda: GymEnv("CartPole-v1").rollout(3, TensorDictSequential(net, head)))


def test_a_lower_precision_is_tritons_and_another_is_refused(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "rlcli.modules.recurrent.modules.unroll", lambda x, *given, **options: seen.append(options) or (x,)
    )
    net = GRUModule(H, H, in_key="observation", out_key="features", recurrent_compute_dtype=torch.bfloat16)
    td = TensorDict({"observation": torch.zeros(2, 3, H), "is_init": torch.ones(2, 3, 1, dtype=torch.bool)}, [2, 3])
    with set_recurrent_mode(True):
        net(td)
    assert seen == [{"backend": "auto", "recompute": False, "precision": "bf16"}]
    with refused(ArgumentError, "recurrent_compute_dtype=torch.float16"):
        GRUModule(H, H, in_key="observation", out_key="features", recurrent_compute_dtype=torch.float16)
