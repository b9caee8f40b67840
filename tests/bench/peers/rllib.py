"""RLlib's env runners, as a program of an environment of their own: `ray[rllib]` pins another gymnasium.

It answers each line, a number of frames, by a line once so many were collected, and ends with its input.
"""

import os
import sys


def main(env_id: str, workers: int, envs: int, frames: int) -> None:
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # loopback alone
    import ray
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.rllib.execution.rollout_ops import synchronous_parallel_sample

    ray.init(address="local", num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    config = PPOConfig().environment(env_id).debugging(log_level="ERROR", seed=0)
    config = config.training(train_batch_size_per_learner=frames)  # else it refuses fragments that do not make it
    config = config.env_runners(
        num_env_runners=workers, num_envs_per_env_runner=envs, num_cpus_per_env_runner=0,
        rollout_fragment_length=frames // (workers * envs),
    ).rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[64, 64]))  # fmt: skip
    runners = config.build_algo().env_runner_group
    print("ready", flush=True)
    for line in sys.stdin:
        episodes = synchronous_parallel_sample(
            worker_set=runners, max_env_steps=int(line), _uses_new_env_runners=True
        )  # fmt: skip
        print(sum(map(len, episodes)), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
