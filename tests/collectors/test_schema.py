"""`collector.schema` says of every batch what it holds, before there is one."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import Counter, Walk

from rlcli.collectors import Collector
from rlcli.data.next_obs import Rows
from rlcli.envs import GymEnv, SerialEnv, TransformedEnv
from rlcli.keys import POLICY_VERSION, TRAJ_IDS, under_next, unravel
from rlcli.specs.field import LATE, NONE, PASS, ROW
from rlcli.transforms import Compose, InitTracker, RewardSum, StepCounter


def dtype_of(entry) -> torch.dtype:
    dtype = entry.dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.from_numpy(np.empty(0, dtype)).dtype


def foretold(schema) -> dict:
    """Key -> (shape, dtype) of a batch, next observations included."""
    found = {unravel(key): (entry.shape, dtype_of(entry)) for key, entry in schema.delivered.items()}
    if schema.mode == "compact":
        found = {key: kind for key, kind in found.items() if key not in schema.copies}
    else:
        found |= {unravel(key): (entry.shape, dtype_of(entry)) for key, entry in schema.copies.items()}
    return found | {unravel(under_next(key)): found[unravel(key)] for key in schema.with_next}


def held(batch) -> dict:
    return {
        unravel(key): (tuple(x.shape[batch.ndim :]), x.dtype)
        for key, x in batch.items(True, True)
        if isinstance(x, torch.Tensor | Rows)
    }


def lazy_policy(td):
    """Called on a tensordict, for nobody can see what it writes before it is called."""
    action = (td["observation"].sum(-1) % 3).long()
    return td.set("action", action).set("half", td["observation"].to(torch.bfloat16))


TRANSFORMS = {"none": [], "counted": [StepCounter, InitTracker], "summed": [RewardSum, InitTracker]}


@settings(max_examples=40, deadline=None)
@given(
    mode=st.sampled_from(["full", "compact", "exact"]),
    transforms=st.sampled_from(sorted(TRANSFORMS)),
    policy=st.sampled_from([None, lazy_policy]),
    lanes=st.sampled_from([0, 2]),
    keep=st.sampled_from(
        [None, ["observation", "action", ("next", "reward")], ["observation", ("next", "observation"), "action"]]
    ),
    ids=st.booleans(),
    version=st.booleans(),
)
def test_batches_hold_what_their_schema_says(mode, transforms, policy, lanes, keep, ids, version):
    make = lambda: GymEnv(Counter(), categorical_action_encoding=True)  # noqa: E731
    env = SerialEnv(lanes, make) if lanes else make()
    parts = [make() for make in TRANSFORMS[transforms]]
    collector = Collector(
        TransformedEnv(env, Compose(*parts)) if parts else env, policy, frames_per_batch=12, seed=0, next_obs=mode,
        keep_keys=keep, track_traj_ids=ids, track_policy_version=version,
    )  # fmt: skip
    before = collector.schema
    batch = collector.rollout()
    schema = collector.schema
    assert held(batch) == foretold(schema)
    assert set(schema.late) == ({"half"} if policy is not None else set())
    assert schema.fields == before.fields and (policy is not None or schema is before)
    assert (TRAJ_IDS in schema.delivered) == (ids and keep is None)
    assert (POLICY_VERSION in schema.delivered) == (version and keep is None)
    collector.rollout()
    assert collector.schema is schema


def test_a_schema_is_a_value_that_can_be_sent():
    env = TransformedEnv(SerialEnv(2, lambda: GymEnv(Walk(), narrow=True)), StepCounter())
    collector = Collector(env, frames_per_batch=12, seed=0, next_obs="exact")
    collector.rollout()
    sent = pickle.loads(pickle.dumps(collector.schema))
    assert sent == collector.schema and sent.delivered == collector.schema.delivered
    assert all(sent.delivers(key) == collector.schema.delivers(key) for key in ["place", "nobody's", ("_raw", "place")])
    with pytest.raises(AttributeError):
        sent.mode = "full"


def test_fields_say_when_they_are_written():
    env = TransformedEnv(GymEnv(Walk(), narrow=True), RewardSum())
    schema = Collector(env, frames_per_batch=4, seed=0).schema
    fields = schema.fields
    assert fields["place"].written == ROW and fields["place"].next != NONE
    assert fields["episode_reward"].written == PASS and under_next("episode_reward") in schema.copies
    late = schema.with_late({"h": torch.zeros(1, 4, 2, dtype=torch.bfloat16)})
    assert late.delivered["h"].written == LATE and late.delivered["h"].shape == (2,)
    assert late.with_late({"h": torch.zeros(1, 4, 2)}) is late and schema.late == {}
