"""Values in units of their own spread: a critic learns numbers near 1 whatever the size of the rewards.

The network's output is `(V - mean) / deviation`. The estimator reads it back in units of the reward, runs its recursion
there, and hands out targets in the network's units; advantages stay in units of the reward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from rlcli.arguments import refuse
from rlcli.errors import ArgumentError
from rlcli.imports import COMPILER
from rlcli.keys import STATE_VALUE, Key, unravel
from rlcli.modules.encoders import DictNet
from rlcli.modules.nets import evaluation_mode
from rlcli.modules.stages import leaves_of
from rlcli.modules.watch import ModuleWatch, plain
from rlcli.objectives.networks import value_key
from rlcli.objectives.reduction import reduce

FLOOR = 1e-4  # of the deviation


class ValueNorm(nn.Module):
    """Running mean and deviation of value targets.

    Parameters
    ----------
    decay : float
        What older batches count after each new one, corrected for the first ones; 1 counts all batches alike.

    Attributes
    ----------
    mean, square, weight : Tensor
        Sums with decay: of targets, of their squares, and of what they are to be divided by.
    """

    mean: Tensor
    square: Tensor
    weight: Tensor
    rescales: ClassVar[bool] = False  # the network

    def __init__(self, decay: float = 0.995) -> None:
        super().__init__()
        refuse(not 0 < decay <= 1, "decay must be above 0 and at most 1", why=f"got {decay}")
        self.decay = decay
        self.across: Callable[[Tensor, Tensor | int], Tensor] | None = None  # means, rows -> means of all ranks' rows
        for name in ("mean", "square", "weight"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation; 0 and 1 before the first batch."""
        some = self.weight.clamp_min(1e-12)
        mean = self.mean / some
        deviation = (self.square / some - mean**2).clamp_min(0).sqrt().clamp_min(FLOOR)
        return torch.where(self.weight > 0, mean, 0.0), torch.where(self.weight > 0, deviation, 1.0)

    def restore(self, x: Tensor) -> Tensor:
        """Numbers of the network in units of the reward."""
        mean, deviation = self.moments()
        return x * deviation.to(x.dtype) + mean.to(x.dtype)

    def normalise(self, x: Tensor) -> Tensor:
        """The other way."""
        mean, deviation = self.moments()
        return (x - mean.to(x.dtype)) / deviation.to(x.dtype)

    def calling(self) -> AbstractContextManager[None]:
        """Inside, the network is called whose values are to be restored."""
        return nullcontext()

    def updated(self, value: Tensor, restored: Tensor) -> Tensor:
        """What the network writes after an update where it wrote `value`, in units of the reward `restored`, before."""
        return value

    @torch.no_grad()
    def update(self, target: Tensor, mask: Tensor | None = None) -> None:
        """Count the targets ``[*B, F]`` of a batch, those that a mask of their shape lets through."""
        target = target.double()
        kept = 1.0 if self.decay == 1 else self.decay
        share = 1.0 if self.decay == 1 else 1 - self.decay
        means = torch.stack([reduce(x, mask) for x in (target, target**2)])
        if self.across is not None:
            means = self.across(means, target.numel() if mask is None else mask.sum())
        for total, x in zip((self.mean, self.square), means, strict=True):
            total.mul_(kept).add_(share * x)
        self.weight.mul_(kept).add_(share)


class PopArt(ValueNorm):
    """`ValueNorm` that rescales the network's last layer at every update, so that its values stay what they were.

    van Hasselt et al., 2016, arXiv:1602.07714, eq. 9.

    Parameters
    ----------
    network : nn.Module
        What it returns (or writes) is the output of one `nn.Linear`, perhaps reshaped.  Its structure says which,
        or else a trial in the first call of an estimator; both are asked again when a module of it was replaced.
    decay : float
    layer : nn.Linear, optional
        The one that writes the value, where neither can say.

    Raises
    ------
    ArgumentError
        No such layer: here, or when an estimator calls the network.
    """

    rescales = True

    def __init__(self, network: nn.Module, decay: float = 0.995, *, layer: nn.Linear | None = None) -> None:
        super().__init__(decay)
        refuse(not isinstance(network, nn.Module), "PopArt needs a value network", why=f"got {type(network).__name__}")
        if layer is not None and not isinstance(layer, nn.Linear):
            raise ArgumentError("the layer that PopArt is given is no nn.Linear", why=f"got {type(layer).__name__}")
        if layer is not None and "weight" not in layer._parameters:
            raise ArgumentError("the layer that PopArt is given computes its weight", fix="Give a plain nn.Linear.")
        if not any(isinstance(part, nn.Linear) for part in network.modules()):
            raise _unwritten(f"{type(network).__name__} has no nn.Linear")
        object.__setattr__(self, "network", network)  # not a child: its parameters are not this module's
        object.__setattr__(self, "_given", layer)
        self._key = value_key(network) if isinstance(network, TensorDictModuleBase) else STATE_VALUE
        self._layers = ModuleWatch(network, self._by_structure)

    @property
    def layer(self) -> nn.Linear | None:
        """The layer that is rescaled; None as long as only a call of the network can say which it is."""
        return next(iter(self._layers()), None)

    def _by_structure(self, network: nn.Module) -> list[nn.Linear]:
        """Return the layer, or an empty list that `calling` adds it to; a network that changed gets a new one."""
        layer: nn.Linear | None = self._given  # type: ignore[assignment]
        if layer is None:
            layer = _last_layer(network, self._key)
        elif not any(layer is part for part in network.modules()):
            raise ArgumentError(
                "the layer that PopArt is given is none of the network's", why=f"got {layer}",
                fix="Make a new PopArt if the layer was replaced.",
            )  # fmt: skip
        if layer is not None and layer.bias is None:
            raise ArgumentError("PopArt moves the bias of the value network's last layer", why="it has none")
        return [] if layer is None else [layer]

    @contextmanager
    def calling(self) -> Iterator[None]:
        layers = self._layers()
        if layers or torch.compiler.is_compiling():
            yield
            return
        network: nn.Module = self.network  # type: ignore[assignment]
        written: list[nn.Linear | None] = []

        def after_call(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], __: Any) -> None:
            hook.remove()
            written.append(self._by_trial(network, args, kwargs))

        hook = network.register_forward_hook(after_call, with_kwargs=True)
        try:
            with _as_written():
                yield
        finally:
            hook.remove()
        if not written:  # the batch brought its values
            return
        if (layer := written[0]) is None:
            raise _unwritten(f"no layer of {type(network).__name__} writes, as it is, what that returns")
        self._layers().append(layer)

    def _by_trial(self, network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Linear | None:
        """Return the layer with which a call's values change as its outputs do, which are doubled and moved."""

        def value() -> Tensor:
            out = network(*(x.copy() if isinstance(x, TensorDictBase) else x for x in args), **kwargs)
            return (out.get(self._key) if isinstance(out, TensorDictBase) else out).clone()

        with evaluation_mode(network), torch.no_grad():
            before = value()
            size = float(before.abs().max()) + 1
            for layer in network.modules():
                if not isinstance(layer, nn.Linear) or not plain(layer) or layer._modules or layer.bias is None:
                    continue
                kept = [(p, p.clone()) for p in (layer.weight, layer.bias)]
                try:
                    layer.weight.mul_(2)
                    layer.bias.mul_(2).add_(size)
                    off = (value() - (2 * before + size)).abs().max()
                finally:
                    for p, x in kept:
                        p.copy_(x)
                if bool(off <= 8 * torch.finfo(before.dtype).eps * size):
                    return layer
        return None

    def updated(self, value: Tensor, restored: Tensor) -> Tensor:
        return self.normalise(restored).to(value.dtype)

    @torch.no_grad()
    def update(self, target: Tensor, mask: Tensor | None = None) -> None:
        layer = self.layer
        if layer is None:
            raise _unwritten("the network was not called, and its structure does not say which layer it is")
        if layer.out_features != target.shape[-1]:
            why = f"{layer} does not write the {target.shape[-1]} of a target"
            raise ArgumentError("the layer that PopArt is given writes no value", why=why)
        old_mean, old_deviation = self.moments()
        super().update(target, mask)
        mean, deviation = self.moments()
        dtype = layer.weight.dtype
        layer.weight.mul_((old_deviation / deviation).to(dtype))
        layer.bias.mul_(old_deviation.to(dtype)).add_((old_mean - mean).to(dtype)).div_(deviation.to(dtype))


def _last_layer(net: nn.Module, key: Key) -> nn.Linear | None:
    """Return the linear layer that alone makes what `net` writes at `key`, or returns; None if unclear."""
    module: Any = net
    if isinstance(net, TensorDictModuleBase):
        written = [leaf for leaf in leaves_of(net) if leaf is None or key in map(unravel, leaf.out_keys)]
        single = written and written[-1] is not None and len(written[-1].out_keys) == 1
        module = written[-1].module if single else None
    while True:
        if plain(module, DictNet):
            module = module.mlp
        elif plain(module, nn.Sequential) and len(module):
            module = module[-1]
        else:
            break
    if not plain(module, nn.Linear):
        return None
    memory = [_memory(p) for part in net.modules() for p in part._parameters.values() if p is not None]
    uses = sum(part is module for _, part in net.named_modules(remove_duplicate=False))
    once = uses == 1 and all(memory.count(_memory(p)) == 1 for p in module.parameters())
    return module if once else None


def _memory(p: Tensor) -> int:
    """Return what parameters have in common that lie in the same memory, which other objects may name."""
    return id(p) if is_lazy(p) or p.is_meta else p.data_ptr()


def _as_written() -> AbstractContextManager[Any]:
    """Run compiled networks as they were written; where no compiler is loaded, none was."""
    return torch.compiler.set_stance("force_eager") if COMPILER in sys.modules else nullcontext()


def _unwritten(why: str) -> ArgumentError:
    return ArgumentError(
        "PopArt rescales the last linear layer of the value network", why=why,
        fix="Let the network return the output of an nn.Linear as it is, or use ValueNorm (value.normaliser=running).",
    )  # fmt: skip
