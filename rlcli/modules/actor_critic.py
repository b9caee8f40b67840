"""An actor and a critic as one module: each shared weight is counted, trained and saved once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tensordict.nn import TensorDictModuleBase
from torch import nn


class ActorCritic(nn.Module):
    """What a policy-gradient job trains. Unpacks: `actor, critic = build_actor_critic(...)`.

    Parameters
    ----------
    actor : TensorDictModuleBase
        Observations to action.
    critic : TensorDictModuleBase
        Observations to `state_value`.

    Notes
    -----
    `parameters()` yields a shared trunk once, as torch does. `state_dict()` does too (torch's would hold it
    twice, which safetensors refuses): shared tensors are under the actor's name only, and `load_state_dict`
    knows.
    """

    def __init__(self, actor: TensorDictModuleBase, critic: TensorDictModuleBase) -> None:
        super().__init__()
        self.actor, self.critic = actor, critic
        self.register_state_dict_post_hook(_drop_repeats)
        self.register_load_state_dict_pre_hook(_restore_repeats)

    def __iter__(self) -> Iterator[TensorDictModuleBase]:
        return iter((self.actor, self.critic))

    @property
    def shared(self) -> bool:
        """Whether actor and critic have weights in common."""
        return bool(self._repeats())

    def _repeats(self) -> dict[str, str]:
        """Names of tensors that repeat an earlier one, and that one's name."""
        first: dict[int, str] = {}
        repeats = {}
        tensors = [
            *self.named_parameters(remove_duplicate=False),
            *self.named_buffers(remove_duplicate=False),
        ]
        for name, tensor in tensors:
            if id(tensor) in first:
                repeats[name] = first[id(tensor)]
            else:
                first[id(tensor)] = name
        return repeats


def _drop_repeats(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    assert isinstance(module, ActorCritic)
    for name in module._repeats():
        state.pop(prefix + name, None)


def _restore_repeats(module: nn.Module, state: dict[str, Any], prefix: str, *ignored: Any) -> None:
    assert isinstance(module, ActorCritic)
    for name, original in module._repeats().items():
        if prefix + original in state:
            state.setdefault(prefix + name, state[prefix + original])
