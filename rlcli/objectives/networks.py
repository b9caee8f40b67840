"""The networks of losses and estimators as functions of raw tensors, so that a minibatch loop makes no tensordict.

A network that can be taken apart (`rlcli.modules.stages`) does nothing but hand tensors from one inner module to the
next; then those are called directly, as long as nobody changes it. Any other is called as it is, on a tensordict made
for it. Recurrent ones run over sequences. `Lowered` is any network, `Density` the distribution of an actor's actions;
`alone` keeps parameters that a computation may use from learning by it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModuleBase
from torch import Tensor, nn

from rlcli.arguments import refuse
from rlcli.errors import ArgumentError, RlcliError, in_words
from rlcli.keys import ACTION_LOG_PROB, SAMPLE_LOG_PROB, STATE_VALUE, Key, show, unravel
from rlcli.modules import recurrent
from rlcli.modules.actor import Actor
from rlcli.modules.distributions.family import Family, Params
from rlcli.modules.stages import Stage, read_by, take_apart
from rlcli.modules.watch import ModuleWatch
from rlcli.transforms.primer import recurrent_parts

Columns = Mapping[Key, Tensor]
T = TypeVar("T")


def fitted(what: str, run: Callable[[], T], read: Callable[[], Columns]) -> T:
    """Return what `run` returns; where it fails on columns that do not fit the network, say so."""
    try:
        return run()
    except (torch.OutOfMemoryError, RlcliError):
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:  # what torch raises then
        raise ArgumentError(
            f"{what} cannot be evaluated on the batch",
            where=", ".join(f"{show(k)} {tuple(x.shape)} {x.dtype}" for k, x in read().items()), why=in_words(error),
            fix="Compare with the shapes, dtypes and numbers that it was made for.",
        ) from error  # fmt: skip


def over_sequences(network: nn.Module) -> AbstractContextManager[None]:
    """Run a network that remembers over sequences, in this context."""
    return recurrent.set_recurrent_mode(True) if recurrent_parts(network) else nullcontext()


def value_key(network: TensorDictModuleBase, wanted: Key = STATE_VALUE) -> Key:
    """Return where a value network writes: where wanted, or at `state_value`, or else at the last of its out_keys."""
    written = [unravel(key) for key in network.out_keys]
    return next((key for key in (wanted, STATE_VALUE) if key in written), written[-1])


class Lowered:
    """Call a tensordict module on columns `{key: Tensor [*B, ...]}`, or what of it stands before a last `without`."""

    def __init__(
        self,
        module: TensorDictModuleBase,
        name: str = "the value network",
        *,
        without: type | None = None,
    ) -> None:
        refuse(not hasattr(module, "in_keys"), "a network of a loss or estimator must work on tensordicts",
               why=f"{type(module).__name__} has no in_keys",
               fix='Wrap it: TensorDictModule(net, in_keys=["observation"], out_keys=["state_value"])')  # fmt: skip
        self.module, self.name, self._without = module, name, without or type(None)
        self._found = ModuleWatch(module, self._look)

    @property
    def in_keys(self) -> list[Key]:
        """Return what it reads, as it is now."""
        return self._found()[1]

    @property
    def out_keys(self) -> list[Key]:
        """Return what it writes, as it says now."""
        return [unravel(k) for k in self.module.out_keys]

    @property
    def stages(self) -> tuple[Stage, ...] | None:
        """Return the inner modules in order as they are now; None where it needs a tensordict."""
        return self._found()[0]

    def _look(self, module: TensorDictModuleBase) -> tuple[tuple[Stage, ...] | None, list[Key]]:
        """Return the stages of a network, and what it reads."""
        stages, head, _ = take_apart(module) or (None, None, None)
        stages = stages if head is None or isinstance(head, self._without) else None
        return stages, read_by(stages) if stages else [unravel(k) for k in module.in_keys]

    def __call__(self, columns: Columns, batch_dims: int = 1, skip: int = 0) -> dict[Key, Tensor]:
        """Return columns and outputs; the first `skip` stages' outputs are among the columns already."""
        return fitted(
            self.name,
            lambda: self._evaluate(columns, batch_dims, skip),
            lambda: {k: columns[k] for k in self.in_keys if k in columns},
        )

    def _evaluate(self, columns: Columns, batch_dims: int, skip: int) -> dict[Key, Tensor]:
        values, (stages, read) = dict(columns), self._found()
        if stages is None:
            first = next(iter(columns.values()))
            inputs: Any = {k: x for k, x in columns.items() if k in read}
            with over_sequences(self.module):
                out = self.module(TensorDict(inputs, batch_size=first.shape[:batch_dims]))
            values.update((k, out.get(k)) for k in self.out_keys)  # type: ignore[misc]
            return values
        for stage in stages[skip:]:
            stage.run(values)
        return values


def shared_stages(first: Sequence[Stage], second: Sequence[Stage]) -> int:
    """Count the stages both networks begin with; those that the first writes over later do not count."""
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    count = len(list(alike))
    while count and {k for x in first[:count] for k in x.out_keys} & {k for x in first[count:] for k in x.touched}:
        count -= 1
    return count


def alone(
    run: Callable[[dict[Key, Tensor]], Sequence[Tensor]],
    columns: Columns,
    learned: Iterable[Tensor],
    than: Iterable[Tensor],
) -> tuple[Tensor, ...]:
    """Compute `run` with a gradient for columns and `learned`, and none for `than`, however often."""
    if torch.compiler.is_compiling():
        with _frozen(than):
            return tuple(run({**columns}))
    wanted = {key: x for key, x in columns.items() if x.requires_grad}
    parameters = [x for x in learned if x.requires_grad]
    if not (wanted or parameters) or not torch.is_grad_enabled():
        with torch.no_grad():
            return tuple(run({**columns}))
    own = {key: x.detach().requires_grad_() for key, x in wanted.items()}
    inside = [*own.values(), *parameters]
    return _Alone.apply(lambda: run({**columns, **own}), inside, *wanted.values(), *parameters)


class _Alone(torch.autograd.Function):
    """Compute what `run` makes of the tensors `inside`, as a function of those that they stand for, `inputs`."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[[], Sequence[Tensor]], inside: list[Tensor], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            outputs = tuple(run())
        ctx.inside, ctx.outputs = inside, outputs
        ctx.save_for_backward(*inputs)
        return tuple(x.detach() for x in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        learned = [(x, g) for x, g in zip(ctx.outputs, grads, strict=True) if x.requires_grad]
        outputs, given = [x for x, _ in learned], [g for _, g in learned]
        if not outputs:
            return None, None, *(None for _ in ctx.inside)
        if not torch.is_grad_enabled():
            gradients = torch.autograd.grad(outputs, ctx.inside, given, retain_graph=True, allow_unused=True)
            return None, None, *gradients
        own = [g.detach().requires_grad_() for g in given]  # the gradient is a function of these as well
        again = partial(torch.autograd.grad, outputs, ctx.inside, own, create_graph=True, materialize_grads=True)
        return None, None, *_Alone.apply(again, [*ctx.inside, *own], *ctx.saved_tensors, *given)


@contextmanager
def _frozen(parameters: Iterable[Tensor]) -> Iterator[None]:
    trained = [p for p in parameters if p.requires_grad]
    for p in trained:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in trained:
            p.requires_grad_(True)


def parted(network: nn.Module, other: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters of `other` that `network` has not, and those that it has, whichever modules hold them."""
    ids = {id(p) for p in network.parameters()}
    parameters = list(other.parameters())
    return [p for p in parameters if id(p) not in ids], [p for p in parameters if id(p) in ids]


# ---- the distribution of an actor's actions ------------------------------------------------------------------------
class Density:
    """Give an actor's action distribution as a function of columns: of its `Actor`, else `get_dist(td)`."""

    def __init__(self, actor: ProbabilisticTensorDictSequential, mc_samples: int = 1) -> None:
        refuse(not hasattr(actor, "get_dist"), "the actor has no action distribution",
               why=f"{type(actor).__name__} has no get_dist",
               fix="Use ProbabilisticActor, or a ProbabilisticTensorDictSequential")  # fmt: skip
        self.actor, self.mc_samples = actor, mc_samples
        self.function = ModuleWatch(actor, Actor.of)

    @property
    def in_keys(self) -> list[Key]:
        """Return what the actor reads, as it is now."""
        known = self.function() is not None
        return read_by(self.stages, self.param_keys) if known else [unravel(k) for k in self.actor.in_keys]

    @property
    def family(self) -> Family | None:
        """Return the family of its distribution as it is now; None where only the actor knows."""
        return getattr(self.function(), "family", None)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Return the stages that write the family's parameters; none where the actor is called."""
        return getattr(self.function(), "stages", ())

    @property
    def param_keys(self) -> list[Key]:
        """Where these parameters are."""
        return getattr(self.function(), "param_keys", [])

    def parameters(self, columns: Columns) -> tuple[Params, dict[Key, Tensor]]:
        """Return the family's parameters, and the columns with everything that the net writes."""
        function = self.function()
        assert function is not None
        return fitted("the actor", lambda: function.parameters(columns), lambda: columns)

    def __call__(
        self, columns: Columns, action: Tensor, batch_dims: int = 1, entropy: bool = True
    ) -> tuple[Tensor, Tensor | None, dict[Key, Tensor]]:
        """Return the log-probability and entropy (None unless asked for) `[*B]`, and columns with the net's outputs."""
        return fitted(
            "the actor",
            lambda: self._evaluate(columns, action, batch_dims, entropy),
            lambda: {**{key: columns[key] for key in self.in_keys if key in columns}, "action": action},
        )

    def _evaluate(
        self, columns: Columns, action: Tensor, batch_dims: int, entropy: bool
    ) -> tuple[Tensor, Tensor | None, dict[Key, Tensor]]:
        size, function = action.shape[:batch_dims], self.function()
        if function is not None:
            family, (params, values) = function.family, function.parameters(columns)
            action = family.fitting(params, action)
            if entropy:
                pair = family.log_prob_and_entropy(params, action)
                return (one_a_row(pair[0], size, family), one_a_row(pair[1], size, family), values)
            return one_a_row(family.log_prob(params, action), size, family), None, values
        dist, td = self.dist(columns, size)
        written = {unravel(k): x for k, x in td.items(True, True)}  # type: ignore[arg-type]
        log_prob = one_a_row(dist.log_prob(action), size, dist)
        return log_prob, one_a_row(self._entropy(dist), size, dist) if entropy else None, {**columns, **written}

    def dist(self, columns: Columns, size: torch.Size) -> tuple[torch.distributions.Distribution, TensorDict]:
        """Return the distribution of a batch `size` and a tensordict of what the actor's net wrote."""
        inputs: Any = {k: columns[k] for k in self.in_keys if k in columns}
        td = TensorDict(inputs, batch_size=size)
        with over_sequences(self.actor):
            return fitted("the actor", lambda: self.actor.get_dist(td), lambda: inputs), td

    def _entropy(self, dist: torch.distributions.Distribution) -> Tensor:
        try:
            return dist.entropy()
        except NotImplementedError:  # no closed form: minus the mean log-probability of a few samples
            shape = torch.Size([self.mc_samples])
            sample = dist.rsample(shape) if dist.has_rsample else dist.sample(shape)
            return -dist.log_prob(sample).mean(0)


def one_a_row(x: Tensor, size: torch.Size, of: Any) -> Tensor:
    """Reshape a log-probability or entropy `[*B]` or `[*B, 1]` to `[*B]`: it would broadcast."""
    if x.shape == size:
        return x
    if x.shape != (*size, 1):
        raise ArgumentError(
            "the log-probability of an action is not one number a row",
            why=f"that of {type(of).__name__} is {tuple(x.shape)} in a batch {tuple(size)}",
            fix="Use IndependentNormal, or wrap the distribution in torch.distributions.Independent(..., 1).",
        )
    return x.squeeze(-1)


# the other name under which a batch may hold the log-probability that is looked for under a key
ALSO_CALLED: dict[Key, tuple[Key, ...]] = {SAMPLE_LOG_PROB: (ACTION_LOG_PROB,), ACTION_LOG_PROB: (SAMPLE_LOG_PROB,)}


def log_prob_key(actor: ProbabilisticTensorDictSequential) -> Key:
    """Return the key of the log-probability that the actor stores of its actions."""
    for module in reversed(list(actor.modules())):
        if isinstance(module, ProbabilisticTensorDictModule) and module.return_log_prob:
            return unravel(module.log_prob_key)
    return SAMPLE_LOG_PROB
