"""The vectorised env that the collector's loop steps: N envs together, straight into preallocated rows.

A `VecEnv` knows nothing of TensorDicts, policies or batches beyond the rows it was bound to: `rows[key][t]` is an
array `[N, *shape]`, row t+1 receives the true successors of step t.  What steps gave beside observations is an
`Outcome`.  Episodes are kept in `episodes.py`.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np

from rlcli.keys import Key
from rlcli.specs.field import Fields
from rlcli.vec_envs.actions import ActionFormat
from rlcli.vec_envs.bounds import Bounds
from rlcli.vec_envs.episodes import Episodes, broken, place_of
from rlcli.vec_envs.observations import NUMBERS, number_of

NONE: Sequence[int] = ()
SUCCESS = "is_success"  # what goal envs call it in their `info`
Rows = dict[Key, list[np.ndarray]]
_ROOMS = ("rlcli.vec_envs.", "rlcli.envs.")  # whose code calls envs
_LARGEST = float(np.finfo(np.float32).max)
_WHOLE = 2.0**24  # beyond it float32 no longer holds every whole number


@dataclass
class Outcome:
    """Hold what one batch of steps gave beside observations."""

    rewards: list = field(default_factory=list)  # T * N in (t, env) order, as the envs returned them
    # float64 [N] a step, in place of `rewards`, where an engine returns them together
    reward_rows: list[np.ndarray] = field(default_factory=list)
    # (t, env, terminated, truncated) of each step that ended an episode, in order
    ends: list[tuple[int, int, bool, bool]] = field(default_factory=list)
    # (t, env) of such a step -> the numbers kept of its info
    infos: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict)

    def last_rewards(self, n: int) -> Sequence | np.ndarray:
        """Return the rewards of the last step of `n` envs."""
        return self.reward_rows[-1] if self.reward_rows else self.rewards[-n:]


class VecEnv(Episodes):
    """Base of all vectorised envs."""

    resets_running_lanes = True  # an episode can be cut before it ends by itself
    rewards: list[float] | None = None  # of the last step, where transforms are stepped inside
    checks_bounds = False  # each step looks at `bounds` by itself
    resets_follow = False  # the caller resets finished envs before the next step: they may be reset within this one
    during = "step"  # what is called of the envs now, or was last
    on_tensordicts = False  # steps call code that may keep what it is given and draw from torch's stream
    device: Any = None  # where what it shows lies, of an engine whose steps are tensors
    env: Any = None  # the env that is stepped on tensordicts
    below: VecEnv | None = None  # of an env of ours that is stepped so, its own lanes: they count what anybody does
    states: Sequence[Key] = ()  # see `carry`
    held: Set[Key] = frozenset()  # keys of `schema` that only resets write: they have no next value
    late: Any = None  # columns beside `schema`, unknown before the first step

    def __init__(
        self, n: int, *, name: str, schema: Fields, actions: ActionFormat, limits: Sequence[int] | None = None
    ) -> None:
        super().__init__(n, limits)
        self.name, self.schema, self.actions = name, schema, actions  # without the env dim, of numpy's dtype
        self.outcome = Outcome()
        self.reported_rounding = False  # of rewards
        self.step_timeout: float | None = None  # seconds after which a step or a reset is ended
        self.bounds = Bounds()  # whoever hands observations on looks at them first
        self.info_keys: tuple[str, ...] = (SUCCESS,)

    def keep_info(self, keys: Sequence[str]) -> None:
        """Keep these numbers and flags of the `info` of steps that end an episode, beside `is_success`."""
        self.info_keys = tuple(dict.fromkeys((SUCCESS, *keys)))

    def interrupt_by(self, check: Callable[[], object]) -> None:
        """Call `check`, which may raise, while a step waits for other processes."""

    def act_by(self, actor: Any) -> None:
        """Read, where the env is stepped on tensordicts, all that `actor` writes beside its actions."""

    def carry(self, states: Sequence[Key]) -> None:
        """Read, where the env is stepped on tensordicts, these keys of `schema` that a policy writes under `next`."""

    def bind(self, rows: Rows) -> tuple[Callable, Callable]:
        """Return `step(t, actions) -> finished lanes` and `reset(t, lanes)`, both writing into row t+1."""
        raise NotImplementedError

    def restart(self, row: dict[Key, np.ndarray], lanes: Sequence[int]) -> None:
        """Begin a new episode in these lanes and write its first observation into `row[key][lane]`."""
        raise NotImplementedError

    def moved(self) -> Any:
        """Return what is another after each step and each reset, whatever it was for."""
        return self.clock[0], len(self.outcome.rewards), sum(self.episodes), self.tried[0]

    @contextlib.contextmanager
    def doing(self, during: str) -> Iterator[None]:
        """Call envs for something else than steps."""
        before, self.during = self.during, during
        try:
            yield
        finally:
            self.during = before

    def hanging(self, innermost: FrameType | None) -> tuple[str, str]:
        """Return the env, its lane and step; and the line of code that has not returned."""
        lane, inside, frame = None, False, innermost
        while frame is not None and lane is None:
            if frame.f_globals.get("__name__", "").startswith(_ROOMS):
                inside, lane = True, frame.f_locals.get("lane")
            frame = frame.f_back
        during = self.during if inside else "the policy, or a transform"
        line = "" if innermost is None else f" at {innermost.f_code.co_filename}:{innermost.f_lineno}"
        return place_of(self, lane), f"{during} has not returned{line}"

    def look(self) -> bool:
        """Reset once, correct `schema` from what comes back; True if it changed."""
        return False

    def take_outcome(self) -> Outcome:
        """Return the outcome of the steps since the last call."""
        self.trim_history()
        taken, self.outcome = self.outcome, Outcome()
        return taken

    def is_replayable(self) -> bool:
        """Say whether seeded episodes repeat exactly; finding out leaves the envs in need of a reset."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and arrays from which `load_state_dict` brings the envs back, as far as it can."""
        return {}

    def load_state_dict(self, state: dict[str, Any], *, replay: bool) -> list[int]:
        """Bring the envs back; the lanes for which that was not exact (all of them, unless a subclass knows how)."""
        return list(range(self.n))

    def close(self) -> None:
        """Release the envs."""


def numbers_of(info: Any, keys: Sequence[str], lane: int | None = None) -> dict[str, float]:
    """Return the finite numbers and flags of an `info` under keys (`a.b`: b in mapping a), of one `lane`."""
    numbers = {}
    for key in keys if isinstance(info, Mapping) else ():
        value, present = info, True
        for name in (key,) if key in info else key.split("."):
            if not isinstance(value, Mapping) or name not in value:
                present = False
                break
            present = present and (lane is None or f"_{name}" not in value or bool(value[f"_{name}"][lane]))
            value = value[name]
        if present and lane is not None and not isinstance(value, Mapping) and np.ndim(value):
            value = np.asarray(value)[lane]
        if present and np.size(value) == 1 and np.asarray(value).dtype.kind in "biuf":
            number = float(np.asarray(value).item())
            if math.isfinite(number):
                numbers[key] = number
    return numbers


# ---- the check of rewards, once a batch is over ---------------------------------------------------------------------
def reward_column(outcome: Outcome, vec_env: Any, steps: int, out: np.ndarray, *, past: bool = True) -> None:
    """Check the rewards of a batch and write them into `out` `[N, T]` float32; warns once of rounding."""
    values = np.concatenate(outcome.reward_rows) if outcome.reward_rows else _numbers(outcome, vec_env, past)
    size = np.abs(values).max(initial=0.0)
    if not size <= _LARGEST:  # NaN fails this too
        index = int(np.flatnonzero(~(np.abs(values) <= _LARGEST))[0])
        finite = np.isfinite(values[index])
        raise broken(
            vec_env, "the reward is too large" if finite else "the reward is not finite",
            lane=index % vec_env.n, at=(index // vec_env.n, outcome.ends) if past else None,
            expected="what float32 can hold" if finite else "a finite number", got=f"{values[index]:g}",
        )  # fmt: skip
    out[...] = values.reshape(steps, vec_env.n).T
    if size > _WHOLE and not vec_env.reported_rounding:
        _warn_of_rounding(vec_env, values)


def _numbers(outcome: Outcome, vec_env: Any, past: bool) -> np.ndarray:
    """Return what single envs returned, as float64; infinite where that cannot hold it."""
    if not all(issubclass(kind, NUMBERS) for kind in set(map(type, outcome.rewards))):
        for index, value in enumerate(outcome.rewards):
            number = number_of(value)
            if number is None:
                several = math.prod(getattr(value, "shape", ())) > 1
                raise broken(
                    vec_env, "the reward is not a number", lane=index % vec_env.n,
                    at=(index // vec_env.n, outcome.ends) if past else None,
                    expected="a float", got=f"{value!r} ({type(value).__name__})",
                    fix=f"Weigh its parts into one: 'env.wrappers=[{{LinearReward: {{weight: {[1] * len(value)}}}}}]'."
                    if several and value.ndim == 1 else None,
                )  # fmt: skip
            outcome.rewards[index] = number
    try:
        return np.fromiter(outcome.rewards, np.float64, len(outcome.rewards))
    except OverflowError:  # Python's integers have no bounds
        return np.array([value if abs(value) <= _LARGEST else np.inf for value in outcome.rewards], np.float64)


def _warn_of_rounding(vec_env: Any, values: np.ndarray) -> None:
    kept = values.astype(np.float32)
    changed = np.flatnonzero((np.abs(values) > _WHOLE) & (kept != values))
    if len(changed):
        vec_env.reported_rounding = True
        was, now = values[changed[0]], kept[changed[0]]
        warnings.warn(
            f"env {vec_env.name}: rewards are stored as float32, which turns {was:.17g} into {now:.17g}; "
            "scale them down if such differences matter",
            stacklevel=3,
        )
