"""Other frameworks, each measured in its own documented way; the only place that imports them, inside functions.

What is made of one that is not installed is None, or empty.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import multiprocessing
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

# ---- collecting on N envs in one process, with the same sizes of nets ------------------------------------------------


def torchrl_collector(env_id: str, lanes: int, steps: int) -> Callable[[], object] | None:
    """torchrl's Collector over a SerialEnv with a ProbabilisticActor; None where it is not installed."""
    try:
        from torchrl.collectors import Collector
        from torchrl.envs import GymEnv, SerialEnv
    except ImportError:
        return None
    env = SerialEnv(lanes, lambda: GymEnv(env_id))
    actor = _torchrl_actor(env)
    collector = iter(Collector(env, actor, frames_per_batch=lanes * steps, total_frames=-1))
    return lambda: next(collector)


def _torchrl_actor(env: Any) -> Any:
    """A 2x64 actor for its env, as its own tutorials put one together."""
    from tensordict.nn import TensorDictModule
    from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor

    net = MLP(
        in_features=env.observation_spec["observation"].shape[-1], out_features=env.action_spec.shape[-1],
        num_cells=[64, 64], activation_class=nn.Tanh,
    )  # fmt: skip
    return ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["logits"]), in_keys=["logits"],
        spec=env.action_spec, distribution_class=OneHotCategorical, return_log_prob=True,
    )  # fmt: skip


def torchrl_recurrent_collector(env_id: str, lanes: int, steps: int, units: int) -> Callable[[], object] | None:
    """torchrl's Collector over a SerialEnv with its GRUModule between two layers; None where it is not installed."""
    try:
        from tensordict.nn import TensorDictModule, TensorDictSequential
        from torchrl.collectors import Collector
        from torchrl.envs import Compose, GymEnv, InitTracker, SerialEnv, TransformedEnv
        from torchrl.modules import GRUModule, OneHotCategorical, ProbabilisticActor
    except ImportError:
        return None
    gru = GRUModule(input_size=units, hidden_size=units, in_key="encoded", out_key="hidden")
    bare = SerialEnv(lanes, lambda: GymEnv(env_id))
    env = TransformedEnv(bare, Compose(InitTracker(), gru.make_tensordict_primer()))
    observed, actions = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]
    encoder = nn.Sequential(nn.Linear(observed, units), nn.Tanh())
    core = TensorDictSequential(
        TensorDictModule(encoder, in_keys=["observation"], out_keys=["encoded"]), gru,
        TensorDictModule(nn.Linear(units, actions), in_keys=["hidden"], out_keys=["logits"]),
    )  # fmt: skip
    actor = ProbabilisticActor(
        core, in_keys=["logits"], spec=env.action_spec, distribution_class=OneHotCategorical, return_log_prob=True
    )
    collector = iter(Collector(env, actor, frames_per_batch=lanes * steps, total_frames=-1))
    return lambda: next(collector)


def sb3_collector(env_id: str, lanes: int, steps: int) -> Callable[[], object] | None:
    """SB3's `PPO.collect_rollouts`: acting, values and advantages of N envs in a DummyVecEnv."""
    try:
        from stable_baselines3 import PPO
        from stable_baselines3.common.callbacks import CallbackList
        from stable_baselines3.common.env_util import make_vec_env
    except ImportError:
        return None
    model = PPO("MlpPolicy", make_vec_env(env_id, lanes), n_steps=steps, batch_size=lanes * steps, device="cpu", seed=0)
    model._setup_learn(10**9, None)
    callback = CallbackList([])
    callback.init_callback(model)
    env = model.env
    assert env is not None
    return lambda: model.collect_rollouts(env, callback, model.rollout_buffer, steps)


# ---- buffers ---------------------------------------------------------------------------------------------------------


def torchrl_buffer(
    capacity: int, *, slices: tuple[int, int] | None = None, batch_size: int = 256, scratch: str | None = None
) -> Any:
    """torchrl's TensorDictReplayBuffer: `extend`, `sample`, `[]`.

    Parameters
    ----------
    slices : (num_slices, slice_len), optional
        Draw slices of trajectories told apart by `("collector", "traj_ids")`.
    scratch : str, optional
        Rows on disk, in this folder.
    """
    try:
        from torchrl.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer
        from torchrl.data.replay_buffers.samplers import RandomSampler, SliceSampler
    except ImportError:
        return None
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    storage = LazyTensorStorage(capacity) if scratch is None else LazyMemmapStorage(capacity, scratch_dir=scratch)
    sampler = RandomSampler()
    if slices is not None:
        batch_size = slices[0] * slices[1]
        sampler = SliceSampler(num_slices=slices[0], traj_key=("collector", "traj_ids"))
    return TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=batch_size)


def cpprb_buffer(capacity: int, like: TensorDictBase) -> tuple[Any, Callable[[TensorDictBase], Any]] | None:
    """cpprb's ReplayBuffer for the keys of `like [N]`, and its `add` on a batch whose arrays are made beforehand."""
    try:
        from cpprb import ReplayBuffer
    except ImportError:
        return None
    leaves = {_name(key): x for key, x in like.items(include_nested=True, leaves_only=True)}
    kinds = {name: {"shape": tuple(x.shape[1:]) or 1, "dtype": x.numpy().dtype} for name, x in leaves.items()}
    buffer = ReplayBuffer(capacity, kinds)
    return buffer, lambda batch: buffer.add(**arrays(batch))


def arrays(batch: TensorDictBase) -> dict[str, Any]:
    """A batch as cpprb's keyword arguments, without copies."""
    return {_name(key): x.numpy() for key, x in batch.items(include_nested=True, leaves_only=True)}


def _name(key: Any) -> str:
    return key if isinstance(key, str) else "_".join(key)


def torchrl_bytes(buffer: Any) -> int:
    """Bytes of a torchrl buffer's storage for the rows that it holds."""
    held = buffer[: len(buffer)]
    return sum(x.numel() * x.element_size() for x in held.values(True, True) if isinstance(x, torch.Tensor))


# ---- learning --------------------------------------------------------------------------------------------------------

Estimate = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def torchrl_estimates() -> dict[str, Estimate]:
    """A loop over steps and the vectorised default, by name; empty where torchrl is missing.

    Each is a function of (gamma, lmbda, value, next value, reward, done, terminated).
    """
    try:
        from torchrl.objectives.value import functional
    except ImportError:
        return {}
    return {
        "torchrl, loop": functional.generalized_advantage_estimate,
        "torchrl, vectorised": functional.vec_generalized_advantage_estimate,
    }


def torchrl_update(
    actor: Any, critic: Any, batch: TensorDictBase, *, epochs: int, batch_size: int, generator: torch.Generator
) -> Callable[[], None] | None:
    """One update on the flat batch `[N]`, as its own PPO tutorial puts it together; None where it is missing."""
    try:
        from torchrl.objectives import ClipPPOLoss
    except ImportError:
        return None
    loss = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=0.01, critic_coeff=0.5, loss_critic_type="l2")
    loss.set_keys(sample_log_prob="sample_log_prob")
    optimizer = torch.optim.Adam(loss.parameters(), lr=3e-4, eps=1e-5)
    parameters = list(loss.parameters())

    def run() -> None:
        for _ in range(epochs):
            for rows in torch.randperm(len(batch), generator=generator).split(batch_size):
                terms = loss(batch[rows])
                total = terms["loss_objective"] + terms["loss_critic"] + terms["loss_entropy"]
                total.backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()
                optimizer.zero_grad()

    return run


def torchrl_recurrent(layer: nn.GRU | nn.LSTM) -> dict[str, Any]:
    """torchrl's module around that layer by backend, or a sentence why it cannot be had; empty where it is missing.

    Each reads "x" and "is_init" of a TensorDict `[B, T]`, starts from zeros, and writes "features". On a GPU products
    are in tf32, as those of torch.nn's layers are. Nothing is compiled: that takes longer than a bench.
    """
    try:
        from torchrl.modules import GRUModule, LSTMModule
    except ImportError:
        return {}
    kind, cell, states = (GRUModule, "gru", ["h"]) if isinstance(layer, nn.GRU) else (LSTMModule, "lstm", ["h", "c"])
    found: dict[str, Any] = {}
    for backend in ("pad", "scan", "triton"):
        if backend == "triton" and next(layer.parameters()).device.type != "cuda":
            continue
        try:
            found[backend] = kind(
                in_keys=["x", *states, "is_init"], out_keys=["features", *(("next", s) for s in states)],
                default_recurrent_mode=True, recurrent_backend=backend, recurrent_matmul_precision="fast",
                **{cell: layer},
            )  # fmt: skip
        except (ImportError, NotImplementedError) as missing:  # a package that the backend needs
            found[backend] = str(missing)
    return found


# ---- a whole run on N envs in one process ----------------------------------------------------------------------------

UNSEEN = 1 << 30  # seed of the episodes that are played at the end; training has small ones


def sb3_run(settings: dict[str, Any], seed: int) -> Callable[[], Callable[[int], float]] | None:
    """One run; it returns what plays so many episodes by mode actions. None without stable-baselines3."""
    try:
        import stable_baselines3
        from stable_baselines3.common.env_util import make_vec_env
        from stable_baselines3.common.evaluation import evaluate_policy
    except ImportError:
        return None
    kind, more = {"ppo": _ppo, "dqn": _dqn, "sac": _sac}[settings["algo"]](settings)

    def run() -> Callable[[int], float]:
        model = getattr(stable_baselines3, kind)(
            "MlpPolicy",
            make_vec_env(settings["env.id"], settings["env.num"], seed=seed),
            batch_size=settings["sampler.batch_size"],
            gamma=settings["value.gamma"],
            device="cpu",
            seed=seed,
            **more,
        )
        model.learn(settings["total_frames"])
        if kind != "PPO":
            model.replay_buffer = None  # many runs wait to be played

        def play(episodes: int) -> float:
            unseen = make_vec_env(settings["env.id"], episodes, seed=UNSEEN)
            mean, _ = evaluate_policy(model, unseen, episodes, deterministic=True)
            return float(mean)  # type: ignore[arg-type]  # a list only where one is asked for

        return play

    return run


def _ppo(settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:

    return "PPO", {
        "n_steps": settings["collector.frames_per_batch"] // settings["env.num"],
        "n_epochs": settings["optim.epochs"],
        "learning_rate": lambda left: settings["optim.lr"] * left,
        "gae_lambda": settings["value.lmbda"],
        "ent_coef": settings["loss.entropy_coeff"],
        "policy_kwargs": {"net_arch": list(settings["policy.hidden"]), "activation_fn": nn.Tanh},
    }


def _stored(settings: dict[str, Any]) -> dict[str, Any]:
    """What DQN and SAC have in common; a step of all envs counts as one for SB3."""
    frames = settings["collector.frames_per_batch"]
    return {
        "train_freq": max(1, frames // settings["env.num"]),
        "gradient_steps": max(1, round(settings["optim.updates_per_frame"] * frames)),
        "learning_rate": settings["optim.lr"],
        "buffer_size": 100_000,
        "policy_kwargs": {"net_arch": list(settings["policy.hidden"])},
    }


def _dqn(settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    frames = settings["total_frames"]
    more = {"learning_starts": min(1000, frames // 2), "target_update_interval": 10, "exploration_fraction": 0.16}
    return "DQN", {**_stored(settings), **more, "exploration_final_eps": 0.04}


def _sac(settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "SAC", {**_stored(settings), "learning_starts": min(100, settings["total_frames"] // 2)}


# ---- envs in worker processes ----------------------------------------------------------------------------------------


class Stepped(NamedTuple):
    """Envs that take so many steps each when `step` is called, until `close` is."""

    step: Callable[[int], object]
    close: Callable[[], object]


def gymnasium_async(env_id: str, lanes: int, seed: int = 0) -> Stepped:
    """gymnasium's AsyncVectorEnv with random actions; it is always there."""
    from gymnasium.vector import AsyncVectorEnv, AutoresetMode

    make = functools.partial(gymnasium.make, env_id)
    context = "fork" if _FORKS else None
    envs = AsyncVectorEnv([make] * lanes, context=context, autoreset_mode=AutoresetMode.SAME_STEP)
    envs.reset(seed=seed)
    actions = [envs.action_space.sample() for _ in range(256)]

    def step(steps: int) -> None:
        for t in range(steps):
            envs.step(actions[t % 256])

    return Stepped(step, envs.close)


def sb3_subproc(env_id: str, lanes: int, seed: int = 0) -> Stepped | None:
    """SB3's SubprocVecEnv with random actions, its processes forked; None where it is not installed."""
    try:
        from stable_baselines3.common.env_util import make_vec_env
        from stable_baselines3.common.vec_env import SubprocVecEnv
    except ImportError:
        return None
    kwargs = {"start_method": "fork"} if _FORKS else {}
    envs = make_vec_env(env_id, lanes, seed=seed, vec_env_cls=SubprocVecEnv, vec_env_kwargs=kwargs)
    envs.reset()
    actions = [np.array([envs.action_space.sample() for _ in range(lanes)]) for _ in range(256)]

    def step(steps: int) -> None:
        for t in range(steps):
            envs.step(actions[t % 256])

    return Stepped(step, envs.close)


def torchrl_parallel(env_id: str, lanes: int) -> Stepped | None:
    """torchrl's ParallelEnv with random actions, its processes forked; None where it is not installed."""
    try:
        from torchrl.envs import GymEnv, ParallelEnv
    except ImportError:
        return None
    env = ParallelEnv(lanes, functools.partial(GymEnv, env_id), mp_start_method="fork" if _FORKS else None)
    state = [env.reset()]
    actions = [env.full_action_spec.rand() for _ in range(256)]

    def step(steps: int) -> None:
        now = state[0]
        for t in range(steps):
            _, now = env.step_and_maybe_reset(now.update(actions[t % 256]))
        state[0] = now

    return Stepped(step, env.close)


def torchrl_multi_sync(env_id: str, workers: int, lanes: int, steps: int) -> Stepped | None:
    """torchrl's MultiSyncCollector of SerialEnvs and a 2x64 actor: `step` is by multiples of `steps`."""
    try:
        from torchrl.collectors import MultiSyncCollector
        from torchrl.envs import GymEnv, SerialEnv
        from torchrl.weight_update import SharedMemWeightSyncScheme
    except ImportError:
        return None
    make = functools.partial(SerialEnv, lanes, functools.partial(GymEnv, env_id))
    one = GymEnv(env_id)
    actor = _torchrl_actor(one)
    one.close()
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    scheme = SharedMemWeightSyncScheme()  # its default; one that is not shut down would hang this process at its end
    before = multiprocessing.get_start_method(allow_none=True)
    if _FORKS:  # it takes no argument for that
        multiprocessing.set_start_method("fork", force=True)
    try:
        collector = MultiSyncCollector(
            [make] * workers, actor, frames_per_batch=workers * lanes * steps, total_frames=-1, cat_results="stack",
            weight_sync_schemes={"policy": scheme},
        )  # fmt: skip
        batches = iter(collector)
        next(batches)
    finally:
        multiprocessing.set_start_method(before, force=True)

    def step(count: int) -> None:
        for _ in range(count // steps):
            next(batches)

    def close() -> None:
        collector.shutdown()
        scheme.shutdown()

    return Stepped(step, close)


_FORKS = "fork" in multiprocessing.get_all_start_methods()  # else each worker imports its framework for seconds


# ---- weights to worker processes -------------------------------------------------------------------------------------


def torchrl_weights(scheme: str, net: nn.Module, workers: int) -> TorchrlWeights | None:
    """torchrl's scheme of that name, from `net` to copies of it; None where it is not installed."""
    try:
        import torchrl.weight_update as schemes
    except ImportError:
        return None
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    return TorchrlWeights(getattr(schemes, scheme)(), net, workers)


class TorchrlWeights:
    """A scheme whose receivers adopt in their background thread while the worker's main thread sleeps."""

    def __init__(self, scheme: Any, net: nn.Module, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.scheme, self.weights = scheme, TensorDict.from_module(net).data
        own = copy.deepcopy(
            net
        )  # it moves what it is made with into memory that its workers act on while it is written
        scheme.init_on_sender(model_id="policy", model=own, devices=[torch.device("cpu")] * workers, ctx=context)
        self._ends = []
        self._processes = []
        for index in range(workers):
            mine, theirs = context.Pipe()
            process = context.Process(target=_torchrl_receiver, args=(scheme, copy.deepcopy(own), index, theirs))
            process.start()
            theirs.close()
            self._ends.append(mine)
            self._processes.append(process)
        scheme.connect()
        for end in self._ends:
            end.recv()

    def send(self) -> None:
        """The net's weights as they are now; returns when every worker has them."""
        self.scheme.send(self.weights)

    def act(self, how: Callable[[nn.Module], None]) -> None:
        """Have every worker call `how(net)` again and again until it is asked something."""
        for end in self._ends:
            end.send(how)

    def adopted(self) -> list[int]:
        """When each worker had written what was sent last to its model, in nanoseconds of the system's clock."""
        return self._asked("adopted")

    def numbers(self) -> list[set[float]]:
        """What each worker's model holds."""
        return self._asked("numbers")

    def _asked(self, what: str) -> list[Any]:
        for end in self._ends:
            end.send(what)
        return [end.recv() for end in self._ends]

    def close(self) -> None:
        """End the workers."""
        for end in self._ends:
            end.close()
        self.scheme.shutdown()
        for process in self._processes:
            process.join(10)
            process.kill()


def _torchrl_receiver(scheme: Any, net: nn.Module, index: int, end: Any) -> None:
    torch.set_num_threads(1)
    apply, adopted = scheme._strategy.apply_weights, 0

    def noted(*given: Any, **more: Any) -> None:
        nonlocal adopted
        apply(*given, **more)
        adopted = time.monotonic_ns()

    scheme._strategy.apply_weights = noted
    scheme.init_on_receiver(model_id="policy", model=net, worker_idx=index)
    scheme.connect(worker_idx=index)
    end.send("ready")
    with contextlib.suppress(EOFError, ConnectionResetError):
        while what := end.recv():
            if callable(what):
                while not end.poll():
                    what(net)
                continue
            held = {x.item() for tensor in net.parameters() for x in tensor.detach().aminmax()}
            end.send(adopted if what == "adopted" else held)
    os._exit(0)
