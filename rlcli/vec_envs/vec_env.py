"""The vectorised env that the collector's loop steps: N envs together, straight into preallocated rows.

A `VecEnv` knows nothing of TensorDicts, policies or batches beyond the rows it was bound to: `rows[key][t]` is an
array `[N, *shape]`, row t+1 receives the true successors of step t.  What steps gave beside observations is an
`Outcome`.  Episodes are kept in `episodes.py`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlcli.keys import Key
from rlcli.specs.field import Fields
from rlcli.vec_envs.actions import ActionFormat
from rlcli.vec_envs.bounds import Bounds
from rlcli.vec_envs.contract import broken
from rlcli.vec_envs.episodes import Episodes
from rlcli.vec_envs.observations import NUMBERS, number_of

NONE: Sequence[int] = ()
SUCCESS = "is_success"  # what goal envs call it in their `info`
Rows = dict[Key, list[np.ndarray]]
_LARGEST = float(np.finfo(np.float32).max)
_WHOLE = 2.0**24  # beyond it float32 no longer holds every whole number


@dataclass
class Outcome:
    """The things that one batch of steps gave beside observations.

    `rewards`: as the envs returned them, in (t, lane) order, `T * N` of them.
    `reward_rows` (float64 `[N]`): in their place, one a step, where an engine returned them together, ours to keep.
    `ends`: (t, lane, terminated, truncated) of every step that ended an episode, in (t, lane) order.
    `infos`: (t, lane) of such a step -> what was kept of its `info`, where there is something.
    """

    rewards: list = field(default_factory=list)
    reward_rows: list[np.ndarray] = field(default_factory=list)
    ends: list[tuple[int, int, bool, bool]] = field(default_factory=list)
    infos: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict)

    def last_rewards(self, n: int) -> Sequence | np.ndarray:
        """Of the last step of `n` lanes."""
        return self.reward_rows[-1] if self.reward_rows else self.rewards[-n:]


class VecEnv(Episodes):
    """Base of all vectorised envs.

    `name`: of the env, for error messages.
    `schema`: observation key -> its field, without the lane dim, of numpy's dtype.
    `limits`: steps after which each env truncates its episodes, where it does not do so itself.
    `outcome`: filled while stepping; taken and replaced by `take_outcome` at the end of a batch.
    `bounds`: what observations must stay within; who hands them on looks at them first.
    `resets_running_lanes`: whether an episode can be cut before it ends by itself, as `limit_frames` asks.
    `rewards`: where the lanes step transforms themselves: what those made of the last step's rewards.
    `checks_bounds`: whether every step looks at `bounds` by itself.
    `on_tensordicts`: whether steps are taken on tensordicts, by code that may keep what it is given and draw from
    torch's stream.
    `acting`: what chose the action of this step, where the env is handed all that it wrote, not the action alone.
    `resets_follow`: whether who steps the lanes now resets those that finish before the next step: then they may be
    reset within the step. What is shown, and what a reset gives or raises, stays the same.
    `ends_what_hangs`: whether who steps the lanes looks at `step_timeout` by itself.
    `held`: of `schema`, what resets write and steps do not: it stays as it is, and has no next value.
    `late`: columns beside those of `schema`, where the lanes cannot know before the first step what they write.
    """

    resets_running_lanes = True
    rewards: list[float] | None = None
    checks_bounds = False
    resets_follow = False
    ends_what_hangs = False
    on_tensordicts = False
    acting: Any = None
    held: Set[Key] = frozenset()
    late: Any = None

    def __init__(
        self, n: int, *, name: str, schema: Fields, actions: ActionFormat, limits: Sequence[int] | None = None
    ) -> None:
        super().__init__(n, limits)
        self.name, self.schema, self.actions = name, schema, actions
        self.outcome = Outcome()
        self.reported_rounding = False  # of rewards
        self.step_timeout: float | None = None  # seconds after which a step that has not returned is ended
        self.bounds = Bounds()
        self.info_keys: tuple[str, ...] = (SUCCESS,)

    def keep_info(self, keys: Sequence[str]) -> None:
        """Keep these numbers and flags of the `info` of steps that end an episode, beside `is_success`."""
        self.info_keys = tuple(dict.fromkeys((SUCCESS, *keys)))

    def bind(self, rows: Rows) -> tuple[Callable, Callable]:
        """`step(t, actions) -> finished lanes` and `reset(t, lanes)`, both writing into row t+1."""
        raise NotImplementedError

    def restart(self, row: dict[Key, np.ndarray], lanes: Sequence[int]) -> None:
        """Begin a new episode in these lanes and write its first observation into `row[key][lane]`."""
        raise NotImplementedError

    def unanswered(self) -> range | None:
        """Return the lanes whose answer is waited for, where they are stepped elsewhere."""
        return None

    def moved(self) -> Any:
        """Return what is another after each step and each reset, whatever it was for."""
        return self.clock[0], len(self.outcome.rewards), sum(self.episodes), self.tried[0]

    def look(self) -> bool:
        """Before the first episode: whether what is shown is other than `schema` said, which is right from now on."""
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
        """Plain values and arrays from which `load_state_dict` brings the envs back, as far as it can."""
        return {}

    def load_state_dict(self, state: dict[str, Any], *, replay: bool) -> list[int]:
        """Bring the envs back; the lanes for which that was not exact (all of them, unless a subclass knows how)."""
        return list(range(self.n))

    def close(self) -> None:
        """Release the envs."""


def numbers_of(info: Any, keys: Sequence[str], lane: int | None = None) -> dict[str, float]:
    """Return the finite numbers and flags that an `info` holds under keys; `a.b` is b in the mapping a.

    `lane`: whose they are, where an engine gives arrays with the lanes first, and masks of them under `_key`.
    """
    found = {}
    for key in keys if isinstance(info, Mapping) else ():
        value, known = info, True
        for name in (key,) if key in info else key.split("."):
            if not isinstance(value, Mapping) or name not in value:
                known = False
                break
            known = known and (lane is None or f"_{name}" not in value or bool(value[f"_{name}"][lane]))
            value = value[name]
        if known and lane is not None and not isinstance(value, Mapping) and np.ndim(value):
            value = np.asarray(value)[lane]
        if known and np.size(value) == 1 and np.asarray(value).dtype.kind in "biuf":
            number = float(np.asarray(value).item())
            if math.isfinite(number):
                found[key] = number
    return found


# ---- the check of rewards, once a batch is over ---------------------------------------------------------------------
def reward_column(outcome: Outcome, vec_env: Any, steps: int, out: np.ndarray, *, past: bool = True) -> None:
    """Check the rewards of a batch and write them into `out` `[N, T]` float32; `past`: the batch's resets are done.

    Warn once an env of a reward so large that float32 rounds it to another whole number.
    """
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
            found = number_of(value)
            if found is None:
                several = math.prod(getattr(value, "shape", ())) > 1
                raise broken(
                    vec_env, "the reward is not a number", lane=index % vec_env.n,
                    at=(index // vec_env.n, outcome.ends) if past else None,
                    expected="a float", got=f"{value!r} ({type(value).__name__})",
                    fix=f"Weigh its parts into one: 'env.wrappers=[{{LinearReward: {{weight: {[1] * len(value)}}}}}]'."
                    if several and value.ndim == 1 else None,
                )  # fmt: skip
            outcome.rewards[index] = found
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
