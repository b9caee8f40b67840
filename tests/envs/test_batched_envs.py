"""Several envs together, and envs under transforms: lane by lane they do what single envs do."""

from __future__ import annotations

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch
from face import refused
from gym_worlds import Sampled
from tensordict import TensorDict

from rlcli.collectors import Collector
from rlcli.envs import EnvBase, GymEnv, ParallelEnv, SerialEnv, TransformedEnv, step_mdp
from rlcli.errors import ArgumentError, EnvError, MissingKeyError
from rlcli.keys import RESET
from rlcli.specs import Bounded, Categorical, Composite, Unbounded
from rlcli.transforms import (
    CatFrames,
    Compose,
    FrameStack,
    InitTracker,
    RewardScaling,
    RewardSum,
    RunningNorm,
    StepCounter,
    TensorDictPrimer,
    ToFloat,
    Transform,
)
from rlcli.vec_envs.gym_vec_env import GymVecEnv

LENGTHS = (2, 3, 5)


def cartpole() -> GymEnv:
    return GymEnv("CartPole-v1")


def plain() -> list:
    return [lambda n=n: GymEnv(Sampled(length=n, end="both")) for n in LENGTHS]


def counting(make) -> TransformedEnv:
    return TransformedEnv(make(), Compose(InitTracker(), StepCounter(), RewardSum()))


def transformed() -> list:
    return [lambda make=make: counting(make) for make in plain()]


def seeded(env: EnvBase) -> EnvBase:
    env.set_seed(4)
    return env


def roll(env: EnvBase, steps: int = 12):
    torch.manual_seed(0)
    return env.rollout(steps, break_when_any_done=False)


def test_lanes_end_and_restart_each_on_their_own():
    batch = roll(SerialEnv(3, plain()))
    assert batch.shape == (3, 12) and batch.names == [None, "time"]
    for lane, length in enumerate(LENGTHS):
        expected = [(t + 1) % length == 0 for t in range(12)]
        assert batch["next", "done"][lane, :, 0].tolist() == expected
        assert batch["next", "reward"][lane, :, 0].tolist() == [0.5 * (t % length + 1) for t in range(12)]
    carried = (batch["observation"][:, 1:] == batch["next", "observation"][:, :-1]).all(-1)
    assert torch.equal(carried, ~batch["next", "done"][:, :-1, 0])


def test_transforms_inside_or_outside_give_the_same_columns():
    inside = roll(seeded(SerialEnv(3, transformed())))
    outside = roll(counting(lambda: seeded(SerialEnv(3, plain()))))
    assert set(inside.keys(True, True)) == set(outside.keys(True, True))
    for key in (
        "is_init",
        "step_count",
        "episode_reward",
        ("next", "step_count"),
        ("next", "episode_reward"),
        ("next", "done"),
    ):
        assert torch.equal(inside.get(key), outside.get(key)), key
    assert inside["step_count"][0, :5, 0].tolist() == [0, 1, 0, 1, 0]
    assert inside["is_init"][1, :5, 0].tolist() == [True, False, False, True, False]
    assert inside["next", "episode_reward"][0, :4, 0].tolist() == [0.5, 1.5, 0.5, 1.5]


@pytest.mark.parametrize("make", [plain, transformed], ids=["plain", "stacked"])
def test_a_partial_reset_restarts_only_its_lanes(make):
    env = SerialEnv(3, make())
    td = env.rand_step(env.reset())["next"].exclude("reward")
    before = td.clone()
    mask = torch.tensor([[False], [True], [False]])
    after = env.reset(td.set(RESET, mask))
    for key in env.observation_spec.keys(True, True):
        assert torch.equal(after.get(key)[[0, 2]], before.get(key)[[0, 2]]), key
    assert not torch.equal(after["observation"][1], before["observation"][1])
    assert not after["done"].any() and after.get(RESET, None) is None
    # lane 1 now has its whole episode before it, the others are one step into theirs
    batch = env.rollout(4, auto_reset=False, tensordict=after, break_when_any_done=False)
    assert batch["next", "done"][..., 0].tolist() == [
        [True, False, True, False],
        [False, False, True, False],
        [False, False, False, True],
    ]


def test_a_partial_reset_passes_through_transforms():
    env = counting(lambda: SerialEnv(3, plain()))
    td = env.rand_step(env.reset())["next"].exclude("reward")
    after = env.reset(td.set(RESET, torch.tensor([[False], [True], [False]])))
    assert after["step_count"][:, 0].tolist() == [1, 0, 1]
    assert after["is_init"][:, 0].tolist() == [False, True, False]
    assert after["episode_reward"][:, 0].tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize(
    "make",
    [
        lambda: TransformedEnv(GymEnv("CartPole-v1"), StepCounter(3)),
        lambda: SerialEnv(2, lambda: TransformedEnv(GymEnv("CartPole-v1"), StepCounter(3))),
        lambda: TransformedEnv(ParallelEnv(2, "CartPole-v1"), StepCounter(3)),
    ],
    ids=["single", "serial", "parallel"],
)
def test_chained_rollouts_reset_what_has_ended_once(make, monkeypatch):
    env, resets = make(), []
    reset = env.reset
    monkeypatch.setattr(env, "reset", lambda td=None: resets.append(td) or reset(td))
    td = env.reset()
    for _ in range(3):
        batch = env.rollout(3, auto_reset=False, break_when_any_done=False, tensordict=td)
        assert (batch["step_count"][..., 0] == torch.arange(3)).all()
        assert batch["next", "truncated"][..., -1, 0].all() and not batch["done"].any()
        td = step_mdp(batch[..., -1])
    assert len(resets) == 3  # none after the last step of a rollout
    assert td["done"].all()  # of the caller's, and left as it was
    env.close()


def test_a_batched_env_stops_when_any_lane_is_done():
    assert SerialEnv(3, plain()).rollout(10).shape == (3, 2)


def test_specs_have_the_batch_in_front():
    env = counting(lambda: SerialEnv(3, plain()))
    assert env.observation_spec["observation"].shape == (3, 3) and env.action_spec.shape == (3, 3)
    assert env.observation_spec["step_count"].shape == (3, 1) and env.reward_spec.shape == (3, 1)
    fake, real = env.fake_tensordict(), env.rand_step(env.reset())
    assert set(fake.keys(True, True)) == set(real.keys(True, True))
    assert all(fake.get(key).shape == real.get(key).shape for key in real.keys(True, True))


def test_transformed_envs_flatten_and_append():
    env = TransformedEnv(TransformedEnv(GymEnv(Sampled()), InitTracker()), StepCounter()).append_transform(RewardSum())
    assert isinstance(env.base_env, GymEnv)
    assert [type(t) for t in env.transforms] == [InitTracker, StepCounter, RewardSum]


OWN_KEYS = gym.spaces.Dict({key: gym.spaces.Box(0, 9, (1,)) for key in ("step_count", "began", "episode_reward")})


class Counts(gym.Env):
    """Shows, under the names that transforms take by default, numbers of its own."""

    observation_space, action_space = OWN_KEYS, gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {key: np.full(1, 7, np.float32) for key in OWN_KEYS}, {}

    def step(self, action):
        return self.reset()[0], 1.0, False, False, {}


@pytest.mark.parametrize(
    ("transform", "key", "argument"),
    [
        (StepCounter, "step_count", "step_count_key"),
        (RewardSum, "episode_reward", "out_keys"),
    ],
)
def test_what_an_env_shows_itself_is_not_overwritten(transform, key, argument):
    with refused(ArgumentError, f"{key} {transform.__name__}({argument}=...)"):
        TransformedEnv(GymEnv(Counts()), transform())
    named = {argument: ["mine"] if argument == "out_keys" else "mine"}
    batch = TransformedEnv(GymEnv(Counts()), transform(**named)).rollout(3)
    assert batch[key].flatten().tolist() == [7, 7, 7] and batch["mine"].shape == (3, 1)


TAKEN_BY_BATCHES = ("reward", "done", "terminated", "truncated", "action", "next", ("collector", "traj_ids"))


@pytest.mark.parametrize("key", [*TAKEN_BY_BATCHES, "step_count", ("step_count", "mine")])
@pytest.mark.parametrize(
    "made",
    [
        lambda key: StepCounter(step_count_key=key),
        lambda key: InitTracker(init_key=key),
        lambda key: RewardSum(out_keys=[key]),
        lambda key: TensorDictPrimer({key: Unbounded((1,))}),
        lambda key: CatFrames(2, -1, ["began"], [key]),
        lambda key: FrameStack(2, 1, ["began"], [key]),
        lambda key: RunningNorm(["began"], [key]),
        lambda key: ToFloat(["began"], [key]),
    ],
)
@pytest.mark.parametrize("env", [lambda: GymEnv(Counts()), lambda: SerialEnv(2, lambda: GymEnv(Counts()))])
def test_no_transform_writes_over_a_key_that_it_does_not_read(env, made, key):
    name = ".".join([key] if isinstance(key, str) else key)
    with pytest.raises(ArgumentError, match=rf"(would overwrite {name}, .*Give it another name|{name} is none)"):
        TransformedEnv(env()).append_transform(made(key))


@pytest.mark.parametrize("key", ["", ()])
def test_a_key_without_a_name_is_refused_where_it_is_given(key):
    for make in (lambda: InitTracker(init_key=key), lambda: RewardSum(out_keys=[key]), lambda: ToFloat(["a"], [key])):
        with refused(ArgumentError, "key name"):
            make()


@pytest.mark.parametrize(
    "keys", [(["began", "step_count"], ["step_count", "began"]), (["began", "step_count"], ["x", "x"])]
)
@pytest.mark.parametrize("kind", [lambda *keys: CatFrames(2, -1, *keys), RunningNorm, ToFloat])
def test_no_transform_writes_over_a_key_that_it_needs_for_something_else(kind, keys):
    with pytest.raises(ArgumentError, match=r"would overwrite .* has another use for"):
        TransformedEnv(GymEnv(Counts()), kind(*keys))


def test_a_limit_of_frames_finds_a_counter_or_adds_one():
    with refused(ArgumentError, "step_count_key"):
        Collector(GymEnv(Counts()), frames_per_batch=4, max_frames_per_traj=2)
    env = TransformedEnv(GymEnv(Counts()), StepCounter(step_count_key="steps"))
    batch = Collector(env, frames_per_batch=4, max_frames_per_traj=2).rollout()
    assert batch["steps"][:, 0].tolist() == [0, 1, 0, 1] and set(batch["step_count"].flatten().tolist()) == {7}


class Flagged(EnvBase):
    """A TensorDict env of the user's own."""

    def __init__(self, width=2) -> None:
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded((width,)))
        self.action_spec = Categorical(3)

    def _reset(self, td):
        return TensorDict({"observation": torch.zeros(self.observation_spec["observation"].shape)}, device=self.device)

    def _step(self, td):
        return self._reset(None).update({"reward": torch.ones(1), "terminated": torch.zeros(1, dtype=torch.bool)})


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (lambda: GymEnv("CartPole-v1"), lambda: GymEnv("CartPole-v1", categorical_action_encoding=True), "action_spec"),
        (lambda: GymEnv(Sampled("doubles")), lambda: GymEnv(Sampled("doubles"), narrow=True), "observation_spec"),
        (lambda: counting(Flagged), lambda: Flagged(), "observation_spec"),
        (lambda: Flagged(), lambda: Flagged(3), "observation_spec"),
    ],
)
def test_envs_that_differ_are_not_stepped_together(first, second, said):
    with pytest.raises(ArgumentError, match=rf"alike \(env 2\): its {said} is "):
        SerialEnv(3, [first, first, second])
    assert SerialEnv(2, [second, second]).rollout(2).shape == (2, 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: GymEnv("CartPole-v1"),
        lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1")),
        lambda: SerialEnv(2, Flagged),
        lambda: SerialEnv(2, transformed()[:1] * 2),
        lambda: TransformedEnv(GymEnv("CartPole-v1"), StepCounter()),
    ],
)
def test_specs_follow_their_env_to_a_device(make):
    place = torch.device("cpu:0")  # not equal to torch.device("cpu")
    env = make().to(place)
    specs = [env.full_observation_spec, env.full_action_spec, env.full_reward_spec, env.full_done_spec]
    for spec in specs:
        assert {leaf.device for leaf in spec.values(True, True)} == {place}
    assert env.device == place and env.rollout(2).device == place


def test_a_step_counters_limit_truncates():
    env = TransformedEnv(SerialEnv(2, lambda: GymEnv(Sampled(length=50))), StepCounter(max_steps=3))
    batch = roll(env, 7)
    assert batch["next", "truncated"][..., 0].nonzero()[:, 1].tolist() == [2, 5, 2, 5]
    assert not batch["next", "terminated"].any() and batch["step_count"][1, :, 0].tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_lanes_of_one_seed_have_different_episodes_and_repeat():
    def first(seed):
        env = SerialEnv(3, lambda: GymEnv("CartPole-v1"))
        env.set_seed(seed)
        return env.reset()["observation"]

    assert torch.equal(first(1), first(1))
    assert len({tuple(row) for seed in (1, 2) for row in first(seed).tolist()}) == 6


def test_makers_must_match_the_number_and_spaces_one_another():
    refused(ArgumentError, "maker per", lambda: SerialEnv(2, plain()))
    for wrong in (0, 2.0, None, [3, 4], "2"):
        for kind in (SerialEnv, ParallelEnv):
            with refused(ArgumentError, f"{kind.__name__} num_workers"):
                kind(wrong, "CartPole-v1")
    with refused(EnvError, "spaces"):
        SerialEnv(2, [lambda: GymEnv(Sampled("vector")), lambda: GymEnv(Sampled("image"))])


def test_an_id_stands_for_its_env():
    by_id, by_maker = SerialEnv(2, "CartPole-v1"), SerialEnv(2, lambda: GymEnv("CartPole-v1"))
    assert by_id.set_seed(3) == by_maker.set_seed(3) == 4
    assert torch.equal(by_id.reset()["observation"], by_maker.reset()["observation"])


def test_neighbouring_seeds_of_envs_stepped_one_by_one_have_none_in_common():
    env = SerialEnv(4, transformed()[0])
    given = []
    for seed in range(50):
        env.set_seed(seed)
        given += [inner.vec_env.next_seed(0) for inner in env.envs]
    assert len(set(given)) == 200
    env.set_seed(7)
    assert given[28:32] == [inner.vec_env.next_seed(0) for inner in env.envs]


@pytest.mark.parametrize("around", [StepCounter, lambda: Compose(RewardSum(), StepCounter())])
def test_a_transform_inside_is_no_other_env(around):
    envs = SerialEnv(3, cartpole), SerialEnv(3, lambda: TransformedEnv(cartpole(), around()))
    shown = []
    for env in envs:
        env.set_seed(4)
        torch.manual_seed(0)
        shown.append(env.rollout(60, break_when_any_done=False)["observation"])
        collector = Collector(env, None, frames_per_batch=90, seed=3)
        shown.append(collector.next()["observation"])
    assert torch.equal(shown[0], shown[2]) and torch.equal(shown[1][:, 0], shown[3][:, 0])


@pytest.mark.parametrize("seed", ["x", None, float("nan"), float("inf"), [1], -1, True, 2**70])
def test_a_seed_that_is_no_number_is_refused(seed):
    refused(ArgumentError, "seed must", lambda: GymEnv("CartPole-v1").set_seed(seed))


def test_closing_reaches_every_env():
    closed = []

    class Closing(Sampled):
        def close(self):
            closed.append(self)

    for make in (lambda: GymEnv(Closing()), lambda: TransformedEnv(GymEnv(Closing()), StepCounter())):
        env = SerialEnv(2, make)
        env.close()
        assert env.is_closed
    assert len(closed) == 4


@pytest.mark.parametrize(("env_id", "limit", "steps"), [("CartPole-v1", 12, 200), ("HalfCheetah-v5", 15, 40)])
def test_stepping_around_bookkeeping_wrappers_changes_no_bit(env_id, limit, steps):
    """The oracle is `gym.make` with all its wrappers, stepped by hand; TimeLimit's flag on a terminated step too."""
    if env_id.startswith("HalfCheetah"):
        pytest.importorskip("mujoco")
    env = GymEnv(env_id, max_episode_steps=limit)
    env.set_seed(3)
    torch.manual_seed(0)
    ours = env.rollout(steps, break_when_any_done=False)
    wrapped = gym.make(env_id, max_episode_steps=limit)
    seen, ends = [wrapped.reset(seed=env.vec_env.seeds[0])[0]], []
    box = isinstance(wrapped.action_space, gym.spaces.Box)
    for t in range(steps):
        action = ours["action"][t].numpy() if box else int(ours["action"][t].argmax())
        observation, reward, terminated, truncated, _ = wrapped.step(action)
        assert ours["next", "observation"][t].tolist() == observation.tolist()
        assert ours["observation"][t].tolist() == seen[-1].tolist()
        assert ours["next", "reward"][t].item() == torch.tensor(reward, dtype=torch.float32).item()
        flags = (terminated, truncated)
        assert (ours["next", "terminated"][t].item(), ours["next", "truncated"][t].item()) == flags
        ends.append(flags)
        seen.append(wrapped.reset()[0] if any(flags) else observation)
    assert any(truncated for _, truncated in ends)
    if env_id == "CartPole-v1":
        assert (True, False) in ends and (False, True) in ends


class Ending(EnvBase):
    """A TensorDict env of episodes of three steps, which tells their end by the flags that it is given."""

    def __init__(self, **flags: bool) -> None:
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded((1,)))
        self.action_spec = Categorical(3)
        self.flags = flags

    def _set_seed(self, seed):
        torch.manual_seed(seed)

    def _reset(self, td):
        self.t = 0
        return TensorDict({"observation": torch.rand(1)})

    def _step(self, td):
        self.t += 1
        over = {name: torch.tensor([used and self.t == 3]) for name, used in self.flags.items()}
        return TensorDict({"observation": torch.rand(1), "reward": torch.ones(1), **over})


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"done": True}, "terminated"),
        ({"done": True, "truncated": False}, "terminated"),
        ({"done": True, "terminated": False}, "truncated"),
        ({"done": True, "terminated": False, "truncated": False}, "truncated"),
        ({"done": True, "terminated": False, "truncated": True}, "truncated"),
        ({"done": False, "terminated": True}, "terminated"),
    ],
)
def test_an_end_that_done_alone_tells_is_one(flags, told):
    other = {"terminated": "truncated", "truncated": "terminated"}[told]
    batch = Ending(**flags).rollout(6, break_when_any_done=False)
    found = Collector(Ending(**flags), frames_per_batch=6).next()
    for rows in (batch, found):
        assert rows["next", "done"].flatten().tolist() == [False, False, True] * 2
        assert torch.equal(rows["next", told], rows["next", "done"]) and not rows["next", other].any()


class Flags(Transform):
    """Writes one flag anew."""

    def __init__(self, name, change):
        super().__init__()
        self.name, self.change = name, change

    def _step(self, tensordict, next_tensordict):
        return next_tensordict.set(self.name, self.change(next_tensordict))


def test_a_transform_may_end_episodes_by_done_alone_and_go_on_by_either_flag():
    def ends(transform, env):
        env = TransformedEnv(GymEnv(env), transform)
        return env.rollout(6, break_when_any_done=False)["next"].select("done", "terminated", "truncated")

    found = ends(Flags("done", lambda td: td["done"] | (td["reward"] == 1.0)), Sampled(length=50))
    assert found["done"].flatten().tolist() == [False, True] * 3
    assert torch.equal(found["truncated"], found["done"]) and not found["terminated"].any()
    for name in ("done", "terminated"):
        found = ends(Flags(name, lambda td: torch.zeros(1, dtype=torch.bool)), Sampled(length=3, end="terminated"))
        assert not any(flag.any() for flag in found.values())


class Hundred(Compose):
    """A Compose of the user's that does something of its own."""

    def _step(self, tensordict, next_tensordict):
        out = super()._step(tensordict, next_tensordict)
        return out.set("reward", out["reward"] + 100)


class Named(Compose):
    """A Compose of the user's that only says what it is made of."""

    def __init__(self) -> None:
        super().__init__(RewardScaling(0.0, 2.0), StepCounter())


def patched(compose: Compose) -> Compose:
    step = compose._step
    compose._step = lambda td, out: step(td, out).set("reward", out["reward"] + 100)
    return compose


@pytest.mark.parametrize(
    ("compose", "parts", "rewards"),
    [
        (lambda: Hundred(RewardScaling(0.0, 2.0), StepCounter()), 1, [101, 102]),
        (lambda: Compose(Hundred(RewardScaling(0.0, 2.0)), StepCounter()), 2, [101, 102]),
        (lambda: patched(Compose(RewardScaling(0.0, 2.0), StepCounter())), 1, [101, 102]),
        (Named, 2, [1, 2]),
        (lambda: Compose(RewardSum(), StepCounter()).insert(-1, Compose(RewardScaling(0.0, 2.0))), 3, [1, 2]),
        (lambda: Compose(StepCounter()).insert(0, Named()[0]), 2, [1, 2]),
    ],
)
def test_a_compose_is_taken_as_its_parts_where_it_adds_nothing(compose, parts, rewards):
    def make():
        return TransformedEnv(GymEnv(Sampled()), compose())

    env = make()
    assert len(env.transforms) == parts
    assert env.rollout(2)["next", "reward"].flatten().tolist() == rewards
    assert isinstance(env.transforms[-1], StepCounter | Compose)
    batch = Collector(make(), frames_per_batch=2).next()
    assert batch["next", "reward"].flatten().tolist() == rewards and "step_count" in batch


def test_a_patched_transform_of_an_env_is_what_a_collector_steps():
    env = TransformedEnv(GymEnv(Sampled()), StepCounter())
    patched(env.transform)
    assert Collector(env, frames_per_batch=2).next()["next", "reward"].flatten().tolist() == [100.5, 101]


@pytest.mark.parametrize("make", [plain, transformed, lambda: [Flagged] * 3], ids=["plain", "stacked", "tensordicts"])
@pytest.mark.parametrize("wrap", [lambda env: env, lambda env: TransformedEnv(env, RunningNorm())])
def test_a_partial_reset_needs_what_the_others_show(make, wrap):
    env, mask = wrap(SerialEnv(3, make())), TensorDict({RESET: torch.tensor([[True], [False], [True]])}, [3])
    for _ in range(2):
        with refused(ArgumentError, "reset all"):
            env.reset(mask)
        env.reset(TensorDict({RESET: torch.ones(3, 1, dtype=torch.bool)}, [3]))


def test_a_partial_reset_is_none_where_nothing_was_reset():
    root = counting(lambda: SerialEnv(3, plain())).reset()
    with refused(ArgumentError, "reset none"):
        counting(lambda: SerialEnv(3, plain())).reset(root.set(RESET, torch.tensor([[True], [False], [True]])))


def test_makers_make_an_env_in_every_call():
    env = Flagged()
    for wrong, said in (
        (lambda: env, r"one env cannot be several \(env 1\)"),
        (GymEnv(Sampled()), "SerialEnv is given what makes its envs: got GymEnv"),
        (Sampled(), r"SerialEnv is given what makes its envs: got <.*Sampled"),
        (lambda: Sampled(), "a maker gave <.*Sampled"),
        (lambda: None, "a maker gave None"),
    ):
        with pytest.raises(ArgumentError, match=said):
            SerialEnv(2, wrong)


def stepped_otherwise():
    env = GymEnv(Sampled())
    step = env._step
    env._step = lambda td: (out := step(td)).set("reward", out["reward"] + 100)
    return env


def specified_otherwise():
    env = GymEnv(Sampled())
    env.reward_spec = Bounded(-3, 3, (1,))
    env.observation_spec["observation"] = Bounded(-1, 1, (3,))
    return env


def test_an_env_object_with_parts_of_its_own_keeps_them_among_others():
    batch = Collector(SerialEnv(2, stepped_otherwise), frames_per_batch=2).next()
    assert batch["next", "reward"].flatten().tolist() == [100.5, 100.5]
    env = SerialEnv(2, [specified_otherwise, specified_otherwise])
    assert env.reward_spec == Bounded(-3, 3, (2, 1))
    assert env.observation_spec["observation"] == Bounded(-1, 1, (2, 3))
    refused(ArgumentError, "alike", lambda: SerialEnv(2, [specified_otherwise, plain()[0]]))
    for make in (stepped_otherwise, specified_otherwise):
        parallel, serial = ParallelEnv(2, make), SerialEnv(2, make)
        assert parallel.reward_spec == serial.reward_spec
        assert torch.equal(*(env.rand_step(env.reset())["next", "reward"] for env in (parallel, serial)))
        parallel.close()
    for env in (GymEnv("CartPole-v1"), GymEnv(Sampled("nested")).to("cpu"), GymEnv(Sampled("doubles"), narrow=True)):
        assert not env.own_parts
    env = GymEnv("Pendulum-v1")
    env.action_spec.low = torch.full((1,), -0.5)  # in place
    assert env.own_parts == ["action_spec"]


def test_a_transform_is_in_one_place_alone():
    norm = RunningNorm()
    train = TransformedEnv(GymEnv("CartPole-v1"), norm)
    assert TransformedEnv(train, StepCounter()).transforms[0] is norm  # on the same env
    refused(ArgumentError, "RunningNorm", lambda: TransformedEnv(GymEnv("CartPole-v1"), Compose(norm)))
    TransformedEnv(GymEnv("CartPole-v1"), copy.deepcopy(norm))
    train.close()
    again = TransformedEnv(GymEnv("CartPole-v1"), norm)
    refused(ArgumentError, "among twice", lambda: again.append_transform(Compose(StepCounter(), norm)))
    assert again.append_transform(StepCounter()).transforms[1:]


def test_a_transform_that_is_refused_leaves_the_env_as_it_was():
    env = TransformedEnv(GymEnv("CartPole-v1"), ToFloat())
    refused(MissingKeyError, "nope", lambda: env.append_transform(ToFloat(["nope"])))
    env.append_transform(StepCounter())
    assert [type(t) for t in env.transforms] == [ToFloat, StepCounter] and "step_count" in env.reset()


def test_one_gymnasium_env_is_not_several_whatever_is_around_it():
    made = gym.make("CartPole-v1")
    around = [
        lambda: TransformedEnv(GymEnv(made), StepCounter()),
        lambda: GymEnv(gym.wrappers.TimeLimit(made, 5)),
        lambda: made_once,
    ]
    made_once = GymEnv(made)
    for make in around:
        with pytest.raises(ArgumentError, match=r"one env cannot be several \(env 1\)"):
            SerialEnv(2, make)
    with refused(ArgumentError, "serve several"):
        GymVecEnv([gym.wrappers.TimeLimit(made, 5), gym.wrappers.TimeLimit(made, 6)])


class Counting(EnvBase):
    """Two envs with a state beside what they show."""

    def __init__(self) -> None:
        super().__init__(batch_size=(2,))
        self.observation_spec = Composite({"observation": Unbounded((2, 1))}, shape=(2,))
        self.state_spec = Composite({"count": Unbounded((2, 1))}, shape=(2,))
        self.action_spec = Bounded(0, 1, (2, 1))

    def _reset(self, td):
        fresh = TensorDict({key: torch.zeros(2, 1) for key in ("observation", "count")}, [2])
        mask = None if td is None else td.get(RESET, None)
        if mask is None:
            return fresh
        return TensorDict({key: torch.where(mask, x, td[key]) for key, x in fresh.items()}, [2])

    def _step(self, td):
        count = td["count"] + torch.tensor([[1.0], [2.0]])
        seen = td["observation"] + count
        return TensorDict({"count": count, "observation": seen, "reward": count, "terminated": count > 4}, [2])


def test_a_partial_reset_under_a_transform_finds_the_state_of_the_env():
    expected = Counting().rollout(9, break_when_any_done=False)
    found = TransformedEnv(Counting(), RewardSum()).rollout(9, break_when_any_done=False)
    assert expected["next", "done"].any() and not expected["next", "done"].all(0).any()
    for key in ("count", "observation", ("next", "count"), ("next", "done")):
        assert torch.equal(found[key], expected[key]), key
