"""The names under which every stage finds its tensors, each defined once."""

from __future__ import annotations

Key = str | tuple[str, ...]

OBSERVATION = "observation"
ACTION = "action"
SAMPLE_LOG_PROB = "sample_log_prob"
ACTION_LOG_PROB = "action_log_prob"  # the same in newer data of other libraries: read, never written unless asked for
ACTION_MASK = "action_mask"  # an observation of this name says which actions are allowed
IS_INIT = "is_init"
STEP_COUNT = "step_count"
EPISODE_REWARD = "episode_reward"
MASK = "mask"
RESET = "_reset"
RAW = "_raw"  # rows of what a transform has changed

NEXT = "next"
REWARD = ("next", "reward")
DONE = ("next", "done")
TERMINATED = ("next", "terminated")
TRUNCATED = ("next", "truncated")
END_FLAGS = ("done", "terminated", "truncated")

TRAJ_IDS = ("collector", "traj_ids")
POLICY_VERSION = ("collector", "policy_version")
COLLECTOR_MASK = ("collector", "mask")
BURN_IN = ("collector", "burn_in")

STATE_VALUE = "state_value"
ACTION_VALUE = "action_value"
CHOSEN_ACTION_VALUE = "chosen_action_value"
STATE_ACTION_VALUE = "state_action_value"
TD_ERROR = "td_error"
PRIORITY_WEIGHT = "priority_weight"
STEPS_TO_NEXT_OBS = "steps_to_next_obs"
ADVANTAGE = "advantage"
VALUE_TARGET = "value_target"
SHIFTED_VALID = "shifted_valid"
APPROXIMATED = "approximated"


STEP_RESULTS = ("reward", *END_FLAGS)  # what only an env's step writes, under `next`
INDEX = "index"  # of the rows of a buffer, in samples

# what batches, samples and losses hold of themselves at the root: no observation is called so
TAKEN = {NEXT, ACTION, RESET, RAW, SAMPLE_LOG_PROB, ACTION_LOG_PROB, TRAJ_IDS[0], *STEP_RESULTS}
TAKEN |= {MASK, SHIFTED_VALID, INDEX, TD_ERROR, PRIORITY_WEIGHT, STEPS_TO_NEXT_OBS, APPROXIMATED}
TAKEN |= {STATE_VALUE, ADVANTAGE, VALUE_TARGET}


def as_tuple(key: Key) -> tuple[str, ...]:
    """`"a"` and `("a",)` are the same key; this is its tuple spelling."""
    return (key,) if isinstance(key, str) else tuple(key)


def unravel(key: Key) -> Key:
    """Return the shortest spelling of a key: a plain string where it is not nested."""
    parts = as_tuple(key)
    return parts[0] if len(parts) == 1 else parts


def under_next(key: Key) -> tuple[str, ...]:
    """`("next", *key)`."""
    return (NEXT, *as_tuple(key))


# a next observation as its difference from the observation: what stands for it under `next`
DELTA_PARTS = DELTA, DELTA_SCALE, DELTA_KEPT = "delta", "delta_scale", "delta_kept"


def delta_key(key: Key) -> tuple[str, ...]:
    return (NEXT, DELTA, *as_tuple(key))


def scale_key(key: Key) -> tuple[str, ...]:
    return (NEXT, DELTA_SCALE, *as_tuple(key))


def kept_key(key: Key) -> tuple[str, ...]:
    """Return the key of next observations that no difference can stand for; zeros in all other rows."""
    return (NEXT, DELTA_KEPT, *as_tuple(key))


def show(key: Key) -> str:
    """Return a key as a person writes it: `next.observation`."""
    return ".".join(as_tuple(key))


def spell(key: Key) -> str:
    """`show`, with dots inside of names escaped: no two keys are spelled alike, so files can tell them apart."""
    return ".".join(part.replace("\\", "\\\\").replace(".", "\\.") for part in as_tuple(key))
