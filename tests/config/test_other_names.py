"""Names of other libraries: each is answered with a key of ours that exists, and with the value it would have there."""

import re

import pytest
from face import VERBS, Config, configure, leaves, refused

from rlcli.config.option import find, groups
from rlcli.config.other_names import NAMES, UNLIKE, facts_of, instead
from rlcli.errors import ConfigError


def answer(name: str, value: str, verb: str = "train", **facts) -> str:
    composed = {key.replace("__", "."): given for key, given in facts.items()}
    return instead(VERBS[verb], name, value, facts_of(VERBS[verb], [], composed))


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_answered_with_keys_that_exist(name, verb):
    text = answer(name, "2", verb)
    keys = re.findall(r"^(?:write |that is )([\w.]+)", text)
    assert keys and all(find(Config, key) for key in keys), text
    assert all(key in leaves(VERBS[verb]) for key in keys) or "belongs to rlcli train" in text
    assert name not in leaves(Config)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", UNLIKE)
def test_every_name_of_what_is_no_key_is_answered_with_what_there_is(name, verb):
    text = answer(name, "x", verb)
    keys = re.findall(r"\b([a-z]+(?:\.[a-z_]+)?)=|\b(run\.[a-z_]+)", text)
    for key in ("".join(pair) for pair in keys):
        assert find(Config, key) or key in groups(Config), text
    assert text and name not in NAMES and not find(Config, name)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("wandb=true", "unknown key 'wandb'; metrics are in the run folder's metrics.jsonl"),
        ("wandb.project=x", "and as TensorBoard events with logger=tensorboard"),
        ("logger=wandb", "unknown logger 'wandb'; metrics are in the run folder's metrics.jsonl"),
        ("--track", "there is no flag --track; metrics are in"),
        ("verbose=0", "write console=off"),
        ("verbose=1", "write console=plain"),
        ("progress_bar=true", "write console=live"),
        ("log_interval=10", "every batch is in metrics.jsonl"),
        ("capture_video=true", "rlcli eval RUN --video FILE.mp4"),
        ("cuda=false", "write device=cpu"),
        ("exp_name=first", "write run.dir=runs/first"),
        ("save_model=true", "checkpoints are always written"),
    ],
)
def test_what_is_no_key_here_is_answered_with_what_there_is_instead(typed, words):
    with pytest.raises(ConfigError) as refusal:
        configure("train", [typed])
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("learning_rate=3e-2", "write optim.lr=0.03"),
        ("n_envs=4", "write env.num=4"),
        ("ent_coef=0.01", "write loss.entropy_coeff=0.01"),
        ("vf_coef=0.5", "write loss.critic_coeff=0.5"),
        ("gae_lambda=0.95", "write value.lmbda=0.95"),
        ("clip_range=0.2", "write loss.clip_epsilon=0.2"),
        ("n_epochs=4", "write optim.epochs=4"),
        ("total_timesteps=1e6", "write total_frames=1000000"),
        ("ppo.learning_rate=1", "write optim.lr=1"),
        ("n_steps=64", "write collector.frames_per_batch=512"),
        ("n_steps=64 env.num=4", "write collector.frames_per_batch=256"),
        ("n_steps=64 num_envs=2", "write collector.frames_per_batch=128"),
        ("n_steps=64 num_envs=2 num_minibatches=4", "write sampler.batch_size=32"),
        ("rollout_fragment_length=10 recipe=ppo_pong env.num=16", "write collector.frames_per_batch=160"),
        ("exploration_fraction=0.1 total_frames=50_000", "write policy.eps_frames=5000"),
        ("train_freq=4", "write optim.updates_per_frame=0.25"),
        ("target_update_interval=1000 optim.updates_per_frame=0.5", "write loss.target_every=500"),
        ("polyak=0.995", "write loss.tau=0.005"),
        ("train_freq=0", "write optim.updates_per_frame=..."),
        ("n_steps=many", "write collector.frames_per_batch=..."),
        ("algo=PPO", "write loss=ppo_clip"),
        ("algo=sac", "write loss=sac"),
        ("algo=td3", "write loss=ppo_clip | "),
        ("agent=DQN", "write loss=dqn"),
    ],
)
def test_a_value_is_converted_with_the_rest_of_the_command(typed, words):
    with pytest.raises(ConfigError) as refusal:
        configure("train", typed.split())
    assert words in str(refusal.value)


def test_what_a_recipe_sets_counts_in_a_conversion():
    num = configure("train", ["recipe=ppo_halfcheetah"]).env.num
    with refused(ConfigError, f"collector.frames_per_batch={10 * num}"):
        configure("train", ["recipe=ppo_halfcheetah", "n_steps=10"])
