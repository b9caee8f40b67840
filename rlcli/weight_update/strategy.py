"""Choose which of a model's tensors are its weights, handed around as a TensorDict or a state_dict."""

from __future__ import annotations

from collections.abc import Mapping

from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from rlcli import arguments
from rlcli.weight_update.tensors import Source, matched, named_tensors, write

STRATEGIES = ("tensordict", "state_dict")


class WeightStrategy:
    """How weights are taken from a model and given to one.

    Parameters
    ----------
    extract_as : {"tensordict", "state_dict"}
        `tensordict`: all parameters and buffers. `state_dict`: those that a state_dict holds; a buffer that is not
        persistent stays what it is in each process.

    Raises
    ------
    ArgumentError
        Another word.
    """

    def __init__(self, extract_as: str = "tensordict") -> None:
        arguments.choice("strategy", extract_as, STRATEGIES)
        self.extract_as = extract_as

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """The weights themselves, by name; one that is shared is there once."""
        tensors = named_tensors(model)
        if self.extract_as == "state_dict":
            saved = model.state_dict().keys()
            return {name: tensor for name, tensor in tensors.items() if name in saved}
        return tensors

    def extract_weights(self, source: nn.Module) -> TensorDictBase | dict[str, Tensor]:
        """The weights in the strategy's form, without gradients, on the model's memory: nothing is copied."""
        tensors = {name: tensor.detach() for name, tensor in self.tensors(source).items()}
        return TensorDict(tensors).unflatten_keys(".") if self.extract_as == "tensordict" else tensors

    def apply_weights(self, destination: nn.Module, weights: Source) -> None:
        """Copy weights of either form, or a module's, into a model.

        Raises
        ------
        ArgumentError
            They do not fit it.
        """
        fitting: Mapping[str, Tensor] = matched(weights, destination)
        write({name: fitting[name] for name in self.tensors(destination) if name in fitting}, destination)
