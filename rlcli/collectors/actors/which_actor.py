"""Decide how a policy is run: as a function of rows where it is made of parts that are known, else as it is."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, set_interaction_type
from torch import nn

from rlcli.arguments import refuse
from rlcli.collectors.actors.actor import ActorRunner, FastActor, Outputs, PolicyContext, call, states_of
from rlcli.collectors.devices import NOT_COPIED
from rlcli.errors import ArgumentError, NumericsError
from rlcli.graphs import graph
from rlcli.keys import ACTION, END_FLAGS, IS_INIT, Key, show, under_next
from rlcli.modules.actor import Actor
from rlcli.modules.distributions.family import Family
from rlcli.modules.stages import Stage
from rlcli.specs.dtypes import dtype_name, numpy_dtype
from rlcli.specs.field import Field, Fields
from rlcli.vec_envs.actions import ActionFormat

_SEEN = "what it writes is seen in its first step"
_CHOICES = (InteractionType.RANDOM, InteractionType.MODE, InteractionType.DETERMINISTIC)  # that a family knows


def choose_actor(
    policy: Callable[[TensorDictBase], TensorDictBase], setting: PolicyContext,
    legal: Callable[[Key, np.ndarray], np.ndarray], *, whole: bool = False, early: bool = False,
) -> ActorRunner:  # fmt: skip
    """Return what runs a policy, TensorDict -> TensorDict with `action`; on another device it is called as it is.

    `legal`: values `[*batch, *shape]` that the env may show under a key, given some that are made up.
    `whole`: run it as it is: what it writes is to be handed on, at every step.
    `early`: what it writes has to be known before it acts for the first time; ArgumentError where that cannot be.
    A copy of it is called once on made-up observations, to learn what it writes. A function, which has none, shows that
    in its first step; with `early` it is called itself.
    """
    tried = None
    if isinstance(policy, nn.Module) or early:
        with contextlib.suppress(*NOT_COPIED):
            tried = copy.deepcopy(policy)  # a call may change it
    if tried is None:
        refuse(early, "the first frames take random actions, and what else the policy writes is not known yet",
               why="the policy cannot be copied for a trial call",
               fix="Use init_random_frames=0, or give the policy as an nn.Module.")  # fmt: skip
        return _as_it_is(policy, setting, f"it is no module that can be copied: {_SEEN}")
    try:
        example, rewrites = _tried(tried, setting, legal)
    except (ArgumentError, NumericsError):
        if early or not whole:
            raise
        return _as_it_is(policy, setting, f"specs do not say what the env shows: {_SEEN}")
    outputs = setting.outputs(example)
    if not isinstance(policy, nn.Module):
        why = "it is no module that can be copied"
    elif whole:
        why = "the env is stepped on tensordicts, and is given all that it writes, or its states begin at other than 0"
    elif rewrites:
        why = f"it writes to its input, {', '.join(map(show, rewrites))}"
    elif setting.placement.policy_is_elsewhere and graph.recorder_of(setting.placement.policy) is None:
        why = f"it acts on {setting.placement.policy}"
    elif setting.exploration not in _CHOICES:
        why = f"exploration_type is {setting.exploration}"
    else:
        fast = _on_rows(policy, setting, outputs, lambda policy: choose_actor(policy, setting, legal))
        if isinstance(fast, FastActor) and not (fast.calls and setting.placement.policy_is_elsewhere):
            return fast
        why = fast if isinstance(fast, str) else f"a module of it, called on {setting.placement.policy}, may keep rows"
    return _as_it_is(policy, setting, why, outputs, rewrites)


def _as_it_is(policy: Any, setting: PolicyContext, why: str, *learned: Any) -> ActorRunner:
    from rlcli.collectors.actors.tensordict import TensorDictActor  # of policies that are not run on rows

    return TensorDictActor(policy, setting, why, *learned)


def _on_rows(
    policy: nn.Module, setting: PolicyContext, outputs: Outputs, take_apart: Callable[[Any], ActorRunner]
) -> FastActor | str:
    """Return the policy as a function of rows, or say why it is none; `take_apart` is for when it has changed."""
    function = Actor.of(policy)
    if function is None or not all(isinstance(stage.module, nn.Module) for stage in function.stages):
        return "a module of it is more than a plain TensorDictModule: a class of its own, a hook, a keyword"
    states = states_of(outputs)
    if (states or any(stage.state_keys for stage in function.stages)) and (why := _no_step(function.stages, states)):
        return why
    written = _written(function.stages, outputs)
    if (family := _loop_family(function, setting.actions)) is None:
        return "its distribution is none that rlcli draws from"
    taken = numpy_dtype(outputs[ACTION].dtype)
    if taken is None or (setting.actions.encoded and taken != setting.actions.stored.dtype):
        return f"its actions are {dtype_name(outputs[ACTION].dtype)}"
    if (
        written is None
        or not written.keys().isdisjoint(setting.inputs)  # rows keep what the env showed
        or any(key not in written or len(written[key].shape) != 1 for key in function.param_keys)  # rows [N, k]
    ):
        return "what it writes is not float32, one row a step, beside what the env shows"
    options = None if setting.actions.kind == "box" else family.options(written[function.param_keys[0]].shape[0])
    if setting.actions.kind != "box" and (options is None or (np.asarray(options) - 1 > setting.actions.last).any()):
        return "it may choose what the env does not offer: each action is looked at"
    function = function._replace(family=family)
    drawn = function.chosen_key is None or family.explores  # type: ignore[attr-defined]
    mode, key = setting.exploration is not InteractionType.RANDOM or not drawn, function.log_prob_key
    shape = () if key is None else tuple(outputs[key].shape[1:])
    fast = FastActor(policy, take_apart, function, setting, written, taken, mode=mode, log_prob_shape=shape)
    return fast if fast.reads <= set(setting.inputs) else "it reads what the env does not show"


def _no_step(stages: Sequence[Stage], states: Sequence[Key]) -> str:
    """Say why the written `states` do not all go from rows to the next ones; "" where they do."""
    recurrent = [stage for stage in stages if stage.state_keys]
    if any(stage.module.runs_over_sequences for stage in recurrent):
        return "it runs over sequences where nothing says otherwise: default_recurrent_mode=True"
    if any(stage.out_keys[1:] != tuple(map(under_next, stage.state_keys)) for stage in recurrent):
        return "it writes its state under another name than it reads it"
    if sorted(show(key) for stage in recurrent for key in stage.state_keys) != sorted(map(show, states)):
        return "it writes its state under next, and is no GRUModule or LSTMModule"
    return ""


def _tried(
    policy: Any, setting: PolicyContext, legal: Callable[[Key, np.ndarray], np.ndarray]
) -> tuple[TensorDictBase, set[Key]]:
    """Return what one call on made-up observations gives, as it will explore, and which of them it overwrites.

    They are fixed, not zeros, which would hide a wrong weight; no random stream moves on.
    """
    rng, device = np.random.default_rng(0), setting.placement.policy
    shown = {
        key: np.asarray(rng.random((*setting.batch_size, *shape)) * (1 if dtype.kind == "f" else 2)).astype(dtype)
        for key, (shape, dtype) in setting.inputs.items()
    }
    if IS_INIT in shown:  # no episode begins: the rows of states are set where one does
        shown[IS_INIT][...] = False
    shown = {key: legal(key, value) for key, value in shown.items()}
    drawn = [device] if device is not None and device.type == "cuda" else []
    numpys, pythons = np.random.get_state(), random.getstate()
    try:
        with torch.inference_mode(False), torch.random.fork_rng(devices=drawn), torch.no_grad():
            given: dict = {key: torch.from_numpy(value.copy()) for key, value in shown.items()}
            flags = {name: torch.zeros(*setting.batch_size, 1, dtype=torch.bool) for name in END_FLAGS}
            td = TensorDict({**flags, **given}, setting.batch_size)
            if setting.placement.policy_is_elsewhere:
                td = td.to(device)
            called = partial(call, policy, where="its first call, on made-up observations", first=True)
            try:
                with set_interaction_type(setting.exploration):
                    example = called(td.clone(False)).cpu()
            except NumericsError:  # of NaN nothing is drawn; the first step refuses it, where evidence can be kept
                with set_interaction_type(InteractionType.DETERMINISTIC):
                    example = called(td).cpu()
    finally:
        np.random.set_state(numpys)
        random.setstate(pythons)
    left = ((key, example.get(key, None), value) for key, value in shown.items())
    return example, {key for key, now, was in left if now is not None and not np.array_equal(now.detach().numpy(), was)}


def _written(stages: Sequence[Stage], outputs: Outputs) -> Fields | None:
    """Return what the stages write, states apart, which have rows already; None where it is not all float32."""
    values = {key: outputs.get(key) for stage in stages for key in stage.out_keys}
    if any(value is None or value.dtype != torch.float32 for value in values.values()):
        return None
    states = {under_next(key) for stage in stages for key in stage.state_keys}
    return {
        key: Field(tuple(value.shape[1:]), np.dtype(np.float32))
        for key, value in values.items()
        if value is not None and key not in states
    }


def _loop_family(function: Actor, actions: ActionFormat) -> Family | None:
    """Return the family that draws the loop's actions: indices even where one-hots are stored."""
    family = function.family
    if function.action_key != ACTION or (actions.kind == "box" and actions.dtype.kind != "f"):
        return None
    if function.chosen_key is not None:  # of action values
        return family if actions.kind == "discrete" and function.one_hot == actions.encoded else None
    index = family.index
    if (index is not None) is not actions.encoded:
        return None
    if index is None:
        return family
    nvec = getattr(index, "nvec", None)
    return index if (actions.kind == "discrete" if nvec is None else nvec == actions.nvec) else None
