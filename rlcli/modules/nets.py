"""Networks of tensors: fully connected layers, and before them what encodes the observations of an env.

With the activations that configs name, and initial weights: orthogonal layers, and a seed that touches nobody else's
random numbers; and contexts in which they run on one thread, or leave no trace in what they hold.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlcli import arguments
from rlcli.arguments import nearest, refuse
from rlcli.errors import ArgumentError, ConfigError, in_words
from rlcli.keys import Key, show, unravel
from rlcli.specs import Binary, Bounded, Composite, OneHot, Unbounded

if TYPE_CHECKING:
    from rlcli.modules.encoders import DictNet, Encoder

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "leaky_relu": nn.LeakyReLU,
    "sigmoid": nn.Sigmoid,
}


def activation_class(name: str | Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The module class of an activation name; a class, or a function that makes a module, is passed through."""
    makes = issubclass(name, nn.Module) if isinstance(name, type) else callable(name)
    if makes and not isinstance(name, nn.Module):
        return name  # type: ignore[return-value]
    if not isinstance(name, str):
        raise ConfigError(
            "an activation is a name or a class of modules", where="policy.activation", why=f"got {name!r}",
            fix='Use "tanh", nn.Tanh, or lambda: nn.LeakyReLU(0.2).',
        )  # fmt: skip
    return ACTIVATIONS[arguments.choice("activation", name, ACTIVATIONS, ConfigError)]


_activation = activation_class  # an argument of `MLP` has its name


HIDDEN_GAIN = math.sqrt(2.0)


def orthogonal_(module: nn.Module, gain: float = HIDDEN_GAIN) -> nn.Module:
    """Orthogonal weights and zero biases in every linear and convolutional layer, in place."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            nn.init.orthogonal_(layer.weight, gain)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return module


@contextmanager
def seeded(source: int | torch.Generator | None) -> Iterator[None]:
    """Run a block whose random numbers (torch's global generators, of the CPU and this GPU) follow from `source` alone.

    The global generators are left as they were found; a generator given as `source` moves on by one draw. With
    None the block draws from the global generators as usual.
    """
    if source is None or torch.compiler.is_compiling():
        yield
        return
    if isinstance(source, torch.Generator):
        source = int(torch.randint(2**62, (), generator=source, device=source.device))
    on_gpu = torch.cuda.is_initialized()
    with torch.random.fork_rng([torch.cuda.current_device()] if on_gpu else []):
        torch.default_generator.manual_seed(source)  # not torch.manual_seed, which would reseed every GPU too
        if on_gpu:
            torch.cuda.manual_seed(source)
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: small products are faster so, and their bits do not depend on the machine."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def evaluation_mode(policy: Any) -> Iterator[None]:
    """Put a policy in eval mode; restore its flags, buffers and extra state afterwards."""
    modules = list(policy.modules()) if isinstance(policy, nn.Module) else []
    flags = [(module, module.training) for module in modules]
    buffers = [(m._buffers, name, x, x.clone()) for m in modules for name, x in m._buffers.items() if x is not None]
    extras = [(m, copy.deepcopy(m.get_extra_state())) for m in modules if _has_extra_state(m)]
    try:
        if modules:
            policy.eval()
        yield
    finally:
        for module, flag in flags:
            module.training = flag
        with torch.no_grad():
            for table, name, x, before in buffers:
                table[name] = x.copy_(before)
        for module, state in extras:
            module.set_extra_state(state)


def _has_extra_state(module: nn.Module) -> bool:
    both = ("get_extra_state", "set_extra_state")
    return all(getattr(type(module), name) is not getattr(nn.Module, name) for name in both)


class MLP(nn.Sequential):
    """Linear layers with an activation after each but the last.

    Parameters
    ----------
    in_features : int
    out_features : int or None
        None leaves the last layer out: a trunk that ends in an activation, whose width is `.out_features`.
    hidden : sequence of int
        Units of each hidden layer; empty for a single linear layer.
    activation : str or callable
        One of `rlcli.modules.ACTIVATIONS`, a module class, or a function that makes a module.
    num_cells, depth : optional
        Upstream's spelling of `hidden`: a sequence of units, or `depth` layers of `num_cells` (32) units each.
    activation_class : callable, optional
        Upstream's name of `activation`.
    orthogonal : bool
        Orthogonal weights and zero biases (Saxe et al. 2014) instead of torch's default.
    gain : float
        Gain of the hidden layers when orthogonal.
    last_gain : float
        Gain of the last layer when orthogonal: 0.01 for a policy (near-uniform first actions), 1 for a value.

    Notes
    -----
    Input `[*B, in_features]` float32, output `[*B, out_features]`. Without any of `hidden`, `num_cells` and `depth`
    there are two hidden layers of 64 units; upstream has none then.
    """

    fast = True

    def __init__(
        self,
        in_features: int | None = None,
        out_features: int | None = None,
        hidden: Sequence[int] | None = None,
        activation: str | Callable[[], nn.Module] | None = None,
        *,
        num_cells: Sequence[int] | int | None = None,
        depth: int | None = None,
        activation_class: Callable[[], nn.Module] | None = None,
        orthogonal: bool = False,
        gain: float = HIDDEN_GAIN,
        last_gain: float = 1.0,
    ) -> None:
        if num_cells is not None or depth is not None:
            hidden = _other_spelling(hidden, num_cells, depth)
        else:
            hidden = (64, 64) if hidden is None else _units("hidden", hidden)
        if activation is not None and activation_class is not None:
            raise ArgumentError("activation_class is another name of activation", fix="Give one of them")
        given = activation_class if activation is None else activation
        make = _activation("tanh" if given is None else given)
        sizes: list[Any] = [in_features, *hidden, *([] if out_features is None else [out_features])]
        refuse(not all(isinstance(size, Integral) for size in sizes), "the sizes of a network are whole numbers",
               why=f"they are {sizes}",
               fix="Say in_features, which is not found out later, and one number as out_features.")  # fmt: skip
        refuse(min(sizes) < 1, "a layer needs at least one unit", why=f"the sizes are {sizes}")
        layers: list[nn.Module] = []
        for a, b in zip(sizes[: len(hidden)], hidden, strict=True):
            layers.append(nn.Linear(a, b))
            try:
                layers.append(make())
            except TypeError as error:
                raise ConfigError("an activation cannot be made", why=in_words(error), fix="Use nn.Tanh.") from error
            refuse(not isinstance(layers[-1], nn.Module), "an activation is a module",
                   why=f"got {type(layers[-1]).__name__}", fix="Use nn.Tanh.", error=ConfigError)  # fmt: skip
        if out_features is not None:
            layers.append(nn.Linear(sizes[-2], out_features))
        super().__init__(*layers)
        self.in_features, self.out_features = in_features, sizes[-1]
        if orthogonal:
            orthogonal_(self, gain)
            if out_features is not None:
                orthogonal_(self[-1], last_gain)


def _other_spelling(
    hidden: Sequence[int] | None, num_cells: Sequence[int] | int | None, depth: int | None
) -> Sequence[int]:
    """Return the units of hidden layers that are given as `num_cells` and `depth`."""
    refuse(hidden is not None, "num_cells and depth are another spelling of hidden", fix="Give one of them")
    if depth is not None and not (isinstance(depth, Integral) and depth >= 0):
        raise ArgumentError("depth is a whole number of layers", why=f"got {depth!r}")
    if num_cells is not None and not isinstance(num_cells, int | Integral):
        units = _units("num_cells", num_cells)
        if depth is not None and depth != len(units):
            raise ArgumentError(f"depth={depth} and num_cells differ", why=f"num_cells has {len(units)} layers")
        return units
    if depth is None:
        raise ArgumentError(f"num_cells={num_cells} does not say how many layers", fix="Give depth as well.")
    return [32 if num_cells is None else int(num_cells)] * depth


def _units(name: str, given: Iterable[int]) -> list[int]:
    """Convert whole numbers of any kind, numpy's too."""
    try:
        return [operator.index(units) for units in given]
    except TypeError as error:
        fix = f"Use [{given}]." if isinstance(given, Integral) else "Use [64, 64]."
        raise ArgumentError(f"{name} is a sequence of units, one a layer", why=f"got {given!r}", fix=fix) from error


NETS = ("auto", "mlp", "cnn", "dict")


def observation_keys(spec: Composite, wanted: Sequence[Key] | None = None, mask: Key | None = None) -> list[Key]:
    """The keys a policy reads: those wanted, or all but the action mask and the counters that transforms add.

    Raises
    ------
    ConfigError
        When a wanted key is not in the spec, or nothing is left to read.
    """
    shown = spec.keys(True, True)
    for key in wanted or ():
        if key not in spec:
            raise ConfigError(
                f"there is no observation '{show(key)}'", where="policy in_keys",
                why=f"the env has {', '.join(map(show, shown)) or 'none'}",
                fix=nearest(show(key), map(show, shown)),
            )  # fmt: skip
    others = [key for key in shown if not spec[key].counter and (mask is None or unravel(key) != unravel(mask))]
    keys = list(wanted) if wanted else others
    if not keys:
        shows = "it shows an action mask and nothing else" if mask is not None else None
        raise ConfigError("the env has no observation for a policy to read", where="observation spec", why=shows)
    return keys


def network(
    spec: Composite,
    keys: Sequence[Key],
    out_features: int | None,
    *,
    net: str = "auto",
    hidden: Sequence[int] | None = None,
    activation: str | type[nn.Module] | None = None,
    orthogonal: bool = True,
    last_gain: float = 1.0,
) -> MLP | DictNet:
    """A network from the observations under `keys` to `out_features` numbers (None: the last hidden layer).

    Parameters as in `build_actor_critic`. One observation gives an `MLP`, whose first layer is the encoder if
    one is needed. A float32 vector needs none: then the layers are all torch's own.
    """
    front = front_of(spec, keys, net)
    sees = front is not None and front.convolves
    if hidden is None:
        hidden = (512,) if sees else (64, 64)
    activation = activation or ("relu" if sees else "tanh")
    width = spec[keys[0]].shape[-1] if front is None else front.out_features
    mlp = MLP(width, out_features, hidden, activation, orthogonal=orthogonal, last_gain=last_gain)
    if front is None:
        return mlp
    if orthogonal:
        orthogonal_(front)
    return front.before(mlp)  # type: ignore[return-value]


def front_of(spec: Composite, keys: Sequence[Key], net: str) -> Encoder | None:
    """Return what encodes the observations for the layers; None for a float32 vector."""
    arguments.choice("network", net, NETS, ConfigError)
    if net in ("mlp", "cnn") and len(keys) > 1:
        raise ConfigError(
            f"policy={net} reads one observation", why=f"the env has {', '.join(map(show, keys))}",
            fix="Use policy=dict to read all of them, or leave the others out with "
            "env.wrappers=[{FilterObservation: {filter_keys: [...]}}] (in Python: in_keys=[...]).",
        )  # fmt: skip
    leaf = spec[keys[0]]
    vector = len(leaf.shape) == len(spec.shape) + 1 and leaf.shape[-1] and leaf.dtype is torch.float32
    if len(keys) == 1 and net != "cnn" and vector and isinstance(leaf, Bounded | Unbounded | Binary | OneHot):
        return None
    from rlcli.modules.encoders import encoder_of

    return encoder_of({key: spec[key] for key in keys}, len(spec.shape), net)
