"""Names of our keys in other libraries, SB3, CleanRL, torchrl, RLlib and their kin: only for what to type instead.

A name that means the same is renamed; one that counts something else is converted with the values that the rest of
the command gives. No name in here is accepted as a key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from rlcli.config import registry
from rlcli.config.option import groups, leaves
from rlcli.config.registry import choices
from rlcli.config.schemas import verbs_with

Facts = Mapping[str, Any]


class Counted(NamedTuple):
    """A name that counts in other units: our key, the value there, and what differs."""

    key: str
    convert: Callable[[float, Facts], float]
    why: str


_SAME = {
    "total_frames": "total_timesteps timesteps n_timesteps num_timesteps total_steps total_env_steps num_env_steps",
    "seed": "s random_seed rng_seed",
    "threads": "num_threads n_threads torch_threads",
    "env.id": "e env env_id env_name gym_id environment task game",
    "env.num": "n_envs num_envs nenvs num_workers n_workers num_env_runners num_rollout_workers num_envs_per_worker "
    "num_envs_per_env_runner num_parallel_envs",
    "env.kwargs": "env_kwargs env_config make_kwargs",
    "env.frame_stack": "n_stack num_stack framestack",
    "env.atari.frame_skip": "frame_skip frameskip",
    "env.normalize_observation": "norm_obs normalize_obs",
    "env.normalize_reward": "norm_reward normalize_rewards",
    "env.wrappers": "env_wrapper wrapper_class",
    "policy.hidden": "net_arch fcnet_hiddens hidden_sizes hidden_size hidden_dim num_cells layers",
    "policy.activation": "activation_fn activation_class fcnet_activation",
    "policy.init_std": "std_init init_noise_std",
    "policy.eps_init": "exploration_initial_eps start_e epsilon_start initial_epsilon eps_start",
    "policy.eps_end": "exploration_final_eps end_e epsilon_end final_epsilon eps_final",
    "policy.eps_frames": "epsilon_timesteps annealing_num_steps epsilon_decay",
    "collector.frames_per_batch": "train_batch_size train_batch_size_per_learner steps_per_epoch",
    "collector.init_random_frames": "learning_starts init_random_steps start_steps random_steps initial_random_steps "
    "num_steps_sampled_before_learning_starts warmup_steps",
    "collector.max_frames_per_traj": "max_ep_len max_episode_len",
    "env.max_episode_steps": "time_limit",
    "storage.max_size": "buffer_size replay_size replay_buffer_size capacity memory_size buffer_capacity",
    "sampler.batch_size": "minibatch_size mini_batch_size sgd_minibatch_size sub_batch_size",
    "sampler.alpha": "prioritized_replay_alpha prioritized_alpha",
    "sampler.beta": "prioritized_replay_beta prioritized_beta",
    "value.gamma": "discount discount_factor discounting",
    "value.lmbda": "gae_lambda lambda lambda_ lam lmbda",
    "value.average": "norm_adv normalize_advantage normalize_advantages standardize_advantages average_gae",
    "loss.clip_epsilon": "clip_range clip_param clip_coef clip_ratio cliprange clip_eps eps_clip",
    "loss.clip_value": "clip_range_vf vf_clip_param",
    "loss.entropy_coeff": "ent_coef entropy_coef ent_coeff entropy_loss_scale entropy_weight",
    "loss.critic_coeff": "vf_coef value_coef value_loss_coef vf_loss_coeff critic_coef value_loss_scale",
    "loss.kl_coeff": "kl_coef",
    "loss.n_steps": "n_step nstep",
    "loss.alpha_init": "initial_alpha init_alpha init_temperature",
    "loss.double": "double_q double_dqn",
    "policy.dueling": "dueling_dqn",
    "optim.lr": "learning_rate learningrate step_size policy_lr q_lr alpha_lr actor_lr critic_lr lr_actor",
    "optim.epochs": "n_epochs update_epochs num_epochs num_sgd_iter noptepochs ppo_epochs learning_epochs",
    "optim.max_grad_norm": "grad_clip clip_grad_norm max_gradient_norm gradient_clip",
    "optim.eps": "adam_eps adam_epsilon",
    "run.dir": "o out output output_dir log_dir logdir log_path save_path save_dir tensorboard_log local_dir",
    "run.eval_every": "eval_freq eval_frequency evaluation_interval eval_interval",
    "run.eval_envs": "n_eval_envs num_eval_envs eval_num_envs evaluate.num_envs",
    "run.eval_episodes": "n_eval_episodes num_eval_episodes evaluation_duration",
    "run.checkpoint_every": "save_freq save_frequency save_interval checkpoint_freq checkpoint_frequency",
}
_RENAMED = {name: key for key, names in _SAME.items() for name in names.split()}

_PER_ENV = Counted(
    "collector.frames_per_batch", lambda v, f: v * f["env.num"], "it counts the steps of each env; env.num={env.num}"
)
_PARTS = Counted(
    "sampler.batch_size",
    lambda v, f: max(1, f["collector.frames_per_batch"] // v),
    "a batch of collector.frames_per_batch={collector.frames_per_batch} cut into so many",
)
_TARGET = Counted(
    "loss.target_every",
    lambda v, f: max(1, round(v * f["optim.updates_per_frame"])),
    "it counts frames, ours updates; optim.updates_per_frame={optim.updates_per_frame}",
)
_COUNTED = {
    **dict.fromkeys(("n_steps", "num_steps", "nsteps", "rollout_fragment_length", "rollout_length"), _PER_ENV),
    **dict.fromkeys(("num_steps_per_env", "unroll_length", "horizon", "rollouts"), _PER_ENV),
    **dict.fromkeys(("num_minibatches", "nminibatches", "num_mini_batches", "mini_batches"), _PARTS),
    **dict.fromkeys(("target_update_interval", "target_network_frequency", "target_network_update_freq"), _TARGET),
    **dict.fromkeys(("target_update_freq", "hard_update_freq"), _TARGET),
    **dict.fromkeys(
        ("train_freq", "train_frequency", "update_every"),
        Counted("optim.updates_per_frame", lambda v, f: 1 / v, "updates for every frame, not frames for every update"),
    ),
    **dict.fromkeys(
        ("gradient_steps", "utd_ratio", "replay_ratio", "num_updates"),
        Counted("optim.updates_per_frame", lambda v, f: v, "updates for every frame that is collected"),
    ),
    **dict.fromkeys(
        ("exploration_fraction", "exploration_frac"),
        Counted(
            "policy.eps_frames",
            lambda v, f: max(1, round(v * f["total_frames"])),
            "frames, not a share of total_frames={total_frames}",
        ),
    ),
    **dict.fromkeys(
        ("polyak", "target_network_momentum"), Counted("loss.tau", lambda v, f: 1 - v, "the share that is taken over")
    ),
}
NAMES = (*_RENAMED, *_COUNTED)

_TRACKED = (
    "metrics are in the run folder's metrics.jsonl, and as TensorBoard events with logger=tensorboard; rlcli sends "
    "them nowhere"
)
_FALSE = ("0", "false", "no", "off", "none", "null")
# names of what is no key here: what to type, or what rlcli does in its stead; {} is what was typed after the name
_OTHERWISE = {
    _TRACKED: "track wandb use_wandb mlflow comet aim neptune project project_name entity team wandb_project "
    "wandb_project_name wandb_entity wandb_mode wandb_group wandb_tags wandb_run_name",
    "every batch is in metrics.jsonl, and the console says a line every few seconds": "log_interval log_freq log_every "
    "log_frequency logging_freq logging_interval print_freq print_every report_interval metrics_interval stats_window",
    "rlcli eval RUN --video FILE.mp4 records an episode of a training run": "capture_video record_video save_video "
    "video video_freq video_interval video_folder video_length render render_eval",
    "checkpoints are always written; run.checkpoint_every and run.keep say how often and how many": "save_model "
    "save_agent save_checkpoint save_best save_best_model checkpoint_at_end",
    "runs never overwrite each other; leave it out, and write another run.dir=...": "force f overwrite exist_ok "
    "overwrite_output_dir",
    "write run.dir=runs/{}": "exp_name experiment_name run_name tb_log_name",
}
_SAID = {name: text for text, names in _OTHERWISE.items() for name in names.split()}
_SWITCHES = {  # on, off
    **dict.fromkeys(("verbose", "verbosity", "v", "log_level"), "console=plain console=off"),
    **dict.fromkeys(("quiet", "silent", "q"), "console=off console=auto"),
    **dict.fromkeys(("progress_bar", "progress", "tqdm", "show_progress"), "console=live console=plain"),
    **dict.fromkeys(("cuda", "use_cuda", "gpu", "use_gpu", "gpus", "num_gpus"), "device=cuda device=cpu"),
}
UNLIKE = (*_SAID, *_SWITCHES)

_ALGORITHMS = {
    "ppo": "loss=ppo_clip",
    "a2c": "loss=a2c",
    "reinforce": "loss=reinforce",
    "dqn": "loss=dqn",
    "ddqn": "loss=dqn",
    "sac": "loss=sac",
}
_FEEDFORWARD = {"mlppolicy": "mlp", "cnnpolicy": "cnn", "multiinputpolicy": "dict"}


def instead(schema: type, name: str, value: str, facts: Facts) -> str:
    """Return what to type for a name as other libraries have it, `--total-timesteps`, `ppo.ent_coef`; "": unknown."""
    word = _word(name)
    if word in ("algo", "algorithm", "alg", "agent"):
        return _algorithm(schema, value)
    if word in ("env", "environment") and value in choices(schema, "env"):
        return f"write env={value}"
    if word in groups(schema) and word != "env":  # --device cuda
        return f"write {word}={value or '...'}"
    dotted = name.lstrip("+-")
    if said := _otherwise(_word(dotted.partition(".")[0]) if dotted.startswith("wandb.") else word, value):
        return said
    if (ours := next((key for key in (dotted, word) if key in leaves(schema)), _RENAMED.get(word))) is not None:
        return _belongs(schema, ours) or f"write {ours}={value or '...'}"
    if (counted := _COUNTED.get(word)) is None:
        return ""
    if elsewhere := _belongs(schema, counted.key):
        return elsewhere
    why = re.sub(r"\{([\w.]+)\}", lambda found: str(facts[found[1]]), counted.why)
    return f"write {counted.key}={_converted(counted, value, facts)} ({why})"


def facts_of(schema: type, given: Iterable[tuple[str, str, str]], composed: Facts) -> Facts:
    """Return every key's value: as it is `composed`, if it is, and as words by other names give it."""
    known = {key: composed.get(key, leaf.default) for key, leaf in leaves(schema).items()}
    numbers = {_word(key): number for key, _, value in given if (number := _number(value)) is not None}
    known |= {_RENAMED[word]: number for word, number in numbers.items() if word in _RENAMED}
    for word, number in numbers.items():
        if _COUNTED.get(word) == _PER_ENV:
            known[_PER_ENV.key] = _PER_ENV.convert(number, known)
    return known


def choice_instead(schema: type, group: str, value: str) -> str:
    """Return what to type for a choice that is none but says what is meant: `env=CartPole-v1`, `policy=MlpPolicy`."""
    if group == "env" and (re.search(r"-v\d+$", value) or value in registry.users_names("env")):
        return f"write {'env=atari ' if value.startswith('ALE/') else ''}env.id={value}"
    if group == "logger" and _SAID.get(value.lower()) == _TRACKED:
        return _TRACKED
    if group == "policy" and value.lower() in _FEEDFORWARD:
        return f"write policy={_FEEDFORWARD[value.lower()]}"
    if group == "loss" and value.lower() in _ALGORITHMS:
        return _algorithm(schema, value)
    return ""


def _otherwise(word: str, value: str) -> str:
    """Return what to type, or what there is, for what is no key of ours."""
    if word in _SWITCHES:
        return f"write {_SWITCHES[word].split()[value.lower() in _FALSE]}"
    return _SAID.get(word, "").format(value or "...")


def _word(name: str) -> str:
    return name.lstrip("+-").rsplit(".", 1)[-1].replace("-", "_").lower()


def _belongs(schema: type, key: str) -> str:
    return "" if key in leaves(schema) else f"that is {key}, which belongs to rlcli {' and '.join(verbs_with(key))}"


def _algorithm(schema: type, value: str) -> str:
    if "loss" not in groups(schema):
        return "rlcli collect learns nothing: rlcli train has loss=..."
    found = _ALGORITHMS.get(re.sub(r"[^a-z0-9]", "", value.lower()))
    return f"write {found}" if found else f"write loss={' | '.join(choices(schema, 'loss'))}"


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return int(number) if number.is_integer() else number


def _converted(counted: Counted, value: str, known: Facts) -> str:
    number = _number(value)
    try:
        found = None if number is None else counted.convert(number, known)
        if found is not None:
            return f"{int(found)}" if float(found).is_integer() else f"{found:.6g}"
    except (ArithmeticError, TypeError, ValueError):
        pass
    return "..."
