"""Values in units of their own spread: a critic learns numbers near 1 whatever the size of the rewards.

The network's output is `(V - mean) / deviation`. The estimator reads it back in units of the reward, runs its recursion
there, and hands out targets in the network's units; advantages stay in units of the reward.
"""

from __future__ import annotations

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from rlcli.errors import ArgumentError
from rlcli.keys import STATE_VALUE
from rlcli.modules.stages import last_layer
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

    def __init__(self, decay: float = 0.995) -> None:
        super().__init__()
        if not 0 < decay <= 1:
            raise ArgumentError("decay must be above 0 and at most 1", why=f"got {decay}")
        self.decay = decay
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

    def updated(self, value: Tensor, restored: Tensor) -> Tensor:
        """What the network writes after an update where it wrote `value`, in units of the reward `restored`, before."""
        return value

    @torch.no_grad()
    def update(self, target: Tensor, mask: Tensor | None = None) -> None:
        """Count the targets ``[*B, F]`` of a batch, those that a mask of their shape lets through."""
        target = target.double()
        kept = 1.0 if self.decay == 1 else self.decay
        share = 1.0 if self.decay == 1 else 1 - self.decay
        for total, x in ((self.mean, target), (self.square, target**2)):
            total.mul_(kept).add_(share * reduce(x, mask))
        self.weight.mul_(kept).add_(share)


class PopArt(ValueNorm):
    """`ValueNorm` that rescales the network's last layer at every update, so that its values stay what they were.

    van Hasselt et al., 2016, arXiv:1602.07714, eq. 9.

    Parameters
    ----------
    network : nn.Module
        An `nn.Linear` writes its value, and its structure says which: the last one of an `nn.Sequential`, say.
    decay : float
    layer : nn.Linear, optional
        The one that writes the value, where the network's structure does not say.
    """

    def __init__(self, network: nn.Module, decay: float = 0.995, *, layer: nn.Linear | None = None) -> None:
        super().__init__(decay)
        if not isinstance(network, nn.Module):
            raise ArgumentError("PopArt needs a value network", why=f"got {type(network).__name__}")
        if layer is None:
            key = value_key(network) if isinstance(network, TensorDictModuleBase) else STATE_VALUE
            layer = last_layer(network, key)
        if layer is None:
            raise ArgumentError(
                "PopArt rescales the last linear layer of the value network",
                why=f"nothing in {type(network).__name__} says that one writes the value",
                fix="End the network with an nn.Linear in an nn.Sequential, give layer=..., or use ValueNorm.",
            )
        if not any(layer is part for part in network.modules()):
            raise ArgumentError("the layer that PopArt is given is none of the network's", why=f"got {layer}")
        if layer.bias is None:
            raise ArgumentError("PopArt moves the bias of the value network's last layer", why="it has none")
        object.__setattr__(self, "layer", layer)  # not a child: its parameters are the network's

    def updated(self, value: Tensor, restored: Tensor) -> Tensor:
        return self.normalise(restored)

    @torch.no_grad()
    def update(self, target: Tensor, mask: Tensor | None = None) -> None:
        old_mean, old_deviation = self.moments()
        super().update(target, mask)
        mean, deviation = self.moments()
        layer: nn.Linear = self.layer  # type: ignore[assignment]
        dtype = layer.weight.dtype
        layer.weight.mul_((old_deviation / deviation).to(dtype))
        layer.bias.mul_(old_deviation.to(dtype)).add_((old_mean - mean).to(dtype)).div_(deviation.to(dtype))
