"""A user's policy, called: what it raises or writes amiss is a sentence, said before the env is stepped."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule
from torch import nn

from rlcli.errors import ArgumentError, NumericsError, RlcliError, in_words
from rlcli.keys import ACTION, Key, show, unravel
from rlcli.modules.distributions import family_of, param_keys
from rlcli.vec_envs.actions import ActionFormat, in_a_line

_BEFORE = "step {} of the batch; the env was not stepped"


def call(
    policy: Callable[[TensorDictBase], Any], td: TensorDictBase, where: str, *, first: bool = False
) -> TensorDictBase:
    """Return what a policy makes of `td`; a NaN it wrote before it raised is a NumericsError."""
    try:
        out = policy(td)
    except PASSED_ON:
        raise
    except BaseException as error:
        raise raised(error, td.items(True, True), where, _hint(policy) if first else None) from error
    if out is None:
        return td
    if not isinstance(out, TensorDictBase):
        raise ArgumentError(
            "the policy did not return a tensordict", where=where, why=f"it returned a {type(out).__name__}",
            fix=_hint(policy) or "Return the tensordict with 'action' written to it.",
        )  # fmt: skip
    return out


# what a policy may raise that is said as it is; not SystemExit: it must not end the run as if all were well
PASSED_ON = (RlcliError, KeyboardInterrupt, MemoryError, torch.OutOfMemoryError)


def raised(
    error: BaseException, values: Iterable[tuple[Any, torch.Tensor]], where: str, fix: str | None = None
) -> RlcliError:
    """Return the error for a policy that raised, where it had read and written `values` by then."""
    for key, value in values:
        if value.is_floating_point() and bool(torch.isnan(value).any()):
            return not_finite(unravel(key), f"{where}; the env was not stepped")
    return ArgumentError("the policy raised", where=where, why=in_words(error), fix=fix)


def _hint(policy: Any) -> str | None:
    """Say what to tell the writer of a plain function, which may have been meant for observations."""
    if isinstance(policy, nn.Module):
        return None
    return (
        "A function is called with the tensordict and writes 'action' to it; one from an observation to an action is "
        'wrapped: TensorDictModule(function, in_keys=["observation"], out_keys=["action"]).'
    )


def bits_of(policy: Any) -> set[Key]:
    """Return the logits of bits that a policy's modules draw: an infinite one makes its bit certain."""
    parts = policy.modules() if isinstance(policy, nn.Module) else ()
    heads = [part for part in parts if isinstance(part, ProbabilisticTensorDictModule)]
    drawn = ((head, family_of(head)) for head in heads)
    return {unravel(key) for head, family in drawn if family and family.bits for key in param_keys(head)}


def is_sound(values: torch.Tensor, dims: int, bits: bool = False) -> bool:
    """Say whether an output is finite, or infinite where that means something."""
    if bool(values.isfinite().all()):
        return True
    if bits:
        return not bool(values.isnan().any())
    return values.ndim > dims and values.shape[-1] > 0 and bool(values.amax(-1).isfinite().all())  # NaN is its own max


def refuse_unsound(key: Key, column: np.ndarray, bits: bool = False) -> None:
    """Raise where some steps' outputs `[N, T, *]` are not sound, before a batch is made of them."""
    if column.dtype.kind == "f" and not is_sound(torch.from_numpy(column), 2, bits):
        raise NumericsError(
            f"the policy's {show(key)} is not finite", why="a weight or an observation is NaN or infinite"
        )


def take(key: Key, value: Any, row: torch.Tensor, kind: torch.dtype, t: int) -> None:
    """Copy one output into its row, if it is what it was on the first call (`kind`)."""
    if not isinstance(value, torch.Tensor) or value.shape != row.shape or value.dtype is not kind:
        raise changed_output(key, value, row, kind, t)  # `copy_` would spread or cast it
    row.copy_(value)


def refuse_nan(key: Key, value: torch.Tensor, t: int, bits: bool = False) -> None:
    """Raise where an output `[N, *]` holds a NaN; an infinity alone waits for the end of the batch."""
    if value.dtype.is_floating_point:
        total = value.sum().item()  # one operation; it is NaN too where sums on the way are infinite
        if total != total and not is_sound(value, 1, bits):
            raise not_finite(key, _BEFORE.format(t))


def changed_output(key: Key, value: Any, row: torch.Tensor, kind: torch.dtype, t: int) -> ArgumentError:
    """Return the error for an output of another shape or dtype, or none."""
    if isinstance(value, torch.Tensor):
        got = f"{tuple(value.shape)} {value.dtype}"
    else:
        got = "nothing" if value is None else f"a {type(value).__name__}"
    return ArgumentError(
        f"the policy's {show(key)} is not what it was on its first call", where=_BEFORE.format(t),
        why=f"expected {tuple(row.shape)} {kind}, got {got}",
    )  # fmt: skip


def late_output(what: str, why: str, fix: str) -> ArgumentError:
    """Return the error for an output that comes, goes or changes after the first step."""
    return ArgumentError(f"the policy's {what}", where="the env was not stepped", why=why, fix=fix or None)


def loop_action(actions: ActionFormat, row: np.ndarray, t: int) -> np.ndarray:
    """Check the actions `[N, *]` and return them as the env's loop takes them."""
    if actions.kind == "box":
        if not np.isfinite(row).all():
            raise not_finite(ACTION, _BEFORE.format(t))
        return row
    if actions.encoded and not actions.is_one_hot(row):
        raise _no_one_hot(row.tolist(), t)
    decoded = actions.decode(row)
    if actions.kind == "discrete":
        chosen = decoded.tolist()  # of a few numbers, the ends are found sooner than in an array
        if not 0 <= min(chosen) <= max(chosen) < actions.nvec[0]:
            raise _out_of_range(actions, decoded, t)
    elif actions.kind == "multi_discrete" and (decoded.min() < 0 or (decoded > actions.last).any()):
        raise _out_of_range(actions, decoded, t)
    return decoded


def refuse_no_bits(value: torch.Tensor, t: int) -> None:
    """Raise where an action of a MultiBinary space is other than 0 and 1, before the row's int8 cuts it short."""
    if bool((value.to(torch.int64) >> 1).any()):
        raise ArgumentError(
            "the policy's action is out of range", where=_BEFORE.format(t),
            why=f"expected 0 and 1, got {value.tolist()}",
        )  # fmt: skip


def refuse_soft(value: torch.Tensor, t: int) -> None:
    """Raise where a one-hot action is made of parts, before the row's int64 cuts them short."""
    if bool((value != value.round()).any()):
        raise _no_one_hot(value.tolist(), t)


def _no_one_hot(value: list, t: int) -> ArgumentError:
    return ArgumentError(
        "the policy's action is not one-hot", where=_BEFORE.format(t),
        why=f"expected a single 1 a choice, got {value}",
        fix="Write one_hot(action.argmax(-1), n), or draw the action from these numbers.",
    )  # fmt: skip


def _out_of_range(actions: ActionFormat, chosen: np.ndarray, t: int) -> ArgumentError:
    return ArgumentError(
        "the policy's action is out of range", where=_BEFORE.format(t),
        why=f"expected {actions.offered}, got {in_a_line(chosen)}",
    )  # fmt: skip


def not_finite(key: Key, where: str) -> NumericsError:
    """Return the error for an output that is NaN or infinite."""
    return NumericsError(
        f"the policy's {show(key)} is not finite", where=where, why="a weight or an observation is NaN or infinite",
        fix="Lower optim.lr, or set env.normalize_observation=true.",
    )  # fmt: skip
