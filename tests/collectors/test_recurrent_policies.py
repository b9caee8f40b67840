"""A policy's state: read at row t, written for row t+1, at its default after a reset; carried over batches and resumes.

The oracle runs the policy's net over the stored rows by hand: every state and every action must come out again.
"""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from face import TensorDictActor, refused
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from worlds import Counter, dirty

from rlcli.collectors import Collector
from rlcli.envs import EnvBase, GymEnv, SerialEnv, TransformedEnv
from rlcli.errors import ArgumentError, EnvError, NumericsError
from rlcli.modules import Categorical, ProbabilisticActor
from rlcli.specs import OneHot, Unbounded
from rlcli.transforms import Compose, InitTracker, RunningNorm, StepCounter, TensorDictPrimer

DEFAULT = 0.5
LENGTHS = [(3, 1, 5), (1, 1, 4), (2, 7)]
SIZE = 5


class Memory(nn.Module):
    """A GRU cell and a choice; the state decides as much as the observation does."""

    def __init__(self, inputs=2, choices=3):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head, self.choices = nn.GRUCell(inputs, SIZE), nn.Linear(SIZE, choices), choices

    def forward(self, observation, h):
        batch = observation.shape[:-1]
        state = self.cell(observation.reshape(-1, observation.shape[-1]), h.reshape(-1, SIZE)).reshape(*batch, SIZE)
        return nn.functional.one_hot((8 * self.head(state)).argmax(-1), self.choices), state


class Primed(TensorDictModule):
    def make_tensordict_primer(self):
        return primer()


def primer():
    return TensorDictPrimer({"h": Unbounded((SIZE,))}, default_value=DEFAULT)


def policy(kind=TensorDictModule, net=None):
    return kind(net or Memory(), ["observation", "h"], ["action", ("next", "h")])


def worlds(lanes: int, *transforms) -> EnvBase:
    def make(lane):
        return lambda: GymEnv(Counter(LENGTHS[lane % 3]))

    env = SerialEnv(lanes, [make(lane) for lane in range(lanes)]) if lanes else make(0)()
    return TransformedEnv(env, Compose(*transforms)) if transforms else env


def with_primers_inside(lanes: int) -> EnvBase:
    return SerialEnv(
        lanes, [lambda i=i: TransformedEnv(worlds(0), Compose(InitTracker(), primer())) for i in range(lanes)]
    )


SOURCES = {
    "the policy's own primer": lambda lanes, **kwargs: Collector(worlds(lanes), policy(Primed), **kwargs),
    "the env's primer": lambda lanes, **kwargs: Collector(worlds(lanes, primer()), policy(), **kwargs),
    "primers inside a batched env": lambda lanes, **kwargs: Collector(
        with_primers_inside(lanes or 1), policy(), **kwargs
    ),
}


def wide(batch):
    """`[N, T]`, whether the env was batched or not."""
    return batch if batch.ndim == 2 else batch[None]


def assert_states_follow(batches, single: bool, net=None) -> int:
    """Row by row, as the loop called it: the last bits of a product depend on the number of rows; the episodes seen."""
    net, state, began, over = net or Memory(), None, 0, None
    for batch in map(wide, batches):
        done = batch["next", "done"][..., 0]
        for t in range(batch.shape[1]):
            first = torch.ones(len(batch), dtype=torch.bool) if over is None else over
            assert torch.equal(batch["is_init"][:, t, 0], first)
            fresh = torch.full((len(batch), SIZE), DEFAULT)
            state = fresh if state is None else torch.where(first[:, None], fresh, state)
            assert torch.equal(batch["h"][:, t], state), t
            with torch.no_grad():
                seen = batch["observation"][:, t].contiguous()
                action, state = net(seen[0], state[0]) if single else net(seen, state)
            action, state = (action[None], state[None]) if single else (action, state)
            assert torch.equal(batch["action"][:, t], action)
            over, began = done[:, t], began + int(first.sum())
    return began


@pytest.mark.parametrize("steps", [1, 3, 13])
@pytest.mark.parametrize("lanes", [0, 1, 3], ids=["single", "one of a batch", "three"])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.every(3)
def test_every_state_is_what_the_step_before_wrote(source, lanes, steps):
    collector = SOURCES[source](lanes, frames_per_batch=steps * (lanes or 1))
    batches = [collector.rollout() for _ in range(-(-24 // steps))]
    single = not collector.batched
    assert assert_states_follow(batches, single) > 6 * (lanes or 1)


@pytest.mark.parametrize("source", SOURCES)
def test_the_length_of_a_batch_changes_nothing(source):
    def collected(steps):
        collector = SOURCES[source](3, frames_per_batch=3 * steps)
        return torch.cat([collector.rollout() for _ in range(21 // steps)], 1)

    whole = collected(21)
    for steps in (1, 3, 7):
        parts = collected(steps)
        assert all(torch.equal(parts.get(key), whole.get(key)) for key in whole.keys(True, True))


def cartpoles(n, **kwargs):
    env = SerialEnv(n, lambda: GymEnv("CartPole-v1"))
    collector = Collector(env, policy(Primed, Memory(4, 2)), seed=3, episode_seeds=True, **kwargs)
    collector.vec_env.history_limit = 1000  # actions to replay open episodes from
    return collector


def test_a_resumed_collector_goes_on_with_the_same_memory():
    collector = cartpoles(3, frames_per_batch=3 * 11)
    before = [collector.rollout() for _ in range(3)]
    saved = pickle.dumps(collector.state_dict())
    expected = [collector.rollout() for _ in range(4)]
    assert bool((before[-1]["h"][:, -1] != DEFAULT).any())
    again = cartpoles(3, frames_per_batch=3 * 11)
    assert again.load_state_dict(pickle.loads(saved)) == []  # every env was brought back
    for batch in expected:
        got = again.rollout()
        assert all(torch.equal(got.get(key), batch.get(key)) for key in batch.keys(True, True))


def test_a_lane_that_a_resume_begins_anew_begins_with_the_default():
    collector = cartpoles(3, frames_per_batch=3 * 5)
    collector.rollout()
    again = cartpoles(3, frames_per_batch=3 * 5)
    assert again.load_state_dict(collector.state_dict(), replay=False) == [0, 1, 2]
    batch = again.rollout()
    assert bool((batch["h"][:, 0] == DEFAULT).all()) and bool(batch["is_init"][:, 0].all())


# ---- what is stored ----------------------------------------------------------------------------------------------
KEEP = ["observation", "action", "is_init", "h", ("next", "h"), ("next", "done")]


@pytest.mark.parametrize("mode", ["full", "compact", "exact"])
def test_a_list_of_keys_that_names_the_state_stores_it_at_the_root_alone(mode):
    batch = Collector(worlds(3), policy(Primed), frames_per_batch=60, next_obs=mode).rollout()
    assert batch["h"].shape == (3, 20, SIZE) and (("next", "h") in batch.keys(True)) == (mode != "compact")
    kept = Collector(worlds(3), policy(Primed), frames_per_batch=60, next_obs=mode, keep_keys=KEEP[:4]).rollout()
    assert torch.equal(kept["h"], batch["h"]) and ("next", "h") not in kept.keys(True)


@pytest.mark.parametrize("mode", ["full", "exact"])
def test_a_next_state_that_was_asked_for_is_the_one_that_was_written_at_ends_too(mode):
    collector = Collector(worlds(3), policy(Primed), frames_per_batch=60, next_obs=mode, keep_keys=KEEP)
    net, ends = Memory(), 0
    for _ in range(3):
        batch = collector.rollout()
        for t in range(20):
            with torch.no_grad():
                _, written = net(batch["observation"][:, t].contiguous(), batch["h"][:, t].contiguous())
            assert torch.equal(batch["next", "h"][:, t], written)
        ends += int(batch["next", "done"].sum())
    assert ends > 20


def test_compact_drops_the_next_state_even_when_asked():
    batch = Collector(worlds(3), policy(Primed), frames_per_batch=60, compact_obs=True, keep_keys=KEEP).rollout()
    assert batch["h"].shape == (3, 20, SIZE) and ("next", "h") not in batch.keys(True)


def test_a_state_that_is_not_stored_is_carried_all_the_same():
    stored = Collector(worlds(3), policy(Primed), frames_per_batch=60)
    without = Collector(worlds(3), policy(Primed), frames_per_batch=60, keep_keys=["observation", "action"])
    for _ in range(3):
        batch, other = stored.rollout(), without.rollout()
        assert other.get("h", None) is None and torch.equal(batch["action"], other["action"])


# ---- with other options ------------------------------------------------------------------------------------------
class Count(nn.Module):
    """A state that anyone can check: the steps since the reset."""

    def forward(self, observation, h):
        return nn.functional.one_hot(h.long() % 3, 3)[..., 0, :], h + 1


def counting(**kwargs):
    env = worlds(3, TensorDictPrimer({"h": Unbounded((1,))}))
    return Collector(env, policy(net=Count()), frames_per_batch=3 * 9, **kwargs)


def test_a_count_counts():
    collector = counting()
    for _ in range(4):
        batch = collector.rollout()
        assert torch.equal(batch["h"], batch["observation"][..., 1:])


@pytest.mark.parametrize("lanes", [0, 2])
def test_a_state_may_be_complex(lanes):
    def make():
        return worlds(lanes, TensorDictPrimer(h=Unbounded((1,), dtype=torch.complex64), default_value=1 + 1j))

    def turn(td):
        td["next", "h"] = td["h"] * 1j
        return td.set("action", nn.functional.one_hot(torch.zeros(td.shape, dtype=torch.int64), 3))

    env = make()
    env.set_seed(0)
    rolled = env.rollout(12, turn, break_when_any_done=False)
    batch = Collector(make(), turn, frames_per_batch=12 * (lanes or 1), seed=0).rollout()
    assert batch["h"].dtype == torch.complex64
    for key in ("h", ("next", "h"), "observation", ("next", "reward")):
        assert torch.equal(batch[key], rolled[key]), key


def test_resets_that_are_not_the_envs_own_reset_the_state():
    limited, renewed, waiting = counting(max_frames_per_traj=2), counting(reset_at_each_iter=True), counting()
    waiting = counting(reset_when_done=False)
    for _ in range(5):
        batch = limited.rollout()
        assert torch.equal(batch["h"].long(), batch["step_count"]) and int(batch["h"].max()) == 1
        batch = renewed.rollout()
        assert torch.equal(batch["h"], batch["observation"][..., 1:]) and bool((batch["h"][:, 0] == 0).all())
        batch = waiting.rollout()
        assert torch.equal(batch["h"], batch["observation"][..., 1:])


def test_whole_trajectories_begin_with_the_default():
    collector, seen = counting(trajs_per_batch=4), 0
    for _, batch in zip(range(3), collector, strict=False):
        assert torch.equal(batch["h"].reshape(-1), batch["observation"].reshape(-1, 2)[:, 1])
        seen += int(batch["next", "done"].sum())
    assert seen == 12


@pytest.mark.parametrize("source", SOURCES)
def test_random_frames_leave_the_state_as_it_is(source):
    collector = SOURCES[source](3, frames_per_batch=30, init_random_frames=21)
    dirty(collector, 10)
    batch = collector.rollout()
    assert bool((batch["h"][:, :8] == DEFAULT).all())
    assert bool((batch["h"][:, 8:] != DEFAULT).any())


@pytest.mark.parametrize("given", [None, lambda td: td.set("action", torch.eye(3, dtype=torch.int64))])
def test_a_primed_key_that_nobody_writes_keeps_its_default(given):
    collector = Collector(worlds(3, primer()), given, frames_per_batch=30)
    dirty(collector, 10)
    for _ in range(3):
        batch = collector.rollout()
        assert bool((batch["h"] == DEFAULT).all()) and bool((batch["next", "h"] == DEFAULT).all())


def test_an_update_in_place_leaves_the_stored_state_alone():
    def in_place(td):
        h = td["h"]
        return td.set("action", torch.eye(3, dtype=torch.int64)).set(("next", "h"), h.add_(1))

    env = worlds(3, TensorDictPrimer({"h": Unbounded((1,))}))
    batch = Collector(env, in_place, frames_per_batch=60).rollout()
    assert torch.equal(batch["h"], batch["observation"][..., 1:])


def test_a_recurrent_actor_draws_and_is_called_whole():
    class Logits(Memory):
        def forward(self, observation, h):
            state = self.cell(observation, h)
            return self.head(state), state

    torch.manual_seed(1)
    core = TensorDictModule(Logits(), ["observation", "h"], ["logits", ("next", "h")])
    actor = ProbabilisticActor(core, ["logits"], distribution_class=Categorical, return_log_prob=True)
    env = SerialEnv(3, lambda: GymEnv(Counter(), categorical_action_encoding=True))
    collector = Collector(TransformedEnv(env, primer()), actor, frames_per_batch=60, seed=0)
    assert type(collector._engine.actor) is TensorDictActor
    batch = collector.rollout()
    assert len(batch["action"].unique()) == 3
    law = torch.distributions.Categorical(logits=batch["logits"])
    assert torch.allclose(law.log_prob(batch["action"]), batch["sample_log_prob"], atol=1e-6)
    with torch.no_grad():
        _, following = core.module(batch["observation"][:, 0].contiguous(), batch["h"][:, 0].contiguous())
    assert torch.equal(torch.where(batch["is_init"][:, 1], torch.tensor(DEFAULT), following), batch["h"][:, 1])


def test_two_recurrent_parts_carry_two_nested_states():
    first = Primed(Memory(), ["observation", "h"], ["features", ("next", "h")])
    second = TensorDictModule(Count(), ["observation", ("deep", "n")], ["action", ("next", "deep", "n")])
    second.make_tensordict_primer = lambda: TensorDictPrimer({("deep", "n"): Unbounded((1,))})
    batch = Collector(worlds(3), TensorDictSequential(first, second), frames_per_batch=60).rollout()
    assert torch.equal(batch["deep", "n"], batch["observation"][..., 1:])
    assert torch.equal(batch["next", "deep", "n"], batch["deep", "n"] + 1) and bool((batch["h"][:, 1] != DEFAULT).any())


@pytest.mark.parametrize("lanes", [0, 3])
def test_rollouts_by_hand_carry_the_state_too(lanes):
    env = worlds(lanes, InitTracker(), primer())
    by_hand = env.rollout(20, policy(), break_when_any_done=False)
    assert_states_follow([by_hand], single=not lanes)
    batch = Collector(worlds(lanes), policy(Primed), frames_per_batch=20 * (lanes or 1)).rollout()
    for key in ("observation", "action", "h", "is_init", ("next", "reward"), ("next", "done")):
        assert torch.equal(by_hand.get(key), batch.get(key)), key


# ---- wiring ------------------------------------------------------------------------------------------------------
def names(collector):
    return [type(t).__name__ for t in collector.env.transforms] if isinstance(collector.env, TransformedEnv) else []


def test_wiring_adds_what_is_missing_and_only_that():
    both = ["InitTracker", "TensorDictPrimer"]
    assert names(Collector(worlds(2), policy(Primed))) == both
    assert names(Collector(worlds(2, InitTracker()), policy(Primed))) == both
    assert names(Collector(worlds(2, InitTracker(), primer()), policy(Primed))) == both
    assert sorted(names(Collector(worlds(2, primer()), policy()))) == both
    assert names(Collector(with_primers_inside(2), policy(Primed))) == []
    assert names(Collector(worlds(2, InitTracker(), primer()), policy(), auto_register_policy_transforms=False)) == both
    twice = TensorDictSequential(policy(Primed), Primed(lambda h: h, ["h"], ["copy"]))
    assert names(Collector(worlds(2), twice)) == both
    reads_is_init = TensorDictModule(
        lambda x, first: first * torch.eye(3)[0].long(), ["observation", "is_init"], ["action"]
    )
    assert names(Collector(worlds(2), reads_is_init)) == ["InitTracker"]
    plain = TensorDictModule(lambda x: torch.eye(3)[:2].long(), ["observation"], ["action"])
    assert names(Collector(worlds(2), plain)) == []


class WritesItself(EnvBase):
    """An env with a state of its own, of the name that the policy uses."""

    def __init__(self):
        super().__init__(batch_size=(2,))
        self.observation_spec["h"] = Unbounded((2, 1))
        self.action_spec = OneHot(3, (2, 3))

    def _reset(self, td):
        return self.observation_spec.zero()

    def _step(self, td):
        return self.observation_spec.zero().set("h", torch.full((2, 1), 9.0)).set("reward", torch.zeros(2, 1))

    def _set_seed(self, seed):
        pass


def written(key, value):
    return lambda td: td.set("action", torch.eye(3, dtype=torch.int64)[:2]).set(key, value(td))


REFUSED = {
    "no primer": (lambda: Collector(worlds(2), policy()), "TensorDictPrimer"),
    "wiring is off": (
        lambda: Collector(worlds(2), policy(Primed), auto_register_policy_transforms=False),
        "auto_register_policy_transforms=True",
    ),
    "wiring is off, a module inside": (
        lambda: Collector(worlds(2), nn.ModuleDict({"td": policy(Primed)}), auto_register_policy_transforms=False),
        "auto_register_policy_transforms=True",
    ),
    "no marker": (
        lambda: Collector(
            worlds(2), TensorDictModule(Memory(), ["observation", "is_init"], ["action"]),
            auto_register_policy_transforms=False,
        ),
        "InitTracker",
    ),
    "no primer, a function": (
        lambda: Collector(worlds(2), written(("next", "h"), lambda td: torch.zeros(2, 5))), "recurrent",
    ),
    "the primer has another shape": (
        lambda: Collector(worlds(2, primer()), written(("next", "h"), lambda td: torch.zeros(2, 4))),
        r"expected \(5,\) float32 a step, got \(4,\)",
    ),
    "the primer has another dtype": (
        lambda: Collector(worlds(2, primer()), written(("next", "h"), lambda td: torch.zeros(2, 5).double())),
        "got .* float64",
    ),
    "the env's observation": (
        lambda: Collector(worlds(2), written(("next", "observation"), lambda td: td["observation"])), "writes next.obs",
    ),
    "the reward": (
        lambda: Collector(worlds(2), written(("next", "reward"), lambda td: torch.zeros(2, 1))), "the env's to write",
    ),
    "a transform's key": (
        lambda: Collector(worlds(2, StepCounter()), written(("next", "step_count"), lambda td: td["step_count"] + 1)),
        "StepCounter writes",
    ),
    "a transform of the state": (
        lambda: Collector(worlds(2, primer(), RunningNorm(["h"])), policy()), "RunningNorm writes",
    ),
    "overwritten where it was read": (
        lambda: Collector(worlds(2, primer()), written("h", lambda td: td["h"] + 1)), r"Write \('next', 'h'\)",
    ),
    "overwritten by a module": (
        lambda: Collector(worlds(2), Primed(Memory(), ["observation", "h"], ["action", "h"])),
        r"Write the next state at \('next', 'h'\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_state_that_would_be_lost_is_refused_with_what_to_do(case):
    make, sentence = REFUSED[case]
    with pytest.raises(ArgumentError, match=sentence):
        make().next()


def test_an_env_that_writes_the_same_state_is_refused_at_the_first_step():
    collector = Collector(WritesItself(), written(("next", "h"), lambda td: td["h"] + 1), frames_per_batch=20)
    refused(EnvError, "name", lambda: collector.rollout())


@pytest.mark.parametrize(
    ("change", "error"),
    [(lambda h: h * np.nan, NumericsError), (lambda h: h[:, :2], ArgumentError), (lambda h: h.double(), ArgumentError)],
    ids=["nan", "shape", "dtype"],
)
def test_a_state_that_goes_wrong_on_the_way_is_named_before_the_env_is_stepped(change, error):
    calls = []

    def policy(td):
        calls.append(1)
        following = td["h"] + 1
        return td.set("action", torch.eye(3, dtype=torch.int64)).set(
            ("next", "h"), change(following) if len(calls) > 6 else following
        )

    env = worlds(3, primer())
    collector = Collector(env, policy, frames_per_batch=60)
    refused(error, "next.h", lambda: collector.rollout())
    assert env.vec_env.clock[0] == 6
