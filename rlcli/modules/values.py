"""Values of discrete actions: networks of them, the greedy action among them, and epsilon-greedy exploration.

`observation -> net -> action_value [*B, n] -> argmax -> action, chosen_action_value [*B, 1]`, then `EGreedyModule`. A
`StateActionMLP` values one continuous action instead, and `LogScaleExtractor` is the head of what draws it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn

from rlcli import arguments
from rlcli.arguments import refuse
from rlcli.errors import ArgumentError, MissingKeyError, in_words
from rlcli.keys import ACTION, ACTION_VALUE, CHOSEN_ACTION_VALUE, OBSERVATION, Key, show, unravel
from rlcli.modules.distributions.family import ArrayParams, Family, Params
from rlcli.modules.exploration import ExplorationType, exploration_type
from rlcli.modules.masks import LOWEST, LogitMask, allowed, pick
from rlcli.modules.nets import MLP
from rlcli.specs import Categorical, Composite, OneHot, TensorSpec


class DuelingHead(nn.Module):
    """`Q = V + A - mean(A)`, from features that both share.

    Parameters
    ----------
    trunk : nn.Module
        Observations to features `[*B, F]`.
    features, actions : int
    """

    def __init__(self, trunk: nn.Module, features: int, actions: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.value, self.advantage = MLP(features, 1, ()), MLP(features, actions, ())

    def forward(self, *observations: Tensor) -> Tensor:
        features = self.trunk(*observations)
        advantage = self.advantage(features)
        return self.value(features) + advantage - advantage.mean(-1, keepdim=True)


class StateActionMLP(nn.Module):
    """`forward(*observations, action)` gives `[*B, 1]`: everything flattened to vectors, joined, then an `MLP`.

    Parameters
    ----------
    in_features : int
        Of all inputs together.
    hidden, activation, orthogonal
        See `MLP`.
    """

    fast = True

    def __init__(
        self,
        in_features: int,
        hidden: Sequence[int] = (256, 256),
        activation: str | Callable[[], nn.Module] = "relu",
        orthogonal: bool = False,
    ) -> None:
        super().__init__()
        self.mlp = MLP(in_features, 1, hidden, activation, orthogonal=orthogonal)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.mlp(torch.cat([x.to(torch.float32) for x in inputs], -1))


class LogScaleExtractor(nn.Module):
    """Splits `[*B, 2 d]` into `loc` and `scale = exp(log_scale)`, the logarithm kept within bounds.

    The head of soft actor-critic; its usual bounds let the deviation fall to nothing and rise to e^2.

    Parameters
    ----------
    low, high : float
        Of the logarithm.
    """

    fast = True

    def __init__(self, low: float = -20.0, high: float = 2.0) -> None:
        super().__init__()
        self.low, self.high = low, high

    def forward(self, both: Tensor) -> tuple[Tensor, Tensor]:
        loc, log_scale = both.chunk(2, -1)
        return loc, log_scale.clamp(self.low, self.high).exp()


ACTION_SPACES = ("categorical", "one_hot")


def action_space_of(action_space: str | None, spec: TensorSpec | None, key: Key = ACTION) -> str:
    """Return how a discrete action is spelled: an index ("categorical") or a one-hot vector ("one_hot")."""
    asked = None if action_space is None else action_space.replace("-", "_")
    leaf = spec[key] if isinstance(spec, Composite) and key in spec else spec
    space = {Categorical: "categorical", OneHot: "one_hot"}.get(type(leaf))  # type: ignore[arg-type]
    if leaf is not None and space is None:
        raise ArgumentError(
            "values of actions need one discrete action", where=f"action '{show(key)}'", why=f"its spec is {leaf!r}",
            fix="Use loss=sac for continuous actions.",
        )  # fmt: skip
    if asked is not None:
        arguments.choice("action_space", asked, ACTION_SPACES)
    if asked is None and space is None:
        raise ArgumentError("the action space is not known", fix="Give spec=env.action_spec, or action_space='one_hot'")
    if asked is not None and space is not None and asked != space:
        raise ArgumentError(f"action_space={action_space!r} is not what the spec says", why=f"the spec is {space}")
    return asked or space  # type: ignore[return-value]


def greedy(values: Tensor, action_space: str) -> Tensor:
    """Return the best action of `values [*B, n]`, as an index `[*B]` or one-hot `[*B, n]`; of equals the first."""
    index = values.argmax(-1)
    return index if action_space == "categorical" else nn.functional.one_hot(index, values.shape[-1])


def chosen(values: Tensor, action: Tensor, action_space: str) -> Tensor:
    """Return the entry `[*B]` of `values [*B, n]` that an action selects: an index `[*B]` or `[*B, 1]`, or one-hot."""
    if action_space == "one_hot":  # looked up: values of other actions may be -inf
        action = (action.byte() if action.dtype == torch.bool else action).argmax(-1)
    index = action if action.ndim == values.ndim else action.unsqueeze(-1)
    try:
        if index.shape != (*values.shape[:-1], 1):
            raise IndexError("there is not one action for each row of values")
        return values.gather(-1, index.long()).squeeze(-1)
    except (RuntimeError, IndexError) as error:
        raise ArgumentError(
            "actions do not fit the values that they choose among",
            why=f"values {tuple(values.shape)}, actions {tuple(action.shape)}: {in_words(error)}",
            fix="Compare with the actions that the network was made for.",
        ) from error


class QValueModule(TensorDictModuleBase):
    """The greedy action among the values of all actions.

    Parameters
    ----------
    action_space : {"categorical", "one_hot"}, optional
    action_value_key : key
        Where the values `[*B, n]` are.
    action_mask_key : key, optional
        Flags `[*B, n]`; actions that are False are never chosen, and get the lowest value there is.
    out_keys : sequence of keys, optional
        By default `action`, `action_value`, `chosen_action_value`.
    spec : TensorSpec, optional
        Of the action, in place of `action_space`; kept as `.spec`.
    """

    fast = True
    role = "chooses"  # see `stages.take_apart`
    settings = ("action_value_key", "action_mask_key", "action_space")

    def __init__(
        self,
        action_space: str | None = None,
        action_value_key: Key | None = None,
        action_mask_key: Key | None = None,
        out_keys: Sequence[Key] | None = None,
        *,
        spec: TensorSpec | None = None,
    ) -> None:
        super().__init__()
        self.action_value_key = ACTION_VALUE if action_value_key is None else unravel(action_value_key)
        self.action_mask_key = action_mask_key
        self.mask = LogitMask((), fill=LOWEST)
        self.in_keys = [self.action_value_key] + ([] if action_mask_key is None else [action_mask_key])
        self.out_keys = list(out_keys or (ACTION, self.action_value_key, CHOSEN_ACTION_VALUE))
        refuse(len(self.out_keys) != 3 or unravel(self.out_keys[1]) != self.action_value_key,
               "out_keys are those of the action, of its values and of the chosen value",
               why=f"got {self.out_keys}, with values at {show(self.action_value_key)}")  # fmt: skip
        self.action_space, self.spec = action_space_of(action_space, spec, unravel(self.out_keys[0])), spec

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write action and chosen value beside the values."""
        values = td.get(self.action_value_key, None)
        if values is None:
            raise MissingKeyError(f"there are no action values at {show(self.action_value_key)}", where="QValueModule")
        if self.action_mask_key is not None:
            mask = td.get(self.action_mask_key, None)
            if mask is None:
                raise MissingKeyError(f"there is no action mask at {show(self.action_mask_key)}", where="QValueModule")
            values = self.mask(values, mask)
        action = greedy(values, self.action_space)
        td.set(self.out_keys[0], action)
        td.set(self.out_keys[1], values)
        return td.set(self.out_keys[2], chosen(values, action, self.action_space).unsqueeze(-1))


class QValueActor(TensorDictSequential):
    """A network of action values that acts greedily.

    Parameters
    ----------
    module : nn.Module or TensorDictModuleBase
        A plain one maps the tensors at `in_keys` to values `[*B, n]`; a tensordict module writes them itself.
    in_keys : sequence of keys
        What a plain module reads; default `["observation"]`.
    spec, action_space, action_value_key, action_mask_key
        See `QValueModule`.
    """

    fast = True

    def __init__(
        self,
        module: nn.Module,
        *,
        in_keys: Sequence[Key] | None = None,
        spec: TensorSpec | None = None,
        action_space: str | None = None,
        action_value_key: Key | None = None,
        action_mask_key: Key | None = None,
    ) -> None:
        key = ACTION_VALUE if action_value_key is None else unravel(action_value_key)
        if not isinstance(module, TensorDictModuleBase):
            module = TensorDictModule(module, [OBSERVATION] if in_keys is None else list(in_keys), [key])
        elif key not in map(unravel, module.out_keys):
            raise ArgumentError(
                "the network does not write the values of actions",
                why=f"it writes {', '.join(map(show, module.out_keys))}, wanted is {show(key)}",
            )
        choice = QValueModule(action_space, key, action_mask_key, spec=spec)
        super().__init__(module, choice)
        self.spec, self.action_space = spec, choice.action_space


class EGreedyModule(TensorDictModuleBase):
    """Replaces actions by uniform ones with probability `eps`, where actions are drawn (`ExplorationType.RANDOM`).

    Put it behind the actor: `TensorDictSequential(QValueActor(...), EGreedyModule(spec))`.

    Parameters
    ----------
    spec : TensorSpec
        Of the action: categorical or one-hot.
    eps_init, eps_end : float
        Epsilon at the start and after `annealing_num_steps` frames; a straight line between.
    annealing_num_steps : int
        Counted by `step(frames)`, which the training loop calls.
    action_key : key
    action_mask_key : key, optional
        Flags `[*B, n]`; actions that are False are never drawn.

    Attributes
    ----------
    eps : Tensor `[]`
        The present epsilon: a buffer, so a checkpoint of the policy holds it.
    """

    fast = True
    role = "explores"
    settings = ("action_key", "action_mask_key", "n")
    eps: Tensor
    frames: Tensor

    def __init__(
        self,
        spec: TensorSpec,
        eps_init: float = 1.0,
        eps_end: float = 0.1,
        annealing_num_steps: int = 1000,
        *,
        action_key: Key = ACTION,
        action_mask_key: Key | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= eps_end <= eps_init <= 1:
            raise ArgumentError("epsilon falls within [0, 1]", why=f"got eps_init={eps_init}, eps_end={eps_end}")
        self.action_key, self.action_mask_key = unravel(action_key), action_mask_key
        self.in_keys = [action_key] + ([] if action_mask_key is None else [action_mask_key])
        self.out_keys = [action_key]
        leaf = spec[self.action_key] if isinstance(spec, Composite) else spec
        self.spec, self.action_space = spec, action_space_of(None, leaf, self.action_key)
        self.n = int(leaf.n)  # type: ignore[union-attr]
        self.eps_init, self.eps_end = float(eps_init), float(eps_end)
        self.annealing_num_steps = arguments.count("annealing_num_steps", annealing_num_steps)
        self.register_buffer("eps", torch.tensor(float(eps_init), device=device))
        self.register_buffer("frames", torch.zeros((), dtype=torch.int64, device=device))

    def step(self, frames: int = 1) -> None:
        """So many more frames were collected."""
        self.frames += frames
        done = min(int(self.frames) / self.annealing_num_steps, 1.0)
        self.eps.fill_(self.eps_init + (self.eps_end - self.eps_init) * done)

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Draws from torch's global generator."""
        if exploration_type() not in (ExplorationType.RANDOM, None):
            return td
        action = td.get(self.action_key, None)
        if action is None:
            raise MissingKeyError(f"there is no action at {show(self.action_key)}", where="EGreedyModule")
        rows = action.shape if self.action_space == "categorical" else action.shape[:-1]
        explore = torch.rand(rows, device=action.device) < self.eps.to(action.device)
        if self.action_mask_key is None:
            drawn = torch.randint(self.n, rows, device=action.device)
        else:
            legal = allowed(td.get(self.action_mask_key).reshape(-1, self.n), (self.n,)).float()
            drawn = torch.multinomial(legal, 1).reshape(rows)
        if self.action_space == "one_hot":
            drawn, explore = torch.nn.functional.one_hot(drawn, self.n), explore.unsqueeze(-1)
        return td.set(self.action_key, torch.where(explore, drawn.to(action.dtype), action))


class EGreedyFamily(Family):
    """Explore among values `[*B, k]`; actions int64 `[*B]`."""

    param_names = ("action_value",)
    event_dims = 0

    def __init__(self, eps: Callable[[], float] | None = None, n: int | None = None, *, masked: bool = False) -> None:
        self.explores = eps is not None
        self.eps = eps or (lambda: 0.0)  # asked once a batch, and where weights change within one
        self.n, self.masked = n, masked  # `n` actions; of a masked one the value is the dtype's lowest

    def _none_of_it(self, *_: Any) -> Any:
        raise ArgumentError(
            "an epsilon-greedy action has no log-probability, entropy or mean here",
            fix="Use a ProbabilisticActor, or ExplorationType.MODE.",
        )

    log_prob = entropy = mean = _none_of_it  # type: ignore[assignment]

    def mode(self, params: Params) -> Tensor:
        return params[0].argmax(-1)

    def sample(self, params: Params, generator: torch.Generator | None = None) -> Tensor:
        best = self.mode(params)
        explore = torch.rand(best.shape, generator=generator, device=best.device) < self.eps()
        if self.masked:
            legal = (params[0] > LOWEST).float().flatten(0, -2)
            drawn = torch.multinomial(legal, 1, generator=generator).reshape(best.shape)
        else:
            drawn = torch.randint(self.n or params[0].shape[-1], best.shape, generator=generator, device=best.device)
        return torch.where(explore, drawn, best)

    def noise(self, rng: np.random.Generator, t: int, n: int, k: int) -> np.ndarray:
        """Return uniform numbers `[t, n, 2]`: whether to explore, and with which action."""
        return rng.random((t, n, 2))

    def settled(self, noise: np.ndarray, k: int) -> np.ndarray:
        """Return `[t, n]` exploring actions, -1 for the greedy one; with masks, numbers in [0, 1)."""
        if self.masked:
            return np.where(noise[..., 0] < self.eps(), noise[..., 1], -1.0)
        return np.where(noise[..., 0] < self.eps(), (noise[..., 1] * (self.n or k)).astype(np.int64), -1)

    def options(self, k: int) -> tuple[int, ...]:
        return (max(k, self.n or k),)

    def is_legal(self, params: ArrayParams) -> bool:
        """Say whether each row has a finite value; other actions may have -inf."""
        return bool(np.isfinite(params[0].max(-1)).all())  # NaN is its own max

    def draw(self, params: Params, noise: Tensor) -> Tensor:
        if self.masked:
            return torch.from_numpy(self.draw_rows((params[0].numpy(),), noise.numpy()))
        return torch.where(noise >= 0, noise, params[0].argmax(-1))

    def draw_rows(self, params: ArrayParams, noise: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        out = params[0].argmax(1, out)
        if not self.masked:
            np.copyto(out, noise, where=noise >= 0)
        elif (rows := np.flatnonzero(noise >= 0)).size:
            values = params[0][rows]
            out[rows] = pick(values > LOWEST, values.shape[1:], noise[rows, None])[0][:, 0]
        return out

    def mode_rows(self, params: ArrayParams, out: np.ndarray | None = None) -> np.ndarray:
        return params[0].argmax(1, out)
