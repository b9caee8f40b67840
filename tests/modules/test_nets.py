"""Networks: plain layers, any image layout, float32 at the border, seeds that touch nothing else."""

from __future__ import annotations

import functools
import math
import re
import warnings

import numpy as np
import pytest
import torch
from face import refused
from torch import nn

from rlcli.errors import ArgumentError, ConfigError
from rlcli.modules import MLP, DictEncoder, Flat, NatureCNN, OneHotIndex, activation_class, network, seeded
from rlcli.modules.encoders import spatial_dims
from rlcli.specs import Bounded, Categorical, Composite, MultiCategorical, Unbounded


def test_an_mlp_is_a_sequence_of_torchs_own_layers() -> None:
    net = MLP(4, 2, (8, 8), "tanh")
    assert [type(layer) for layer in net] == [nn.Linear, nn.Tanh, nn.Linear, nn.Tanh, nn.Linear]
    assert "forward" not in MLP.__dict__  # so it can be replayed layer by layer
    assert [type(layer) for layer in MLP(4, None, (8,), nn.ReLU)] == [nn.Linear, nn.ReLU]
    assert MLP(4, None, (8,)).out_features == 8
    assert MLP(4, 3, ()).out_features == 3


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({"num_cells": [8, 6], "activation_class": nn.ELU}, {"hidden": [8, 6], "activation": "elu"}),
        ({"num_cells": 8, "depth": 2}, {"hidden": [8, 8]}),
        ({"depth": 3}, {"hidden": [32, 32, 32]}),
        ({"num_cells": ()}, {"hidden": ()}),
        ({"num_cells": (8,), "depth": 1, "activation_class": nn.ReLU}, {"hidden": (8,), "activation": nn.ReLU}),
    ],
    ids=str,
)
def test_an_mlp_takes_the_names_of_upstream(options, same) -> None:
    with seeded(0):
        net = MLP(4, 2, **options)
    with seeded(0):
        expected = MLP(4, 2, **same)
    assert str(net) == str(expected) and torch.equal(net(torch.ones(3, 4)), expected(torch.ones(3, 4)))
    theirs = pytest.importorskip("torchrl.modules").MLP(4, 2, **options)
    assert [type(layer) for layer in theirs] == [type(layer) for layer in net]
    theirs.load_state_dict(net.state_dict())
    assert torch.equal(net(torch.ones(3, 4)), theirs(torch.ones(3, 4)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_cells": 8}, "Give depth as well"),
        ({"num_cells": [8], "depth": 2}, "num_cells has 1 layers"),
        ({"num_cells": [8], "hidden": [8]}, "another spelling of hidden"),
        ({"activation": "relu", "activation_class": nn.ReLU}, "another name of activation"),
    ],
    ids=str,
)
def test_an_mlp_said_twice_or_by_half_is_refused(options, words) -> None:
    with pytest.raises(ArgumentError, match=words):
        MLP(4, 2, **options)


@pytest.mark.parametrize(
    "make", [functools.partial(nn.LeakyReLU, 0.2), lambda: nn.LeakyReLU(0.2)], ids=["partial", "function"]
)
@pytest.mark.parametrize("name", ["activation", "activation_class"])
def test_an_activation_may_be_made_by_a_function(make, name) -> None:
    net = MLP(4, 2, np.array([4, 5]), **{name: make})
    assert [layer.negative_slope for layer in net if isinstance(layer, nn.LeakyReLU)] == [0.2, 0.2]
    assert [layer.out_features for layer in net if isinstance(layer, nn.Linear)] == [4, 5, 2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hidden": "64"}, "hidden 64"),
        ({"hidden": [64.0]}, "hidden [64.0]"),
        ({"num_cells": 64.0, "depth": 2}, "num_cells 64.0"),
        ({"num_cells": 64, "depth": 2.0}, "depth 2.0"),
        ({"num_cells": 4, "depth": -1}, "depth -1"),
        ({"out_features": (2, 2)}, "64 sizes"),
        ({"in_features": None}, "in_features"),
        ({"activation": 0}, "activation"),
        ({"activation": torch.tanh}, "activation TypeError"),
        ({"activation": lambda: torch.tanh}, "activation builtin_function_or_method"),
    ],
)
def test_layers_that_cannot_be_are_refused_in_a_sentence(options, words) -> None:
    refused((ArgumentError, ConfigError), words, lambda: MLP(**{"in_features": 4, "out_features": 2, **options}))


def test_orthogonal_layers_have_their_gains() -> None:
    net = MLP(16, 4, (16,), orthogonal=True, last_gain=0.01)
    hidden, last = net[0], net[2]
    assert torch.allclose(hidden.weight @ hidden.weight.T, 2 * torch.eye(16), atol=1e-5)
    assert torch.allclose(last.weight @ last.weight.T, 1e-4 * torch.eye(4), atol=1e-8)
    assert not hidden.bias.any() and not last.bias.any()


def test_an_unknown_activation_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown activation 'rellu'.*Did you mean relu"):
        activation_class("rellu")


def test_a_seed_fixes_the_weights_and_leaves_the_global_stream() -> None:
    before = torch.get_rng_state()
    nets = []
    for _ in range(2):
        with seeded(7):
            nets.append(MLP(4, 2))
    with seeded(torch.Generator().manual_seed(1)):
        other = MLP(4, 2)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(nets[0][0].weight, nets[1][0].weight)
    assert not torch.equal(nets[0][0].weight, other[0].weight)


@pytest.mark.parametrize(
    ("shape", "at"),
    [
        ((84, 84), 0),
        ((4, 84, 84), 1),
        ((96, 96, 3), 0),
        ((4, 96, 96, 3), 1),
        ((4, 3, 84, 90), 2),
        ((210, 160, 3), 0),
    ],
)
def test_height_and_width_are_found_in_every_layout(shape, at) -> None:
    assert spatial_dims(shape) == at
    net = NatureCNN(shape)
    pixels = torch.randint(256, (2, 3, *shape), dtype=torch.uint8)
    out = net(pixels)
    assert out.shape == (2, 3, net.out_features)
    assert torch.allclose(out[1, 2], net(pixels[1, 2]), atol=1e-6)


def test_channels_last_is_the_same_image() -> None:
    first, last = NatureCNN((3, 64, 64)), NatureCNN((64, 64, 3))
    last.load_state_dict(first.state_dict())
    pixels = torch.randint(256, (5, 3, 64, 64), dtype=torch.uint8)
    assert torch.allclose(first(pixels), last(pixels.permute(0, 2, 3, 1)), atol=1e-6)
    assert torch.allclose(first(pixels), first.layers(pixels / 255), atol=1e-6)


def test_a_small_image_is_refused_with_its_size() -> None:
    refused(ArgumentError, "20 84 36", lambda: NatureCNN((3, 20, 84)))


def test_flat_casts_float64_to_float32_and_flattens() -> None:
    x = torch.randn(5, 7, 2, 3, dtype=torch.float64)
    assert torch.equal(Flat((2, 3))(x), x.float().reshape(5, 7, 6))
    assert Flat(())(torch.ones(4)).shape == (4, 1)


def test_indices_become_one_hots() -> None:
    encode = OneHotIndex((2,), (3, 2))
    assert encode(torch.tensor([[2, 0]])).tolist() == [[0, 0, 1, 1, 0]]
    assert OneHotIndex((), (4,))(torch.tensor([1, 3])).tolist() == [[0, 1, 0, 0], [0, 0, 0, 1]]


def test_dict_encoder_concatenates_in_order() -> None:
    encoder = DictEncoder([Flat((2,)), OneHotIndex((), (3,))])
    assert encoder.out_features == 5
    assert encoder(torch.tensor([[1.0, 2.0]]), torch.tensor([0])).tolist() == [[1, 2, 1, 0, 0]]


def spec(**leaves) -> Composite:
    return Composite(leaves, shape=(2,))


IMAGE = Bounded(0, 255, (2, 4, 84, 84), torch.uint8)
VECTOR = Unbounded((2, 3))


def test_a_float32_vector_needs_no_encoder_and_others_get_one() -> None:
    assert isinstance(network(spec(observation=VECTOR), ["observation"], 1)[0], nn.Linear)
    double = network(spec(observation=Unbounded((2, 3), torch.float64)), ["observation"], 1)
    assert isinstance(double[0], Flat)
    assert double(torch.zeros(2, 3, dtype=torch.float64)).shape == (2, 1)
    index = network(spec(observation=Categorical(16, (2,))), ["observation"], 1)
    assert isinstance(index[0], OneHotIndex)
    assert index(torch.zeros(2, dtype=torch.long)).shape == (2, 1)
    multi = network(spec(observation=MultiCategorical([2, 3], (2, 2))), ["observation"], 1)
    assert multi(torch.zeros(2, 2, dtype=torch.long)).shape == (2, 1)


def test_auto_picks_a_network_for_what_is_seen() -> None:
    image = network(spec(pixels=IMAGE), ["pixels"], 1)
    assert isinstance(image[0], NatureCNN)
    assert image[0].scale == 1 / 255
    assert image[1].out_features == 512
    both = network(spec(pixels=IMAGE, state=VECTOR), ["pixels", "state"], 5)
    td = spec(pixels=IMAGE, state=VECTOR).rand()
    assert both(td["pixels"], td["state"]).shape == (2, 5)
    unit = network(spec(pixels=Bounded(0.0, 1.0, (2, 3, 64, 64))), ["pixels"], 1)
    assert unit[0].scale == 1


@pytest.mark.parametrize(
    ("leaves", "net", "message"),
    [
        ({"a": VECTOR, "b": VECTOR}, "mlp", "policy=mlp reads one observation.*a, b.*policy=dict"),
        ({"a": VECTOR}, "cnn", "policy=cnn needs an image.*'a'.*policy=mlp"),
        ({"a": Unbounded((2, 3), torch.complex64)}, "auto", "no network here.*'a'.*complex64"),
        ({"a": Unbounded((2, 0))}, "auto", "observation is empty"),
        ({"a": VECTOR}, "mpl", "unknown network 'mpl'.*Did you mean mlp"),
    ],
)
def test_observations_that_do_not_fit_are_refused_by_name(leaves, net, message) -> None:
    with pytest.raises(ConfigError, match=message):
        network(spec(**leaves), list(leaves), 1, net=net)


def test_image_encoder_weights_are_orthogonal_too() -> None:
    net = network(spec(pixels=IMAGE), ["pixels"], 1)
    first = net[0].layers[0].weight.flatten(1)
    assert torch.allclose(first @ first.T, 2 * torch.eye(32), atol=1e-5)
    assert math.isclose(net[-1].weight.norm().item(), 1, rel_tol=1e-5)


def test_bytes_are_scaled_whatever_network_reads_them() -> None:
    for leaf, net in ((Bounded(0, 255, (2, 10, 10, 4), torch.uint8), "auto"), (IMAGE, "mlp")):
        with pytest.warns(UserWarning, match="numbers in a row"):
            encoder = network(spec(a=leaf), ["a"], 1, net=net)[0]
        assert isinstance(encoder, Flat) and encoder(torch.full(leaf.shape, 255, dtype=torch.uint8)).eq(1).all()
    memory, board = Bounded(0, 255, (2, 128), torch.uint8), Bounded(0, 9, (2, 7, 7), torch.uint8)
    assert network(spec(a=memory), ["a"], 1)[0].scale == 1 / 255 and network(spec(a=board), ["a"], 1)[0].scale == 1


def test_whole_numbers_of_a_large_range_are_named_once_with_the_key_that_scales_them() -> None:
    leaves = {"glyphs": Bounded(0, 5976, (2, 21), torch.int16), "small": Bounded(-9, 9, (2, 3), torch.int64)}
    with pytest.warns(UserWarning, match=r"^glyphs: whole numbers of a large range.*env.normalize_observation=true"):
        network(spec(**leaves), list(leaves), 1, net="dict")


@pytest.mark.parametrize(
    ("leaf", "shape"),
    [
        (Bounded(0, 255, (2, 24, 24, 3), torch.uint8), "(24, 24, 3)"),
        (Unbounded((2, 3, 20, 30)), "(3, 20, 30)"),
        (Bounded(0, 255, (2, 16, 16), torch.uint8), "(16, 16)"),
    ],
)
def test_a_picture_too_small_for_convolutions_is_flattened_with_a_word(leaf, shape) -> None:
    with pytest.warns(UserWarning, match=rf"'image' of shape {re.escape(shape)} is read as [\d,]+ numbers.* 36 pixels"):
        network(spec(image=leaf, state=VECTOR), ["image", "state"], 1, net="dict")


@pytest.mark.parametrize("leaf", [Unbounded((2, 7, 7)), Bounded(0, 9, (2, 7, 7, 3), torch.uint8), IMAGE, VECTOR])
def test_boards_and_vectors_are_no_pictures(leaf) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        network(spec(observation=leaf), ["observation"], 1)


@pytest.mark.parametrize("net", ["mlp", "auto"])
def test_a_refusal_says_what_to_type(net) -> None:
    leaves = {"a": VECTOR, "b": VECTOR} if net == "mlp" else {"a": Unbounded((2, 3), torch.complex64)}
    with refused(ConfigError, "env.wrappers=[{FilterObservation {filter_keys [...]}}"):
        network(spec(**leaves), list(leaves), 1, net=net)
