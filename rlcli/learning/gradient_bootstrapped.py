"""The gradients of the DQN and SAC losses without autograd: networks replayed by hand, the rest in compiled passes.

DQN: plain stacks on one float observation, masked or not, and index or one-hot actions. SAC: an actor of plain layers
and a `LogScaleExtractor` on one float observation, drawing from a `TanhNormal`, and critics that are `StateActionMLP`s;
it draws what `SACLoss` draws, in its order. The oracle is `Autograd`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlcli.errors import ArgumentError, in_words
from rlcli.graphs import host
from rlcli.kernels.mlp import Abreast, Replay, keep_recent
from rlcli.keys import STEPS_TO_NEXT_OBS, TD_ERROR, Key, under_next
from rlcli.learning.optimizer import FlatParameters, lay_out
from rlcli.modules.distributions.continuous import TanhNormalFamily, standard_normal
from rlcli.modules.masks import LogitMask
from rlcli.modules.stages import layers_of
from rlcli.modules.values import LogScaleExtractor, StateActionMLP
from rlcli.objectives.bootstrap import next_columns
from rlcli.objectives.dqn import DQNLoss, need_same_actions
from rlcli.objectives.networks import Columns, Lowered
from rlcli.objectives.reduction import MASK_KEYS
from rlcli.objectives.sac import SACLoss
from rlcli.objectives.sequences import SequenceActionValues

NOTHING = np.empty(0, np.float32)
NO_STEPS = np.empty(0, np.int64)


def closed_dqn(loss: DQNLoss, flat: FlatParameters, columns: Columns) -> ClosedDQN | OperatedDQN | None:
    """Return the closed form for samples of these columns `[N, ...]`, or None where it does not fit."""
    if not host.may_ask(flat.tensor):
        return OperatedDQN(loss, flat) if OperatedDQN.fits(loss, flat, columns) else None
    online, delayed = _replayed(loss.online, True), _replayed(loss.delayed, False)
    if online is None or delayed is None or flat.tensor.device.type != "cpu":
        return None
    if not _all_of(flat, [online]) or flat.tensor.dtype != torch.float32:
        return None
    if loss.tensor_keys.action_value not in loss.online.out_keys:
        return None
    key = loss.online.in_keys[0]
    fits = all(float_rows(columns, k) for k in (key, under_next(key))) and plain_rows(loss, columns)
    if fits:
        fits = {(columns[key].shape[1], online.layers[-1][0].out_features)} == {online.widths, delayed.widths}
        fits = fits and columns[key].shape == columns[under_next(key)].shape
    fits = fits and _usual_actions(loss, columns)
    return ClosedDQN(loss, online, delayed, key) if fits else None


def _usual_actions(loss: DQNLoss, columns: Columns) -> bool:
    """Say whether there is an action a row, all of which count."""
    action = columns.get(loss.tensor_keys.action)
    if action is None or loss.reduction != "mean" or any(k in columns for k in MASK_KEYS):
        return False
    if loss.action_space == "categorical":
        return one_number(action) and action.dtype in INTEGERS
    return action.ndim == 2 and action.dtype in NUMBERS  # there is no argmax of bool


class ClosedDQN:
    """`DQNLoss` on a sample of columns `[N, ...]`: loss and diagnostics out, the gradient left in the flat buffer.

    Among the figures are the rows' errors, `td_error [N]`. It keeps views of the weights: build a new one when
    `flat.version` changes.
    """

    def __init__(self, loss: DQNLoss, online: Replay, delayed: Replay, key: Key) -> None:
        from rlcli.kernels.dqn import cpu as dqn  # loads the compiler

        self.loss, self.online, self.delayed, self.key = loss, online, delayed, key
        last = loss.online.stages[-1]  # type: ignore[union-attr, index]
        self.mask = last if last.is_plain(LogitMask) else None
        self._kernel, self._kind = dqn.q_learning, dqn.KINDS[loss.loss_function]

    def __call__(self, columns: Columns) -> dict[str, Any]:
        loss, later = self.loss, columns[under_next(self.key)]
        next_values = self._masked(self.delayed.forward(later), columns)
        # the online net runs on s' first: its backward pass is that of its last forward pass, on s
        choosing = self._masked(self.online.forward(later), columns).copy() if loss.double_dqn else next_values
        values = self.online.forward(columns[self.key])
        reward, terminated, steps, weight = steps_of(loss, columns)
        grad, errors = torch.empty_like(values), np.empty(len(values), np.float32)
        try:
            total, mean = self._kernel(
                values.numpy(), self._action(columns), next_values, choosing, reward, terminated, float(loss.gamma),
                steps, weight, self._kind, grad.numpy(), errors,
            )  # fmt: skip
        except IndexError as error:
            raise ArgumentError(
                "actions do not fit the values that they choose among", why=in_words(error),
                fix="Compare with the actions that the network was made for.",
            ) from error  # fmt: skip
        self.online.backward(grad)
        return {"loss": total, "q_value": mean, TD_ERROR: torch.from_numpy(errors)}

    def _masked(self, values: Tensor, columns: Columns) -> np.ndarray:
        """Return values at s', the lowest where an action is not allowed; at s the one taken is allowed."""
        if self.mask is not None:
            values = self.mask.module(values, columns[under_next(self.mask.in_keys[1])])
        return values.numpy()

    def _action(self, columns: Columns) -> np.ndarray:
        return _action_of(self.loss, columns).numpy()


def _action_of(loss: DQNLoss, columns: Columns) -> Tensor:
    """Return the index of each row's action, `[N]`."""
    action = columns[loss.tensor_keys.action]
    return (action.argmax(-1) if loss.action_space == "one_hot" else action).reshape(-1)


class OperatedDQN:
    """`DQNLoss` by operations of which the host reads nothing, as a GPU needs it, with any networks of feedforward."""

    def __init__(self, loss: DQNLoss, flat: FlatParameters) -> None:
        from rlcli.kernels import dqn

        self.loss, self.flat, self._q_learning = loss, flat, dqn.OPERATIONS.q_learning
        target = [] if loss.target_value_network is None else [*loss.target_value_network.parameters()]
        if {x.dtype for x in target} == {flat.tensor.dtype}:
            lay_out(target)  # they follow by one operation

    @staticmethod
    def fits(loss: DQNLoss, flat: FlatParameters, columns: Columns) -> bool:
        """Say whether it fits samples of these columns `[N, ...]`."""
        from rlcli.kernels.operations import serves

        plain = isinstance(loss.online, Lowered) and loss.tensor_keys.action_value in loss.online.out_keys
        usual = plain and serves(flat.tensor) and flat.tensor.dtype == torch.float32
        return usual and plain_rows(loss, columns) and _usual_actions(loss, columns)

    def __call__(self, columns: Columns) -> dict[str, Any]:
        loss, online, delayed = self.loss, self.loss.online, self.loss.delayed
        assert isinstance(online, Lowered) and isinstance(delayed, Lowered)
        key = loss.tensor_keys.action_value
        values = online(columns, 1)[key]
        with torch.no_grad():
            later = next_columns(columns, online.in_keys)
            next_values = delayed(later, 1)[key]
            choosing = online(later, 1)[key] if loss.double_dqn else next_values
        need_same_actions(values, next_values)  # compiled code would read beside them
        given = values.detach(), _action_of(loss, columns), next_values, choosing
        reward, terminated, steps, weight = given_of(loss, columns)
        grad, errors, figures = self._q_learning(
            *given, reward, terminated, steps, weight, loss.gamma, loss.loss_function
        )
        self.flat.differentiate([values], [grad])
        return {"loss": figures[0], "q_value": figures[1], TD_ERROR: errors}


def _all_of(flat: FlatParameters, nets: Sequence[Replay], *others: Tensor) -> bool:
    """Say whether these networks' parameters, and the others, are all that is trained."""
    replayed = [id(p) for net in nets for linear, _ in net.layers for p in linear.parameters()]
    return sorted([*replayed, *map(id, others)]) == sorted(map(id, flat.parameters))


def _replayed(values: Lowered | SequenceActionValues, trained: bool) -> Replay | None:
    stages = (values.stages or ()) if isinstance(values, Lowered) else ()
    masked = len(stages) == 2 and stages[1].is_plain(LogitMask)
    if len(stages) != 1 + masked or stages[0].layers is None:
        return None
    return Replay(stages[0].layers, trained)


# ---- what the closed forms of off-policy losses read of a sample beside observations and actions ------------------
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
NUMBERS = (*INTEGERS, torch.float32, torch.float64)


def float_rows(columns: Columns, key: Key) -> bool:
    """Say whether there is such a column, float32 `[N, ...]` of one dim."""
    x = columns.get(key)
    return x is not None and x.ndim == 2 and x.dtype == torch.float32


def one_number(x: Tensor) -> bool:
    """Say whether a column has one number a row."""
    return x.numel() == len(x)


def plain_rows(loss: Any, columns: Columns) -> bool:
    """Say whether what `steps_of` reads is there, one number a row of a dtype that numpy has."""
    k = loss.tensor_keys
    needed, optional = (under_next(k.reward), loss.ended_key(columns)), (STEPS_TO_NEXT_OBS, k.priority_weight)
    there = [x for key in (*needed, *optional) if (x := columns.get(key)) is not None]
    if not all(key in columns for key in needed) or columns[needed[1]].dtype != torch.bool:
        return False
    return all(one_number(x) and x.dtype in (*NUMBERS, torch.bool) for x in there)


def given_of(loss: Any, columns: Columns) -> list[Any]:
    """Return reward and ends, each `[N]`; the steps that a reward spans, and weights, each `[N]` or None."""
    k = loss.tensor_keys
    keys = (under_next(k.reward), loss.ended_key(columns), STEPS_TO_NEXT_OBS, k.priority_weight)
    return [None if x is None else x.reshape(-1) for x in map(columns.get, keys)]


def steps_of(loss: Any, columns: Columns) -> tuple[np.ndarray, ...]:
    """Return the same as arrays, empty where there is none."""
    absent: tuple[np.ndarray, ...] = (NOTHING, NOTHING, NO_STEPS, NOTHING)
    read = zip(given_of(loss, columns), absent, strict=True)
    return tuple(empty if x is None else x.numpy() for x, empty in read)


def closed_sac(loss: SACLoss, flat: FlatParameters, columns: Columns) -> ClosedSAC | OperatedSAC | None:
    """Return the closed form for samples of these columns `[N, ...]`, or None where it does not fit."""
    family, stages, action = loss.density.family, loss.density.stages, loss.tensor_keys.action
    if len(stages) != 2 or not stages[1].is_plain(LogScaleExtractor):
        return None
    layers, keys = stages[0].layers, stages[0].in_keys
    if layers is None or len(keys) != 1 or type(family) is not TanhNormalFamily:
        return None
    critics = [_critic(x, [keys[0], action], True) for x in loss.critics]
    delayed = [_critic(x, [keys[0], action], False) for x in loss.target_critics]
    if any(x is None for x in (*critics, *delayed)) or flat.tensor.device.type not in ("cpu", "cuda"):
        return None
    nets = [Replay(layers), *critics]
    if not _all_of(flat, nets, *(() if loss.fixed_alpha else (loss.log_alpha,))):  # type: ignore[arg-type]
        return None
    read = (keys[0], under_next(keys[0]), action)
    fits = all(float_rows(columns, k) for k in read) and plain_rows(loss, columns)
    if fits:  # the kernels take it for granted that loc, scale, bounds and actions are of one width
        wide, later, dims = (columns[k].shape[1] for k in read)
        widths = [net.widths for net in (*nets, *delayed)]  # type: ignore[union-attr]
        fits = wide == later and widths == [(wide, 2 * dims), *[(wide + dims, 1)] * (len(widths) - 1)]
        fits = fits and family.half.size in (1, dims)
    whole = loss.reduction == "mean" and flat.tensor.dtype == torch.float32 and not any(k in columns for k in MASK_KEYS)
    if not (fits and whole):
        return None
    if not host.may_ask(flat.tensor):
        return OperatedSAC.of(loss, nets, delayed, keys[0])  # type: ignore[arg-type]
    return ClosedSAC(loss, nets[0], critics, delayed, keys[0])  # type: ignore[arg-type]


class BatchBuffers(NamedTuple):
    """Buffers for samples of N rows; the halves of the first four are s and s'."""

    states: Tensor  # [2 N, obs]
    noise: Tensor  # [2 N, d]
    action: Tensor  # [2 N, d], drawn
    log_prob: np.ndarray  # [2 N]
    later: Tensor  # [N, obs + d]: s' and its action
    rows: Tensor  # [2 N, obs + d]: s with the stored action, s with the drawn one


class ClosedSAC:
    """`SACLoss` on a sample of columns `[N, ...]`: loss and diagnostics out, the gradients left in the flat buffer.

    Among the figures are the rows' errors, `td_error [N]`. It keeps views of the weights: build a new one when
    `flat.version` changes.
    """

    def __init__(self, loss: SACLoss, actor: Replay, critics: list[Replay], delayed: list[Replay], key: Key) -> None:
        from rlcli.kernels.sac import cpu  # loads the compiler

        self.loss, self.actor, self.critics, self.delayed, self.key = loss, actor, critics, delayed, key
        self._kernel, self._kind = cpu, cpu.KINDS[loss.loss_function]
        family, (_, split) = loss.density.family, loss.density.stages
        assert isinstance(family, TanhNormalFamily)
        dims = actor.layers[-1][0].out_features // 2
        self._centre, self._half = (np.broadcast_to(x, dims).copy() for x in (family.centre, family.half))
        self._split = split.module
        self._kept: dict[int, BatchBuffers] = {}

    def __call__(self, columns: Columns) -> dict[str, Any]:
        loss, kernel, bounds = self.loss, self._kernel, (self._split.low, self._split.high)
        alpha = float(loss.clamp_alpha_())
        reward, terminated, steps, weight = steps_of(loss, columns)
        state, later, n = columns[self.key], columns[under_next(self.key)], len(reward)
        work = self._kept.get(n) or self._keep(state, n)

        # the actor on s and on s' in one pass: its backward pass needs the first half only
        torch.cat((state, later), out=work.states)
        both = self.actor.forward(work.states).numpy()
        for half in (slice(n, None), slice(n)):  # the order in which the loss draws
            work.noise[half].normal_(generator=loss.generator)
        noise = work.noise.numpy()
        kernel.draw(both, noise, self._centre, self._half, *bounds, work.action.numpy(), work.log_prob)
        target, errors = np.empty(n, np.float32), np.empty(n, np.float32)
        values = self._delayed_values(work, later)
        kernel.targets(values, work.log_prob[n:], alpha, reward, terminated, float(loss.gamma), steps, target)

        # the critics on the stored action and on the one drawn in one pass; only the stored one moves their weights
        values = self._values(work, state, columns[loss.tensor_keys.action])
        grads = np.empty_like(values)
        loss_qvalue, mean = kernel.critic_grads(values[0], target, weight, self._kind, grads[0], errors)
        loss_actor, entropy, weighed = kernel.least_grads(values[1], work.log_prob[:n], alpha, weight, grads[1])
        action_grads = self._backward(grads, state.shape[1])
        out = np.empty((n, both.shape[1]), np.float32)
        kernel.actor_grad(both[:n], noise[:n], self._half, *bounds, action_grads, alpha, weight, out)
        self.actor.backward(torch.from_numpy(out))

        short = weighed - loss.target_entropy  # d loss_alpha / d log_alpha
        if not loss.fixed_alpha:
            loss.log_alpha.grad.fill_(short)  # type: ignore[union-attr]
        loss_alpha = float(loss.log_alpha.detach()) * short
        terms = {"loss_actor": loss_actor, "loss_qvalue": loss_qvalue, "loss_alpha": loss_alpha}
        more = {"alpha": alpha, "entropy": entropy, "q_value": mean, TD_ERROR: torch.from_numpy(errors)}
        return {**terms, "loss": sum(terms.values()), **more}

    def _delayed_values(self, work: BatchBuffers, later: Tensor) -> np.ndarray:
        """Return the target critics' on s' and the action drawn there, `[C, N]`."""
        n = len(later)
        rows = torch.cat((later, work.action[n:]), 1, out=work.later)
        return np.stack([net.forward(rows).numpy()[:, 0] for net in self.delayed])

    def _values(self, work: BatchBuffers, state: Tensor, action: Tensor) -> np.ndarray:
        """Return the critics' on s, with the stored action and with the one drawn, `[2, C, N]`."""
        n = len(state)
        torch.cat((state, action), 1, out=work.rows[:n])
        torch.cat((state, work.action[:n]), 1, out=work.rows[n:])
        return np.stack([net.forward(work.rows).numpy().reshape(2, n) for net in self.critics], 1)

    def _backward(self, grads: np.ndarray, first: int) -> np.ndarray:
        """Through the critics, given `[2, C, N]` of their values; that of the action drawn, `[C, N, d]`."""
        _, count, n = grads.shape
        action_grads = []
        for i in range(count):
            grad = torch.from_numpy(grads[:, i].reshape(2 * n, 1))
            back = self.critics[i].backward(grad, weights=n, inputs=slice(first, None))
            action_grads.append(back[n:].numpy())  # type: ignore[index]
        return np.stack(action_grads)

    def _keep(self, state: Tensor, n: int) -> BatchBuffers:
        dims, wide = len(self._half), state.shape[1] + len(self._half)
        work = BatchBuffers(
            state.new_empty(2 * n, state.shape[1]), state.new_empty(2 * n, dims), state.new_empty(2 * n, dims),
            np.empty(2 * n, np.float32), state.new_empty(n, wide), state.new_empty(2 * n, wide),
        )  # fmt: skip
        keep_recent(self._kept, n, work)
        return work


class OperatedSAC:
    """`ClosedSAC` by operations of which the host reads nothing, as a GPU needs it: critics run side by side."""

    def __init__(self, loss: SACLoss, actor: Abreast, critics: Abreast, delayed: Abreast, key: Key) -> None:
        self.loss, self.actor, self.critics, self.delayed, self.key = loss, actor, critics, delayed, key
        from rlcli.kernels import sac

        self._sac = sac
        weight, _, _ = actor.layers[-1]
        family, split = loss.density.family, loss.density.stages[1].module
        assert isinstance(family, TanhNormalFamily)
        bounds = (np.broadcast_to(x, weight.shape[1] // 2).copy() for x in (family.centre, family.half))
        centre, half = (torch.from_numpy(x).to(weight.device) for x in bounds)
        self._box = centre, half, split.low, split.high

    @classmethod
    def of(cls, loss: SACLoss, nets: list[Replay], delayed: list[Replay], key: Key) -> OperatedSAC | None:
        """Return it for an actor and its critics; their targets are laid into one piece of memory."""
        from rlcli.kernels.operations import serves

        if not serves(nets[0].layers[0][0].weight):
            return None
        targets = [net.layers for net in delayed]
        if loss.delay_qvalue:
            lay_out([p for layers in targets for linear, _ in layers for p in (linear.weight, linear.bias)])
        actor, critics = (
            Abreast.of([nets[0].layers], True),
            Abreast.of([net.layers for net in nets[1:]], True),
        )
        later = Abreast.of(targets, False)
        return cls(loss, actor, critics, later, key) if actor and critics and later else None

    def __call__(self, columns: Columns) -> dict[str, Any]:
        sac, figures_of, box = self._sac.OPERATIONS, self._sac.FIGURES, self._box
        loss, k = self.loss, self.loss.tensor_keys
        loss.clamp_alpha_()
        reward, terminated, steps, weight = given_of(loss, columns)
        states, n = torch.cat((columns[self.key], columns[under_next(self.key)])), len(reward)
        both = self.actor.forward(states)[0]
        loc, log_alpha = both[:n, : box[0].shape[0]], loss.log_alpha.detach()
        later, noise = (standard_normal((loc, loc), loss.generator) for _ in range(2))  # the order of the loss
        rows, log_prob = sac.draw(both, states, columns[k.action], [noise, later], *box)
        next_values = self.delayed.forward(rows[2 * n :])[..., 0]
        values = self.critics.forward(rows[: 2 * n])[..., 0]
        grads, errors, short, figures = sac.terms(
            values, next_values, log_prob, log_alpha, reward, terminated, steps, weight, loss.gamma,
            loss.target_entropy, loss.loss_function,
        )  # fmt: skip
        action_grads = self.critics.backward(grads.unsqueeze(-1), n, slice(states.shape[1], None))
        assert action_grads is not None
        grad = sac.actor_grad(both, noise, action_grads, log_alpha, weight, *box)
        self.actor.backward(grad.unsqueeze(0), n)
        if not loss.fixed_alpha:
            loss.log_alpha.grad.copy_(short)  # type: ignore[union-attr]
        return {**dict(zip(figures_of, figures.unbind(), strict=True)), TD_ERROR: errors}


def _critic(critic: Lowered, keys: list[Key], trained: bool) -> Replay | None:
    """Return the layers of a `StateActionMLP` on these keys."""
    stages = critic.stages
    if stages is None or len(stages) != 1 or list(stages[0].in_keys) != keys:
        return None
    layers = layers_of(stages[0].module.mlp) if stages[0].is_plain(StateActionMLP) else None
    if layers is None or (trained and any(linear.weight.grad is None for linear, _ in layers)):
        return None
    return Replay(layers, trained)
