"""One gymnasium env behind TensorDicts: what it shows is stored as it is, what is sent is what the env expects."""

from __future__ import annotations

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from face import GymRecipe, refused
from gym_worlds import OBSERVATIONS, Sampled, same_observation
from gymnasium import spaces
from tensordict import TensorDict

from rlcli.collectors import Collector
from rlcli.envs import GymEnv, ParallelEnv, step_mdp
from rlcli.errors import ArgumentError, EnvError
from rlcli.specs import Binary, Bounded, Categorical, Composite, MultiCategorical, MultiOneHot, OneHot, Unbounded


@pytest.mark.parametrize("kind", OBSERVATIONS)
def test_observations_are_stored_as_the_env_shows_them(kind):
    env = GymEnv(Sampled(kind))
    td = env.reset()
    for _ in range(3):
        stored = td if kind == "nested" else td["observation"]
        assert same_observation(stored, env.gym.shown, env.gym.observation_space)
        assert env.observation_spec.is_in(td.select(*env.observation_spec.keys(True, True)))
        td = env.rand_step(td)["next"]


def test_doubles_are_narrowed_on_request_and_integers_never():
    env = GymEnv(Sampled("doubles"), narrow=True)
    td = env.reset()
    assert td["observation"].dtype == env.observation_spec["observation"].dtype == torch.float32
    assert np.array_equal(td["observation"].numpy(), env.gym.shown.astype(np.float32))
    assert GymEnv(Sampled("image"), narrow=True).reset()["observation"].dtype == torch.uint8


@pytest.mark.parametrize(
    ("kind", "categorical", "expected"),
    [
        ("discrete", False, OneHot(3)),
        ("discrete", True, Categorical(3)),
        ("from_five", False, OneHot(3)),
        ("from_five", True, Categorical(3)),
        ("several", False, MultiOneHot([2, 4])),
        ("several", True, MultiCategorical([2, 4])),
        ("switches", False, Binary(4, dtype=torch.int8)),
        ("box", False, Bounded(torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 2.0]), (2,))),
        ("unbounded", True, Unbounded((2,))),
    ],
)
def test_actions_have_specs_and_reach_the_env_in_its_own_form(kind, categorical, expected):
    env = GymEnv(Sampled(action=kind), categorical_action_encoding=categorical)
    assert env.action_spec == expected
    td = env.reset()
    for _ in range(3):
        td = env.rand_step(td)
        assert env.action_spec.is_in(td["action"])
        td = td["next"].exclude("reward")
    assert len(env.gym.received) == 3  # the env refuses what is not in its space


@pytest.mark.parametrize(
    ("kind", "action", "sent"),
    [
        ("from_five", torch.tensor([0, 1, 0]), 6),
        ("several", torch.tensor([0, 1, 0, 0, 1, 0]), [1, 2]),
        ("switches", torch.tensor([1, 0, 0, 1], dtype=torch.int8), [1, 0, 0, 1]),
        ("box", torch.tensor([0.5, -1.5]), [0.5, -1.5]),
        ("box", torch.tensor([3.0, -3.0]), [1.0, -2.0]),
        ("unbounded", torch.tensor([30.0, -3.0]), [30.0, -3.0]),
    ],
)
def test_what_the_env_gets(kind, action, sent):
    env = GymEnv(Sampled(action=kind))
    given = action.clone()
    env.step(env.reset().set("action", action))
    assert np.array_equal(env.gym.received[0], sent)
    assert torch.equal(action, given)  # clipping happens on the way, not in the batch


@pytest.mark.parametrize("end", ["terminated", "truncated", "both"])
def test_ends_are_flagged_apart_and_done_is_their_union(end):
    env = GymEnv(Sampled(length=2, end=end))
    td = env.rand_step(env.reset())
    flags = ("done", "terminated", "truncated")
    assert not any(td["next", flag].item() for flag in flags)
    td = env.rand_step(td["next"].exclude("reward"))
    expected = [True, end != "truncated", end != "terminated"]
    assert [td["next", flag].item() for flag in flags] == expected
    assert td["next", "reward"].dtype == torch.float32 and td["next", "reward"].tolist() == [1.0]


def test_step_and_maybe_reset_keeps_the_true_successor_and_goes_on_with_a_reset():
    env = GymEnv(Sampled(length=2))
    td = env.reset()
    td, following = env.step_and_maybe_reset(env.rand_action(td))
    assert torch.equal(following["observation"], td["next", "observation"]) and following.get("reward", None) is None
    td, following = env.step_and_maybe_reset(env.rand_action(following))
    assert td["next", "done"].item() and not following["done"].item()
    assert not torch.equal(following["observation"], td["next", "observation"])
    assert same_observation(following["observation"], env.gym.shown, env.gym.observation_space)


def test_rollouts_stop_at_an_end_or_go_on_through_resets():
    env = GymEnv(Sampled(length=4))
    assert env.rollout(10).shape == (4,)
    whole = env.rollout(10, break_when_any_done=False)
    assert whole.shape == (10,) and whole.names == ["time"]
    assert whole["next", "done"].squeeze(-1).nonzero().squeeze(-1).tolist() == [3, 7]
    same = (whole["observation"][1:] == whole["next", "observation"][:-1]).all(-1)
    assert same.tolist() == [i not in (3, 7) for i in range(9)]


def test_rollouts_follow_a_policy_and_can_start_anywhere():
    env = GymEnv(Sampled(length=50), categorical_action_encoding=True)
    seen = []
    start = env.reset()
    batch = env.rollout(
        3,
        lambda td: td.set("action", torch.tensor(2)),
        auto_reset=False,
        tensordict=start.clone(),
        callback=lambda _, td: seen.append(td["next", "reward"].item()),
    )
    assert batch["action"].tolist() == [2, 2, 2] and env.gym.received == [2, 2, 2]
    assert torch.equal(batch["observation"][0], start["observation"])
    assert seen == [0.5, 1.0, 1.5]


def test_the_fake_tensordict_has_the_layout_of_a_real_step():
    env = GymEnv(Sampled("nested", "box"))
    fake, real = env.fake_tensordict(), env.rand_step(env.reset())
    assert set(fake.keys(True, True)) == set(real.keys(True, True))
    for key in real.keys(True, True):
        assert fake.get(key).shape == real.get(key).shape and fake.get(key).dtype == real.get(key).dtype, key


def test_specs_name_every_key():
    env = GymEnv(Sampled("nested"))
    assert isinstance(env.observation_spec, Composite)
    assert set(env._observation_keys_step_mdp) == {"place", ("eye", "left"), ("eye", "seen")}
    assert env._state_keys_step_mdp == []
    assert env.full_done_spec.keys(True, True) == ["done", "terminated", "truncated"]


def test_a_step_without_action_is_refused():
    env = GymEnv(Sampled())
    env.reset()
    refused(ArgumentError, "action", lambda: GymEnv("CartPole-v1").step(None))
    for given, got in ((3, "got a int"), (TensorDict({"a": torch.ones(1)}, []), "got a")):
        with refused(ArgumentError, f"step_mdp {got}"):
            step_mdp(given)
    refused(ArgumentError, "action", lambda: env.step(TensorDict({}, batch_size=())))


def test_set_seed_covers_the_first_episode():
    def first(seed):
        env = GymEnv("CartPole-v1")
        env.set_seed(seed)
        return env.rollout(30, lambda td: td.set("action", torch.tensor([0, 1])), break_when_any_done=False)

    a, b, c = first(1), first(1), first(2)
    assert torch.equal(a["observation"], b["observation"])
    assert not torch.equal(a["observation"][0], c["observation"][0])


def test_an_env_may_be_given_as_env_name():
    assert repr(GymEnv(env_name="CartPole-v1")) == repr(GymEnv("CartPole-v1"))
    collector = Collector(GymEnv, create_env_kwargs={"env_name": "CartPole-v1"}, frames_per_batch=4)
    assert len(collector.next()) == 4
    refused(ArgumentError, "env_name", lambda: GymEnv("CartPole-v1", env_name="CartPole-v1"))
    with pytest.raises(ArgumentError, match="needs an env"):
        GymEnv()
    refused(ArgumentError, "num_envs=4 SerialEnv", lambda: GymEnv("CartPole-v1", num_envs=4))


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        (lambda: Sampled(), {"wrappers": [lambda env: env]}, "wrappers.*the object Sampled"),
        (
            lambda: Sampled(),
            {"max_episode_steps": 3, "categorical": True},
            "max_episode_steps, categorical.*Give its id",
        ),
        (
            lambda: GymRecipe("CartPole-v1"),
            {"frame_skip": 4, "render_mode": None},
            "render_mode, frame_skip.*GymRecipe",
        ),
    ],
)
def test_options_for_an_id_are_not_dropped_where_there_is_none(given, options, said):
    with pytest.raises(ArgumentError, match=rf"GymEnv does not use {said}"):
        GymEnv(given(), **options)
    refused(ArgumentError, "GymEnv", lambda: ParallelEnv(1, partial(GymEnv, given(), **options)))
    assert GymEnv(Sampled(), frame_skip=2).rollout(1)["next", "reward"].item() == 1.5


def test_an_action_is_taken_for_so_many_steps_and_the_rewards_add_up():
    one, four = GymEnv("Pendulum-v1", max_episode_steps=10), GymEnv("Pendulum-v1", frame_skip=4, max_episode_steps=10)
    a, b = (env.set_seed(3) and env.reset() for env in (one, four))
    torch.manual_seed(0)
    for length in (4, 4, 2):  # the episode ends amid the third
        action, total = one.action_spec.rand(), 0.0
        for _ in range(length):
            a = one.step(a.set("action", action))["next"]
            total += a["reward"].item()
        b = four.step(b.set("action", action))["next"]
        assert torch.equal(a["observation"], b["observation"]) and b["reward"].item() == pytest.approx(total, rel=1e-6)
        assert torch.equal(a["truncated"], b["truncated"]) and b["truncated"].item() == (length == 2)
    refused(ArgumentError, "frame_skip", lambda: GymEnv("Pendulum-v1", frame_skip=0))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["_raw"], "called '_raw': batches use that name themselves"),
        (["collector"], "called 'collector': batches"),
        ([0], "called 0: names are words"),
        (["a", 1], r"called 1 \(a\): names are words"),
    ],
)
def test_an_observation_that_cannot_keep_its_name_is_refused(names, said):
    env = Sampled()
    for name in reversed(names):
        env.observation_space = spaces.Dict({name: env.observation_space, "x": spaces.Box(0, 1)})
    with pytest.raises(EnvError, match=f"an observation cannot be {said}"):
        GymEnv(env)


@pytest.mark.parametrize("name", [
    "mask", "shifted_valid", "index", "advantage", "value_target", "state_value", "priority_weight", "td_error",
    "steps_to_next_obs", "approximated", "action_log_prob",
])  # fmt: skip
def test_no_observation_has_a_name_that_batches_samples_and_losses_write_or_read(name):
    env = Sampled()
    env.observation_space = spaces.Dict({"x": spaces.Box(0, 1), name: spaces.Box(0, 1)})
    with pytest.raises(EnvError, match=f"an observation cannot be called '{name}'.*batches use that name"):
        GymEnv(env)
    env.observation_space = spaces.Dict({"x": spaces.Box(0, 1), "inner": spaces.Dict({name: spaces.Box(0, 1)})})
    assert name in GymEnv(env).observation_spec["inner"]


def test_an_env_on_tensordicts_has_no_other_names_to_choose_from():
    class ByHand(GymEnv):
        def _step(self, td):
            return super()._step(td)

    env = ByHand(Sampled())
    env.observation_spec["_raw"] = Unbounded((1,))
    refused(EnvError, "_raw", lambda: Collector(env, frames_per_batch=4))


BOX, WHOLE = spaces.Box(-1, 1, (2, 3)), spaces.Box(0, 9, (2,), np.uint8)


@pytest.mark.parametrize(
    ("space", "action", "said"),
    [
        (BOX, torch.zeros(3, 2), "shape"),
        (BOX, torch.full((2, 3), torch.nan), "finite"),
        (WHOLE, torch.tensor([1.7, 2.0]), "numbers"),
        (spaces.Discrete(3), torch.tensor(5), "action"),
        (spaces.MultiDiscrete([2, 3]), torch.tensor([0, 3]), "action"),
        (spaces.MultiBinary(3), torch.tensor([0, 1, 2]), "action"),
    ],
)
def test_an_action_that_the_env_does_not_have_is_refused_before_it_is_stepped(space, action, said):
    env = GymEnv(Sampled(), categorical_action_encoding=True)
    env.gym.action_space = space
    env = GymEnv(env.gym, categorical_action_encoding=True)
    refused(ArgumentError, said, lambda: env.step(env.reset().set("action", action)))
    assert not env.gym.received


def test_whole_numbers_reach_a_box_of_them_clipped_in_its_own_dtype():
    made = Sampled()
    made.action_space = WHOLE
    env = GymEnv(made)
    for action in (torch.tensor([1.0, 300.0]), torch.tensor([1, 300])):
        env.step(env.reset().set("action", action))
        assert made.received[-1].dtype == np.uint8 and made.received[-1].tolist() == [1, 9]


def test_a_reset_that_shows_nan_is_refused_by_hand_too():
    made = Sampled()
    made.reset = lambda **_: (np.full(3, np.nan, np.float32), {})
    with pytest.raises(EnvError, match=r"observation is not finite \(Sampled, env 0, episode 0, step 0"):
        GymEnv(made).reset()


@pytest.mark.parametrize("reward", [np.nan, "much", 1e300])
@pytest.mark.parametrize("ends", [False, True])
def test_a_bad_reward_by_hand_is_placed_in_the_episode_that_it_came_in(reward, ends):
    made = Sampled()
    step = made.step
    made.step = lambda action: (step(action)[0], reward, ends, False, {})
    env = GymEnv(made)
    with pytest.raises(EnvError, match=r"the reward is .*episode 0, step 1[,)]"):
        env.rand_step(env.reset())


def test_numbers_of_another_byte_order_are_refused():
    turned = spaces.Box(-5, 5, (2,), np.dtype(">f4"))
    for made, name in ((Sampled(), "observation_space"), (Sampled(), "action_space")):
        setattr(made, name, turned)
        with refused(EnvError, "compute"):
            GymEnv(made)


def test_a_rollout_takes_whole_steps():
    assert GymEnv("CartPole-v1").rollout(np.int64(2)).shape == (2,)
    for steps in (3.5, "3", 0):
        with refused(ArgumentError, "max_steps"):
            GymEnv("CartPole-v1").rollout(steps)


def test_an_env_that_was_reset_can_be_rendered():
    env = GymEnv("CartPole-v1", render_mode="rgb_array")
    assert not env.gym.has_wrapper_attr("has_reset") or not env.gym.get_wrapper_attr("has_reset")
    env.reset()
    assert env.gym.get_wrapper_attr("has_reset")


class Twice(gym.Wrapper):
    def step(self, action):
        reward = 0.0
        for _ in range(2):
            *rest, ended, cut, info = self.env.step(action)
            reward += rest[1]
            if ended or cut:
                break
        return rest[0], reward, ended, cut, info


@pytest.mark.parametrize(
    "source", ["MountainCar-v0", partial(gym.make, "MountainCar-v0"), lambda: gym.make("MountainCar-v0")]
)
def test_a_limit_counts_the_steps_of_the_env_inside_its_wrappers(source):
    built = source() if callable(source) and not isinstance(source, partial) else source
    name = "car" if isinstance(source, partial) else None
    env = GymEnv(GymRecipe(built, wrappers=(Twice,), max_episode_steps=4, name=name))
    assert env.rollout(9)["next", "truncated"].flatten().tolist() == [False, True]


def test_a_recipe_of_an_env_that_is_there_wraps_and_limits_it():
    made = Sampled(length=9)
    env = GymEnv(GymRecipe(made, wrappers=(gym.wrappers.FlattenObservation,), max_episode_steps=3))
    assert env.gym.unwrapped is made
    assert env.rollout(9)["next", "truncated"].flatten().tolist() == [False, False, True]
    refused(ArgumentError, "colour", lambda: GymEnv(GymRecipe(made, {"colour": "red"})))


def test_an_env_without_an_action_spec_needs_a_policy():
    env = GymEnv("CartPole-v1")
    env.action_spec = None
    for act in (env.rand_action, partial(env.rollout, 2)):
        with refused(ArgumentError, "action_spec"):
            act()
    td = env.rollout(2, lambda td: td.set("action", torch.tensor([1, 0])))
    assert len(td) == 2
