"""A step of recurrent layers on rows: the bits of the modules' own step, whatever the sizes."""

import pytest
import torch

from rlcli.kernels.cells import on_rows
from rlcli.modules import GRUModule, LSTMModule


def stepped(module, source, first, steps, *, pair=False, features=None):
    """`steps` steps on rows of columns `[N, T+1, L, H]`, or on a pair of rows used in turn; all states."""
    columns = [torch.full((len(x), steps + 1, *x.shape[1:]), torch.nan) for x in first]
    rows = [[column[:, t % 2 if pair else t] for t in range(steps + 1)] for column in columns]
    for one, x in zip(rows, first, strict=True):
        one[0].copy_(x)
    run = on_rows(module.weights(), source, [r[:-1] for r in rows], [r[1:] for r in rows], features)
    found = []
    for t in range(steps):
        run(t)
        found.append([r[t + 1].clone() for r in rows])
    return found


@pytest.mark.parametrize("pair", [False, True], ids=["stored", "scratch"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("kind", [GRUModule, LSTMModule])
@torch.no_grad()
@pytest.mark.every(3)
def test_a_step_on_rows_has_the_modules_bits(kind, layers, bias, pair):
    torch.manual_seed(layers)
    for n in (1, 3, 8):
        for inputs, units in ((4, 1), (1, 5), (7, 16), (64, 33), (3, 47), (64, 64), (5, 96)):
            module = kind(inputs, units, layers, bias=bias, in_key="x", out_key="y")
            first = [torch.randn(n, layers, units) for _ in module.state_keys]
            source = list(3 * torch.randn(6, n, inputs))
            features = list(torch.empty(6, n, units))
            found = stepped(module, source, first, 6, pair=pair, features=features)
            states = first
            for t, x in enumerate(source):
                out, *states = module.on_tensors(x.clone(), *states, None)  # as it is shown a row
                assert all(torch.equal(a, b) for a, b in zip(found[t], states, strict=True)), (n, inputs, units, t)
                assert torch.equal(features[t], out)


@pytest.mark.parametrize("kind", [GRUModule, LSTMModule])
@torch.no_grad()
def test_weights_that_change_in_place_are_followed(kind):
    module = kind(3, 8, 2, in_key="x", out_key="y")
    first = [torch.zeros(2, 2, 8) for _ in module.state_keys]
    columns = [torch.stack([x, x], 1) for x in first]
    x = torch.ones(2, 3)
    run = on_rows(module.weights(), [x], [[c[:, 0]] for c in columns], [[c[:, 1]] for c in columns])
    for factor in (1.0, 2.0, -0.5):
        for weight in module.parameters():
            weight.mul_(factor)
        run(0)
        assert torch.equal(columns[0][:, 1], module.on_tensors(x, *first, None)[1])
