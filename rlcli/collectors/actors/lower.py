"""Decides how a policy is run: taken apart into stages where that is provably the same, as it is otherwise.

Lowering is refused when the policy cannot be taken apart (`rlcli.modules.stages`), or when the stages' output on a
probe differs from the module's: an unusual policy costs its own time, never its correctness.
"""

from __future__ import annotations

import contextlib
import copy
import random
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, ProbabilisticTensorDictModule, set_interaction_type
from torch import nn

from rlcli.collectors.actors.actor import ActorRunner, PolicyContext
from rlcli.collectors.actors.called import call
from rlcli.collectors.actors.lowered import ActionDraw, FastActor
from rlcli.collectors.actors.tensordict_policy import TensorDictActor
from rlcli.collectors.batch import Columns
from rlcli.collectors.devices import NOT_COPIED
from rlcli.errors import ArgumentError, NumericsError
from rlcli.keys import ACTION, END_FLAGS, IS_INIT, Key, show, under_next, unravel
from rlcli.modules.distributions import CATEGORICAL, ONE_HOT, Family, family_of, param_keys
from rlcli.modules.distributions.discrete import MultiCategoricalFamily, MultiOneHotFamily
from rlcli.modules.exploration import EGreedyFamily
from rlcli.modules.stages import NetworkStages, Stage, ValueParts, take_apart, take_apart_values
from rlcli.specs.dtypes import dtype_name, numpy_dtype
from rlcli.specs.field import Field, Fields
from rlcli.vec_envs.actions import ActionFormat

_CHOICES = (InteractionType.RANDOM, InteractionType.MODE, InteractionType.DETERMINISTIC)  # that a family knows


def lower(
    policy: Callable[[TensorDictBase], TensorDictBase],
    setting: PolicyContext,
    legal: Callable[[Key, np.ndarray], np.ndarray] = lambda key, values: values,
    *,
    whole: bool = False,
    early: bool = False,
) -> ActorRunner:
    """An actor for a policy, TensorDict -> TensorDict with `action`; on another device it is never lowered.

    `legal`: values `[*batch, *shape]` that the env may show under a key, given some that are made up.
    `whole`: run it as it is: what it writes is to be handed on, at every step.
    `early`: what it writes has to be known before it acts for the first time; ArgumentError where no copy can be tried.
    What is tried is a twin of the policy, so that the policy itself is called once a step and not before. What has no
    twin is run as it is, and shows what it writes in its first step.
    """
    shown = _made_up(setting, legal)
    tried = twin(policy)
    as_it_is = partial(TensorDictActor, policy, setting)
    if tried is None and not early:
        return as_it_is(why="it is no module that can be copied: what it writes is seen in its first step")
    probed = twin_of_callable(policy) if tried is None else tried
    if probed is None:
        raise ArgumentError(
            "the first frames take random actions, and what else the policy writes is not known yet",
            why="the policy cannot be copied for a trial call",
            fix="Use init_random_frames=0, or give the policy as an nn.Module.",
        )
    try:
        example = _probe(probed, shown, setting)
    except (ArgumentError, NumericsError):
        if early or not whole:
            raise
        return as_it_is(why="specs do not say what the env shows: what it writes is seen in its first step")
    rewrites = {key for key, value in shown.items() if _differs(example.get(key, None), value)}
    actor = as_it_is(example=example, rewrites=rewrites)
    lowered, actor.why = _lowered(actor, tried, example, shown, whole)
    if lowered is None:
        return actor
    lowered.watch(policy, lambda policy: lower(policy, setting, legal))
    return lowered


def _lowered(
    actor: TensorDictActor, tried: Any, example: TensorDictBase, shown: dict[Key, np.ndarray], whole: bool
) -> tuple[FastActor | None, str]:
    """Return the policy taken apart; or None, and why it is not."""
    policy, setting = actor.policy, actor.setting
    if why := _whole(actor, whole, tried):
        return None, why
    parts = _parts(policy)
    if parts is None:
        return None, "a module of it is more than a plain TensorDictModule: a class of its own, a hook, a keyword"
    if why := _no_step(parts.stages, actor.states):
        return None, why
    written = _written(parts.stages, example, len(setting.batch_size))
    draw = _greedy_draw(parts, setting) if isinstance(parts, ValueParts) else _draw(parts.head, setting, example)
    if draw is None:
        return None, "its distribution is none that rlcli draws from"
    taken = numpy_dtype(example.get(ACTION).dtype)
    if taken is None or (setting.actions.encoded and taken != setting.actions.stored[1]):
        return None, f"its actions are {dtype_name(example.get(ACTION).dtype)}"
    if (
        written is None
        or not written.keys().isdisjoint(setting.inputs)  # rows keep what the env showed
        or any(key not in written or len(written[key][0]) != 1 for key in draw.param_keys)  # it draws from rows [N, k]
    ):
        return None, "what it writes is not float32, one row a step, beside what the env shows"
    if not _on_offer(draw.family, written[draw.param_keys[0]][0][0], setting.actions):
        return None, "it may choose what the env does not offer: each action is looked at"
    lowered = FastActor(parts.stages, draw, setting, written, taken)
    copied = _parts(twin(policy))
    if (
        copied is None
        or not lowered.reads <= set(setting.inputs)
        or not _same(FastActor(copied.stages, draw, setting, written, taken), example, shown)
    ):
        return None, "its stages, called one by one, do not give what it gives"
    return lowered, ""


def _whole(actor: TensorDictActor, whole: bool, tried: Any) -> str:
    """Say why a policy is not to be taken apart, whatever it is made of; nothing where it may be."""
    if whole:
        return "the env is stepped on tensordicts, and is given all that it writes, or its states begin at other than 0"
    if tried is None:
        return "it is no module that can be copied"
    if actor.rewrites:
        return f"it writes to its input, {', '.join(map(show, actor.rewrites))}"
    if actor.placement.policy_is_elsewhere:
        return f"it acts on {actor.placement.policy}"
    exploration = actor.setting.exploration
    return "" if exploration in _CHOICES else f"exploration_type is {exploration}"


def _no_step(stages: Sequence[Stage], states: Sequence[Key]) -> str:
    """Say why the states that it writes do not all go from rows to the next ones; nothing where they do, or none is.

    `states` are those that a call of it wrote.
    """
    recurrent = [stage for stage in stages if stage.recurrent]
    if any(stage.module.runs_over_sequences for stage in recurrent):
        return "it runs over sequences where nothing says otherwise: default_recurrent_mode=True"
    if any(stage.out_keys[1:] != tuple(map(under_next, stage.state_keys)) for stage in recurrent):
        return "it writes its state under another name than it reads it"
    if sorted(show(key) for stage in recurrent for key in stage.state_keys) != sorted(map(show, states)):
        return "it writes its state under next, and is no GRUModule or LSTMModule"
    return ""


def _parts(policy: Any) -> NetworkStages | ValueParts | None:
    parts: NetworkStages | ValueParts | None = take_apart(policy) or take_apart_values(policy)
    if parts is None or not parts.stages or not all(isinstance(stage.module, nn.Module) for stage in parts.stages):
        return None
    return parts


def _probe(policy, shown: dict[Key, np.ndarray], setting: PolicyContext) -> TensorDictBase:
    """Return what one call on made-up observations gives, as it will explore."""
    device = setting.placement.policy
    drawn = [device] if device is not None and device.type == "cuda" else []
    with torch.inference_mode(False), _undrawn(drawn), torch.no_grad():
        given: dict = {key: torch.from_numpy(value.copy()) for key, value in shown.items()}
        flags = {name: torch.zeros(*setting.batch_size, 1, dtype=torch.bool) for name in END_FLAGS}
        td = TensorDict({**flags, **given}, setting.batch_size)
        if setting.placement.policy_is_elsewhere:
            td = td.to(setting.placement.policy)
        tried = partial(call, policy, where="its first call, on made-up observations", first=True)
        try:
            with set_interaction_type(setting.exploration):
                return tried(td.clone(False)).cpu()
        except NumericsError:  # of NaN nothing is drawn: the first step says so, where a run can keep what was shown
            with set_interaction_type(InteractionType.DETERMINISTIC):
                return tried(td).cpu()


@contextlib.contextmanager
def _undrawn(devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Have what is drawn in here from the global streams of torch, numpy and Python drawn from them again later."""
    ours, pythons = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        np.random.set_state(ours)
        random.setstate(pythons)


def _made_up(setting: PolicyContext, legal: Callable) -> dict[Key, np.ndarray]:
    """The same numbers every time, of those that the env may show; not zeros, which would hide a wrong weight."""
    rng = np.random.default_rng(0)
    drawn = {
        key: np.asarray(rng.random((*setting.batch_size, *shape)) * (1 if dtype.kind == "f" else 2)).astype(dtype)
        for key, (shape, dtype) in setting.inputs.items()
    }
    if IS_INIT in drawn:  # no episode begins: the rows of states are set where one does
        drawn[IS_INIT][...] = False
    return {key: legal(key, value) for key, value in drawn.items()}


def _differs(value: torch.Tensor | None, given: np.ndarray) -> bool:
    return value is not None and not np.array_equal(value.detach().numpy(), given)


def _written(stages: Sequence[Stage], example: TensorDictBase, batch_dims: int) -> Fields | None:
    """Return what the stages write, without the lane dim; None unless all of it is float32."""
    values = {key: example.get(key, None) for stage in stages for key in stage.out_keys}
    if any(value is None or value.dtype != torch.float32 for value in values.values()):
        return None
    states = {under_next(key) for stage in stages for key in stage.state_keys}  # these have rows already
    return {
        key: Field(tuple(value.shape[batch_dims:]), np.dtype(np.float32))
        for key, value in values.items()
        if key not in states
    }


def _on_offer(family: Family, width: int, actions: ActionFormat) -> bool:
    """Say whether the env takes all that the family chooses from parameters `[N, width]`; real actions are clipped."""
    options = family.options(width)
    return actions.kind == "box" or (options is not None and bool((np.asarray(options) - 1 <= actions.last).all()))


def _draw(
    head: ProbabilisticTensorDictModule | None, setting: PolicyContext, example: TensorDictBase
) -> ActionDraw | None:
    actions = setting.actions
    if actions.kind == "box" and actions.dtype.kind != "f":  # the draw is of real numbers
        return None
    if head is None or head.out_keys[0] != ACTION:
        return None
    family = family_of(head)
    if family is None:
        return None
    if actions.encoded:  # the loop works with indices; the one-hot column is written once per batch
        if family is ONE_HOT and actions.kind == "discrete":
            family = CATEGORICAL
        elif type(family) is MultiOneHotFamily and family.nvec == actions.nvec:
            family = MultiCategoricalFamily(nvec=actions.nvec)
        else:
            return None
    elif family is ONE_HOT or type(family) is MultiOneHotFamily:
        return None
    keys = [unravel(key) for key in param_keys(head)]
    draw = ActionDraw(family, keys, None, mode=setting.exploration is not InteractionType.RANDOM)
    if head.return_log_prob:
        draw.log_prob_key = unravel(head.log_prob_key)
        draw.log_prob_shape = tuple(example.get(draw.log_prob_key).shape[len(setting.batch_size) :])
    return draw


def _greedy_draw(parts: ValueParts, setting: PolicyContext) -> ActionDraw | None:
    choice, tries, actions = parts.choice, parts.exploration, setting.actions
    masks = [choice.action_mask_key] + ([] if tries is None else [tries.action_mask_key])
    keys = [unravel(choice.out_keys[0])] + ([] if tries is None else [tries.action_key])
    if masks[0] != masks[-1] or actions.kind != "discrete" or any(key != ACTION for key in keys):
        return None
    if (choice.action_space == "one_hot") != actions.encoded:
        return None
    mode = tries is None or setting.exploration is not InteractionType.RANDOM
    masked = masks[0] is not None
    family = EGreedyFamily() if tries is None else EGreedyFamily(lambda: float(tries.eps), tries.n, masked=masked)
    return ActionDraw(family, [choice.action_value_key], None, mode, chosen_key=unravel(choice.out_keys[2]))


def _same(actor: FastActor, example: TensorDictBase, shown: dict[Key, np.ndarray]) -> bool:
    """Say whether the stages, and the family's log-probability of its action, match the module on the probe."""
    dims = example.batch_dims
    lanes = example.batch_size.numel()
    first = {key: value.reshape(lanes, *value.shape[dims:]) for key, value in shown.items()}
    rows = {key: [value, value.copy()] for key, value in first.items()}
    with torch.inference_mode(False), _undrawn(), torch.no_grad():
        bound = actor.bind(Columns(1, {}, rows), lanes)
        bound.fill_constants(0)  # type: ignore[attr-defined]
        try:
            bound.forward(0)  # type: ignore[attr-defined]
        except (ArgumentError, NumericsError):  # what its stages say of being called one by one
            return False
    for stage in actor.stages:
        for key in stage.out_keys:
            expected, found = example.get(key), bound.rows[key][0]  # type: ignore[attr-defined]
            # a NaN on both sides is no difference: it is found, and named, before the first step
            if not torch.allclose(found.reshape(expected.shape), expected, rtol=1e-5, atol=1e-6, equal_nan=True):
                return False
    return _same_log_prob(actor, example, bound.params, lanes)  # type: ignore[attr-defined]


def _same_log_prob(actor: FastActor, example: TensorDictBase, params: list[torch.Tensor], lanes: int) -> bool:
    draw = actor.draw
    if draw.log_prob_key is None:
        return True
    stored, expected = example.get(ACTION), example.get(draw.log_prob_key)
    action = actor.actions.decode(stored.numpy().reshape(lanes, *actor.actions.stored[0]))
    log_prob = draw.family.log_prob(tuple(param[0] for param in params), torch.from_numpy(np.asarray(action)))
    if log_prob.numel() != expected.numel() or expected.dtype != torch.float32:
        return False
    return torch.allclose(log_prob.float().reshape(expected.shape), expected, rtol=1e-4, atol=1e-4, equal_nan=True)


# ---- copies to try things on -----------------------------------------------------------------------------------------
# With state and parameters of their own, since a call may write to either. Functions keep state too, in what they close
# over (hooks that count, lambdas inside of modules): it is copied with them.
def twin(policy: Any) -> nn.Module | None:
    """Return a copy of a module, or None: it is no module, or holds what cannot be copied."""
    if not isinstance(policy, nn.Module):
        return None
    memo: dict[int, Any] = {}
    try:
        for function in _closures(policy):
            memo[id(function)] = _copied(function, memo)
        return copy.deepcopy(policy, memo)
    except NOT_COPIED:
        return None


def twin_of_callable(policy: Any) -> Any:
    """A copy of an object, or of a function with what it closes over and the data of its module that it names; or None.

    Functions of its module that it calls are the same ones: what those keep beside is shared.
    """
    try:
        if not isinstance(policy, types.FunctionType):
            return copy.deepcopy(policy)
        memo: dict[int, Any] = {}
        named = {name: policy.__globals__[name] for name in _names(policy.__code__) if name in policy.__globals__}
        data = {name: copy.deepcopy(x, memo) for name, x in named.items() if not isinstance(x, types.ModuleType)}
        return _copied(policy, memo, policy.__globals__ | data)
    except NOT_COPIED:
        return None


def _names(code: types.CodeType) -> set[str]:
    """Name what a function, and those that it defines, may look up in their module."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return {*code.co_names}.union(*inner)


def _closures(policy: nn.Module) -> Iterator[types.FunctionType]:
    """Functions that the policy's modules hold: hooks, and attributes such as the function of a TensorDictModule."""
    for module in policy.modules():
        for value in [*vars(module).values()]:
            held = value.values() if isinstance(value, dict) else [value]
            yield from (f for f in held if isinstance(f, types.FunctionType) and f.__closure__)


def _copied(
    function: types.FunctionType, memo: dict[int, Any], names: dict[str, Any] | None = None
) -> types.FunctionType:
    cells = tuple(types.CellType(copy.deepcopy(cell.cell_contents, memo)) for cell in function.__closure__ or ())
    names = function.__globals__ if names is None else names
    defaults = copy.deepcopy(function.__defaults__, memo)
    new = types.FunctionType(function.__code__, names, function.__name__, defaults, cells)
    new.__kwdefaults__ = function.__kwdefaults__
    return new
