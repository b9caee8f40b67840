"""Actors: what a policy reads and writes, known before a batch; what is refused of its outputs. `rows` acts."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_leaf_nontensor
from tensordict.nn import InteractionType
from torch import nn

from rlcli.errors import ArgumentError, NumericsError, RlcliError, in_words
from rlcli.keys import ACTION, END_FLAGS, NEXT, STEP_RESULTS, Key, as_tuple, show, unravel
from rlcli.modules.actor import Actor
from rlcli.modules.watch import ModuleWatch
from rlcli.specs.dtypes import dtype_name, torch_dtype
from rlcli.specs.field import Field, Fields
from rlcli.transforms.base import Transform
from rlcli.transforms.primer import TensorDictPrimer
from rlcli.vec_envs.actions import ActionFormat
from rlcli.vec_envs.vec_env import VecEnv

if TYPE_CHECKING:
    from rlcli.collectors.actors.on_device import OnDevice
    from rlcli.collectors.batch import Columns
    from rlcli.collectors.devices import Placement
    from rlcli.envs.late_columns import LateColumns

Outputs = dict[Key, torch.Tensor]


@dataclass(frozen=True)
class PolicyContext:
    """Describe what a policy acts in."""

    actions: ActionFormat  # what it has to write
    inputs: Fields  # all that it may be shown
    batch_size: torch.Size  # the env's: `()`, the policy sees `[*obs]`, or `(N,)`
    placement: Placement
    exploration: InteractionType | None  # None leaves distributions their own way
    flags: Callable[[], Mapping[str, torch.Tensor]] | None = None  # end flags of the root; all are False without it

    def outputs(self, out: TensorDictBase, shown: Set[Key] = frozenset()) -> Outputs:
        """Return what the policy wrote beside what it was shown, `[N, *shape]`, if it fits the env."""
        outputs: Outputs = {}
        dims = len(self.batch_size)
        for key, value in out.items(True, True, is_leaf=is_leaf_nontensor):
            key = unravel(key)
            if key in shown or key in self.inputs or key in END_FLAGS:
                continue
            if not isinstance(value, torch.Tensor):
                raise ArgumentError(
                    f"the policy's {show(key)} is no tensor",
                    why=f"it is a {type(value).__name__}, and a batch holds columns of numbers",
                    fix="Write tensors, or leave the key out.",
                )
            if value.shape[:dims] != self.batch_size:
                raise ArgumentError(
                    f"the policy's {show(key)} has no row for each env",
                    why=f"expected a shape that begins with {tuple(self.batch_size)}, got {tuple(value.shape)}",
                )
            parts = as_tuple(key)
            if parts[0] == NEXT:
                self._check_state(unravel(parts[1:]), value, dims)
            outputs[key] = value.detach() if dims else value.detach()[None]
        action = outputs.get(ACTION)
        if action is None:
            raise ArgumentError(
                "the policy wrote no action", why=f"it wrote {', '.join(map(show, outputs)) or 'nothing'}",
                fix="Write the key 'action'.",
            )  # fmt: skip
        (shape, dtype), taken = self.actions.stored, tuple(action.shape[1:])
        if taken != shape:
            raise ArgumentError(
                "the policy's action does not fit the env", why=f"expected shape {shape} a step, got {taken}",
                fix="Discrete actions are one-hot unless the env has categorical_action_encoding=True."
                if self.actions.kind == "discrete"
                else None,
            )  # fmt: skip
        parts_of_one = action.is_floating_point() or action.is_complex()
        if dtype.kind in "iub" and parts_of_one and not self.actions.encoded:
            raise ArgumentError(
                "the policy's action does not fit the env", why=f"expected {dtype}, got {dtype_name(action.dtype)}"
            )
        return outputs

    def _check_state(self, key: Key, value: torch.Tensor, dims: int) -> None:
        if key not in self.inputs:
            raise no_place(key)
        shape, dtype = self.inputs[key]
        got = tuple(value.shape[dims:])
        if (got, value.dtype) != (shape, torch_dtype(dtype)):
            raise ArgumentError(
                f"the policy's next.{show(key)} does not fit the env's {show(key)}",
                why=f"expected {shape} {dtype} a step, got {got} {dtype_name(value.dtype)}",
                fix=f"Give the primer of {show(key)} that shape and dtype.",
            )


class ActorRunner:
    """Know what a policy reads and writes; `bind` makes it ready to act."""

    bound: str  # file and class of what acts on a batch's rows, loaded with the first batch
    reads: set[Key]  # from the rows; transforms that write them must run inside the loop
    live: Fields  # written row by row
    once: Fields  # written once per batch, as whole columns
    log_prob_key: Key | None = None
    log_prob_shape: tuple[int, ...] = ()
    states: Sequence[Key] = ()  # root keys whose next value it writes: row t+1 at step t
    rewrites: Set[Key] = frozenset()  # read and written anew at the root; the rows keep what was read
    calls: bool = False  # code of the user's, which may draw from torch's global stream and keep tensors
    late: LateColumns | None = None  # further columns, where the first step shows what is written

    def bind(self, columns: Columns, lanes: int, states: States) -> Any:
        """Return the `BoundActor` of these rows; `states` says what may be written under `next`."""
        file, _, name = self.bound.partition(":")
        return getattr(importlib.import_module(f"rlcli.collectors.actors.{file}"), name)(self, columns, lanes, states)

    def act_with(self, policy: Any) -> None:
        """Act with this copy of the policy from now on."""

    def refresh(self) -> None:
        """See, as a batch begins, whether the policy is still made of what it was made of."""


# ---- what a policy of the user's raises or writes amiss: said before the env is stepped ------------------------------
NOT_STEPPED = "step {} of the batch; the env was not stepped"


def states_of(outputs: Outputs) -> list[Key]:
    """Return the keys of the states that a policy writes under `next`."""
    return [unravel(as_tuple(key)[1:]) for key in outputs if as_tuple(key)[0] == NEXT]


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


def changed_output(key: Key, value: Any, row: torch.Tensor, kind: torch.dtype, t: int) -> ArgumentError:
    """Return the error for an output of another shape or dtype, or none."""
    if isinstance(value, torch.Tensor):
        got = f"{tuple(value.shape)} {value.dtype}"
    else:
        got = "nothing" if value is None else f"a {type(value).__name__}"
    return ArgumentError(
        f"the policy's {show(key)} is not what it was on its first call", where=NOT_STEPPED.format(t),
        why=f"expected {tuple(row.shape)} {kind}, got {got}",
    )  # fmt: skip


def not_finite(key: Key, where: str) -> NumericsError:
    """Return the error for an output that is NaN or infinite."""
    return NumericsError(
        f"the policy's {show(key)} is not finite", where=where, why="a weight or an observation is NaN or infinite",
        fix="Lower optim.lr, or set env.normalize_observation=true.",
    )  # fmt: skip


# ---- recurrent states ----------------------------------------------------------------------------------------------
class States:
    """Hold the keys that a policy may carry, and who else writes them.

    A `TensorDictPrimer` among the `transforms` on rows, or `below` them, gives a key its rows and, at resets, its
    default; ("next", key) of step t is row t+1. Who writes none (random actions, a policy that only reads) keeps it.
    """

    def __init__(
        self, transforms: Sequence[Transform], below: Iterable[Transform], vec_env: VecEnv, rows: Fields
    ) -> None:  # fmt: skip
        self.transforms, self.vec_env, self.rows = transforms, vec_env, rows
        self._on_rows, inside = (
            [key for t in parts if isinstance(t, TensorDictPrimer) for key in t.out_keys]
            for parts in (transforms, below)
        )
        self.primed = [*self._on_rows, *inside]

    def learn(self, states: Sequence[Key], rewrites: Set[Key]) -> None:
        """Learn what the policy writes for the next step, and which of the keys that it reads it writes anew."""
        for key in states:
            writers = [
                type(t).__name__
                for t in self.transforms
                if not isinstance(t, TensorDictPrimer) and key in t.writes(self.rows)
            ]
            if key in self.vec_env.schema and not self.vec_env.on_tensordicts:
                writers.append(self.vec_env.name)
            if writers:
                raise ArgumentError(
                    f"the policy writes next.{show(key)}, which {writers[0]} writes",
                    why="one of the two would be lost", fix="Give the policy's state a name of its own.",
                )  # fmt: skip
        for key in self.primed:
            if key in rewrites and key not in states:
                raise ArgumentError(
                    f"the policy overwrites {show(key)}, the state that it reads",
                    why="row t keeps the state that step t began with; the new one belongs to the next step",
                    fix=f"Write ('next', {key!r})." if isinstance(key, str) else f"Write {('next', *key)!r}.",
                )
        self.vec_env.carry(states)  # of primers inside the env

    def held(self, states: Sequence[Key]) -> list[Key]:
        """Return the keys whose rows go from step to step where nobody writes them."""
        return [key for key in [*self._on_rows, *self.vec_env.states] if key not in states]


def no_place(key: Key, *, by_itself: bool = False) -> ArgumentError:
    if key in STEP_RESULTS:
        return ArgumentError(f"the policy writes next.{show(key)}", why="reward and end flags are the env's to write")
    name = repr(key)
    return ArgumentError(
        f"the policy is recurrent, but nothing carries its state {show(key)} from step to step",
        why=f"it writes next.{show(key)}, and the env has no {show(key)} to hold it",
        fix="Leave auto_register_policy_transforms=True, or use "
        "TransformedEnv(env, Compose(InitTracker(), module.make_tensordict_primer()))."
        if by_itself
        else f"Use TransformedEnv(env, TensorDictPrimer({{{name}: Unbounded((size,))}})), "
        "or give the module a make_tensordict_primer() that returns it.",
    )


# ---- no policy -------------------------------------------------------------------------------------------------------
class RandomActor(ActorRunner):
    """Draw uniform actions of the action space, or of those that a mask allows; without a policy.

    Under `log_prob_key` goes the log-density of that law, float32, one number or one a dim as the policy writes its.
    """

    bound = "rows:BoundRandom"

    def __init__(
        self, actions: ActionFormat, log_prob_key: Key | None = None, log_prob_shape: tuple[int, ...] = (),
        mask_key: Key | None = None,
    ) -> None:  # fmt: skip
        self.actions, self.log_prob_key, self.log_prob_shape = actions, log_prob_key, log_prob_shape
        self.mask_key = mask_key
        self.reads = set() if mask_key is None else {mask_key}
        self.live: Fields = {}
        self.once: Fields = {ACTION: actions.stored}
        if log_prob_key is not None:
            self.once[log_prob_key] = Field(log_prob_shape, np.dtype(np.float32))


class FastActor(ActorRunner):
    """Run a policy as a function of rows, taken apart again when it has changed, and draw with noise drawn ahead."""

    bound = "rows:BoundFastActor"

    def __init__(
        self, policy: nn.Module, take_apart: Callable[[Any], ActorRunner], function: Actor, setting: PolicyContext,
        written: Fields, taken: np.dtype, *, mode: bool, log_prob_shape: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self._policy, self._take_apart = policy, take_apart
        self._watch: ModuleWatch[nn.Module] = ModuleWatch(policy)
        self.function, self.setting, self.written, self.taken, self.mode = function, setting, written, taken, mode
        self.actions, stages = setting.actions, function.stages
        flat = {key for key, (shape, _) in written.items() if len(shape) == 1}
        self.layers = [stage.layers if flat.issuperset(stage.out_keys) else None for stage in stages]
        self.cells = [stage.cells if stage.state_keys else None for stage in stages]
        self.calls = any(
            layers is None and cells is None and not stage.only_reads
            for stage, layers, cells in zip(stages, self.layers, self.cells, strict=True)
        )
        if self.calls:  # a module of somebody's: all are called, on tensors of each step's own
            self.layers, self.cells = [None] * len(stages), [None] * len(stages)
        pairs = zip(stages, self.cells, strict=True)  # not is_init of cells: their rows are reset
        read = (stage.in_keys if cells is None else stage.in_keys[:-1] for stage, cells in pairs)
        self.reads = {key for keys in read for key in keys} - set(written)
        self.states = [key for stage in stages for key in stage.state_keys]
        # features are a part of the state, which is looked at: where nobody wants them they need no column
        others = {key for stage in stages if not stage.state_keys for key in stage.out_keys}
        self.passing = {stage.out_keys[0] for stage in stages if stage.state_keys} - others - {*function.param_keys}
        self.live: Fields = {}
        self.once: Fields = {**written, ACTION: Field(self.actions.stored.shape, taken)}
        self.log_prob_key, self.log_prob_shape = function.log_prob_key, log_prob_shape
        if self.log_prob_key is not None:
            self.once[self.log_prob_key] = Field(log_prob_shape, np.dtype(np.float32))
        if function.chosen_key is not None:
            self.once[function.chosen_key] = Field((1,), np.dtype(np.float32))
        self.version = 0  # of the function
        self.on_device: OnDevice | None = None  # where it acts elsewhere, from its first step on

    def refresh(self) -> None:
        if self._watch.version:
            self.act_with(self._policy)

    def act_with(self, policy: Any) -> None:
        """Take a policy apart in the place of the one before."""
        new = self._take_apart(policy)
        before, after = ((actor.reads, actor.once, actor.states) for actor in (self, new))
        if not isinstance(new, FastActor) or before != after:
            raise ArgumentError(
                "the policy was changed after its collector was made",
                why="what it reads and writes, or where it is hooked, decided how its batches are laid out",
                fix="Make a new collector after such changes.",
            )
        self.function, self.layers, self.cells, self.calls = new.function, new.layers, new.cells, new.calls
        self._policy, self._watch, self.on_device = policy, new._watch, None
        self.version += 1
