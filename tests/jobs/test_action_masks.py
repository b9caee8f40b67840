"""Runs in an env that raises where an action is not allowed: no algorithm, form of memory or process takes one."""

import gymnasium as gym
import pytest
from face import refused
from masked_env import SPACES, Choices, WithMethod

import rlcli
from rlcli.errors import ConfigError, RlcliError
from rlcli.modules import build_actor_critic

SHORT = ["env.num=4", "collector.frames_per_batch=128", "sampler.batch_size=64", "console=off", "logger=none"]
FORK = "collector.start_method=fork"  # knows what this process registered
DQN = ["loss=dqn", "storage=tensor", "sampler=random", "collector.init_random_frames=200"]
RUNS = {
    "ppo": [],
    "ppo-multi": ["env.id=Choices-multi", "memory=delta"],
    "ppo-bits": ["env.id=Choices-bits", "memory=full"],
    "ppo-kl": ["loss=ppo_kl", "memory=compact"],
    "a2c": ["loss=a2c"],
    "gru": ["policy=gru", "sampler.slice_len=8"],
    "dqn": [*DQN, "loss.double=true"],
    "dqn-multi-step": [*DQN, "loss.n_steps=3", "memory=delta", "sampler=prioritized"],
    "dqn-gru": [*DQN, "policy=gru", "sampler=slice", "sampler.slice_len=4", "policy.dueling=true"],
    "parallel": ["env.mode=parallel", "env.workers=2"],
    "workers": ["collector=multi_sync", "collector.num_workers=2", FORK, "env.frame_stack=2"],
    "info": ["env.id=InInfo", "env.wrappers=[{ActionMask: {key: legal}}]"],
    "method": ["env.id=WithMethod", "env.wrappers=[ActionMask]"],
}


@pytest.fixture(autouse=True)
def known(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind in SPACES:
        monkeypatch.setitem(gym.registry, f"Choices-{kind}", gym.envs.registration.EnvSpec(
            f"Choices-{kind}", Choices, kwargs={"kind": kind}
        ))  # fmt: skip
    monkeypatch.setitem(gym.registry, "InInfo", gym.envs.registration.EnvSpec(
        "InInfo", Choices, kwargs={"shows": "info"}
    ))  # fmt: skip
    monkeypatch.setitem(gym.registry, "WithMethod", gym.envs.registration.EnvSpec("WithMethod", WithMethod))


@pytest.mark.parametrize("words", RUNS.values(), ids=RUNS)
@pytest.mark.every(3)
def test_no_run_takes_an_action_that_is_not_allowed(words):
    words = ["env.id=Choices-discrete", "env.mode=serial", *SHORT, "total_frames=512", "run.eval_episodes=4", *words]
    run = rlcli.train(words)
    assert run.summary["frames"] == 512 and len(run.summary["evaluation"]["returns"]) == 4
    policy = run.policy()
    env = policy.make_env()
    for seed, exploration in enumerate(["random", "deterministic"] * 3):
        (observation, _), over = env.reset(seed=seed), False
        policy.reset()
        while not over:
            observation, _, over, _, _ = env.step(policy(observation, exploration=exploration))
    refused(RlcliError, "allows", lambda: policy(observation))


@pytest.mark.parametrize("words", [["policy=random"], ["policy=auto"], ["policy=random", "collector=multi_sync", FORK]])
def test_frames_are_collected_with_allowed_actions(words):
    data = rlcli.collect(
        ["env.id=Choices-multi", *SHORT[:2], "env.mode=serial", "console=off", "total_frames=256", *words]
    )
    assert data.summary["frames"] == 256


def test_a_mask_that_is_told_to_be_none_is_an_observation_like_others():
    with refused(RlcliError, "allowed"):
        rlcli.train(["env.id=Choices-discrete", "env.mode=serial", *SHORT, "policy.action_mask_key=none"])


def test_a_users_policy_that_does_not_read_the_mask_is_masked():
    @rlcli.register_policy("unaware")
    def unaware(observation_spec, action_spec):  # may only see the vector
        return build_actor_critic(observation_spec, action_spec, in_keys=["vector"])

    words = ["env.id=Choices-discrete", "env.mode=serial", *SHORT, "total_frames=256"]
    run = rlcli.train([*words, "policy=unaware"])
    assert run.summary["frames"] == 256


def test_what_shows_no_mask_is_refused():
    words = ["env.mode=serial", *SHORT, "env.wrappers=[ActionMask]"]
    refused(RlcliError, "action_mask", lambda: rlcli.train(["env.id=InInfo", *words]))
    refused(ConfigError, "action_mask", lambda: rlcli.train(["env.id=Choices-discrete", *words]))
