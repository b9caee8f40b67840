"""The hand-written sides of `python -m tests.bench gpu`: plain eager torch, and a loop of graphs of LeanRL's kind.

Nothing hidden: static tensors, a few warm-up calls on a side stream, one capture of acting and one of the update, then
replays. Read them before believing a ratio. Beside them, what counts launches and waits of any side.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlcli.modules import ActorCritic

WARM = 3  # calls before a capture, as LeanRL makes them


# ---- graphs ----------------------------------------------------------------------------------------------------------
class Replayed(Protocol):
    def replay(self) -> None: ...


class Plain:
    """Where there is no GPU: a recorded call is made as it is."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.replay = call


def capture(call: Callable[[], object], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph


def recorder(device: torch.device) -> Callable[[Callable[[], object]], Replayed]:
    """Return what records a call, which is not carried out by that; tests put a stand-in here."""
    if device.type != "cuda":
        return Plain
    stream = torch.cuda.Stream(device)
    return lambda call: capture(call, stream)


class GraphModule:
    """A call on static tensors: plain on a side stream at first, captured, and replayed from then on."""

    def __init__(self, call: Callable[[], object], device: torch.device) -> None:
        self.call, self.record, self.calls = call, recorder(device), 0
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.graph: Replayed | None = None

    def __call__(self) -> None:
        if self.graph is None and self.calls < WARM:
            self.calls += 1
            if self.stream is None:
                self.call()
                return
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.call()
            torch.cuda.current_stream().wait_stream(self.stream)
            return
        if self.graph is None:
            self.graph = self.record(self.call)
        self.graph.replay()


def in_a_graph(call: Callable[[], object], device: torch.device, graph: bool) -> Callable[[], object]:
    return GraphModule(call, device) if graph else call


# ---- nets ------------------------------------------------------------------------------------------------------------
class TwoHeads(nn.Module):
    """Logits and values `[N]` of an actor and a critic of ours, without tensordicts."""

    def __init__(self, pair: ActorCritic) -> None:
        super().__init__()
        *trunk, head, _ = pair.actor.module
        self.head = head.module
        if trunk:  # shared
            self.trunk: nn.Module = trunk[0].module
            self.value: nn.Module = pair.critic.module[-1].module
        else:
            self.trunk, self.value = nn.Identity(), pair.critic.module

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(obs)
        return self.head(hidden), self.value(hidden).squeeze(-1)


# ---- acting ----------------------------------------------------------------------------------------------------------
class Act:
    """Observations of N envs go to a static tensor, actions come back; one noise draw a step, outside of the graph."""

    def __init__(self, net: TwoHeads, like: np.ndarray, device: torch.device, graph: bool) -> None:
        self.net = net
        self.obs = torch.zeros(like.shape, dtype=torch.from_numpy(like).dtype, device=device)
        with torch.no_grad():
            logits, value = net(self.obs)
        self.noise = torch.ones_like(logits)
        self.action = torch.zeros(len(like), dtype=torch.int64, device=device)
        self.log_prob, self.value = torch.zeros_like(value), torch.zeros_like(value)
        self.step = in_a_graph(self._step, device, graph)

    @torch.no_grad()
    def _step(self) -> None:
        logits, value = self.net(self.obs)
        log_p = logits.log_softmax(-1)
        action = (log_p - self.noise.log()).argmax(-1)  # exponential noise: a draw of the distribution
        self.action.copy_(action)
        self.log_prob.copy_(log_p.gather(-1, action[:, None]).squeeze(-1))
        self.value.copy_(value)

    @torch.no_grad()
    def __call__(self, obs: np.ndarray) -> np.ndarray:
        self.obs.copy_(torch.from_numpy(obs))
        self.noise.exponential_()
        self.step()
        return self.action.cpu().numpy()


class Still(gym.Env):
    """An env that shows the same thing at every step, so that acting is what takes the time."""

    def __init__(self, shape: tuple[int, ...], actions: int) -> None:
        kind = (0, 255, shape, np.uint8) if len(shape) == 3 else (-1, 1, shape, np.float32)
        self.observation_space, self.action_space = gym.spaces.Box(*kind), gym.spaces.Discrete(actions)
        self.observation_space.seed(0)
        self.shown = self.observation_space.sample()

    def reset(self, **options: Any) -> tuple[np.ndarray, dict]:
        super().reset(**options)
        return self.shown, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        return self.shown, 1.0, False, False, {}


# ---- the update ------------------------------------------------------------------------------------------------------
class Numbers(NamedTuple):
    """The numbers of a PPO update."""

    lr: float = 3e-4
    eps: float = 1e-5
    clip: float = 0.2
    entropy: float = 0.01
    critic: float = 0.5
    norm: float = 0.5


class PPO:
    """A PPO update on flat columns `[N, ...]` of a device; rows are drawn on the host, as ours are."""

    def __init__(
        self, net: TwoHeads, device: torch.device, graph: bool, batch_size: int, generator: torch.Generator,
    ) -> None:  # fmt: skip
        self.w = Numbers()
        self.net, self.device, self.graph, self.size = net, device, graph, batch_size
        self.parameters = list(net.parameters())
        lr = torch.tensor(self.w.lr, device=device) if graph else self.w.lr
        self.adam = torch.optim.Adam(
            self.parameters, lr=lr, eps=self.w.eps, fused=True, capturable=graph and device.type == "cuda"
        )
        self.generator = generator
        self.static: dict[str, Tensor] = {}
        self.step: Callable[[], object] = self._step

    def _step(self) -> None:
        obs, action, old, advantage, target = self.static.values()
        logits, value = self.net(obs)
        log_p = logits.log_softmax(-1)
        log_prob = log_p.gather(-1, action[:, None]).squeeze(-1)
        entropy = -(log_p.exp() * log_p).sum(-1).mean()
        ratio = (log_prob - old).exp()
        clipped = ratio.clamp(1 - self.w.clip, 1 + self.w.clip)
        gain = torch.min(ratio * advantage, clipped * advantage).mean()
        error = (value - target).pow(2).mean()
        self.adam.zero_grad()
        (-gain + self.w.critic * error - self.w.entropy * entropy).backward()
        nn.utils.clip_grad_norm_(self.parameters, self.w.norm)
        self.adam.step()

    def __call__(self, columns: dict[str, Tensor], epochs: int) -> None:
        for _ in range(epochs):
            order = torch.randperm(len(columns["action"]), generator=self.generator).to(self.device)
            for rows in order.split(self.size):
                self._on({name: x[rows] for name, x in columns.items()})

    def _on(self, minibatch: dict[str, Tensor]) -> None:
        if not self.graph or (self.static and len(minibatch["action"]) != len(self.static["action"])):
            self.static, kept = minibatch, self.static  # a short last one is not worth a graph
            self._step()
            self.static = kept
            return
        if not self.static:
            self.static = {name: x.clone() for name, x in minibatch.items()}
            self.step = GraphModule(self._step, self.device)
        for name, x in minibatch.items():
            self.static[name].copy_(x)
        self.step()


COLUMNS = {"obs": "observation", "action": "action", "old": "sample_log_prob", "advantage": "advantage",
           "target": "value_target"}  # fmt: skip


# ---- whole runs ------------------------------------------------------------------------------------------------------
def pong(**options: Any) -> gym.Env:
    """Make the bare game; another process knows it by that, too."""
    import ale_py

    gym.register_envs(ale_py)
    return gym.make("ALE/Pong-v5", frameskip=1, **options)


def stacked_pong() -> gym.Env:
    """Make what SB3 and ours see, too: 4 stacked frames of 84 x 84, every fourth shown."""
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    return FrameStackObservation(AtariPreprocessing(pong()), 4)


def train_ppo(
    pair: ActorCritic, envs: Any, device: torch.device, graph: bool, *, frames: int, steps: int, epochs: int,
    batch_size: int, gamma: float = 0.99, lmbda: float = 0.95,
) -> float:  # fmt: skip
    """Train, acting and update in graphs; return seconds."""
    net = TwoHeads(pair).to(device)
    obs, _ = envs.reset(seed=0)
    obs = obs.astype(np.float32) if obs.dtype == np.float64 else obs
    act = Act(net, obs, device, graph)
    update = PPO(net, device, graph, batch_size, torch.Generator().manual_seed(0))
    n = len(obs)
    kept = {name: torch.empty(steps, *x.shape, dtype=x.dtype, device=device) for name, x in
            (("obs", act.obs), ("action", act.action), ("old", act.log_prob), ("value", act.value))}  # fmt: skip
    reward, over = np.zeros((steps, n), np.float32), np.zeros((steps, n), bool)
    began = time.perf_counter()
    for _ in range(frames // (steps * n)):
        for t in range(steps):
            action = act(obs)
            for name, x in (("obs", act.obs), ("action", act.action), ("old", act.log_prob), ("value", act.value)):
                kept[name][t].copy_(x)
            obs, reward[t], terminated, truncated, _ = envs.step(action)
            over[t] = terminated | truncated  # as CleanRL: what a limit cuts off is not valued
        with torch.no_grad():
            last = net(torch.as_tensor(obs, dtype=act.obs.dtype).to(device))[1].cpu().numpy()
        value = kept["value"].cpu().numpy()
        advantage, running = np.zeros_like(value), np.zeros(n, np.float32)
        for t in reversed(range(steps)):
            following = value[t + 1] if t + 1 < steps else last
            alive = ~over[t]
            running = reward[t] + gamma * following * alive - value[t] + gamma * lmbda * alive * running
            advantage[t] = running
        more = {
            "advantage": torch.from_numpy(advantage).to(device),
            "target": torch.from_numpy(advantage + value).to(device),
        }
        columns = {
            name: x.flatten(0, 1) for name, x in ({k: x for k, x in kept.items() if k != "value"} | more).items()
        }
        update(columns, epochs)
    wait(device)
    return time.perf_counter() - began


def train_sb3(recipe: str, frames: int, device: torch.device) -> float:
    """Train by SB3 with the recipe's numbers; return the seconds of `learn`."""
    import stable_baselines3 as sb3
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import SubprocVecEnv, VecFrameStack

    where: dict[str, Any] = {"device": str(device), "seed": 0}
    if recipe == "ppo_pong":
        vec: Any = VecFrameStack(make_atari_env(pong, 8, seed=0, vec_env_cls=SubprocVecEnv), 4)
        model: Any = sb3.PPO("CnnPolicy", vec, n_steps=128, batch_size=256, n_epochs=4, **where)
    elif recipe == "ppo_exact":
        vec = make_vec_env("CartPole-v1", 8, seed=0)
        model = sb3.PPO("MlpPolicy", vec, n_steps=128, batch_size=256, n_epochs=10, **where)
    elif recipe == "sac_pendulum":
        vec = make_vec_env("Pendulum-v1", 1, seed=0)
        net = {"net_arch": [64, 64]}
        model = sb3.SAC("MlpPolicy", vec, learning_starts=100, batch_size=256, buffer_size=100_000,
                        policy_kwargs=net, **where)  # fmt: skip
    else:
        vec = make_vec_env("CartPole-v1", 8, seed=0)
        net = {"net_arch": [128, 128]}
        model = sb3.DQN("MlpPolicy", vec, learning_starts=1000, batch_size=128, train_freq=32, gradient_steps=128,
                        buffer_size=100_000, policy_kwargs=net, **where)  # fmt: skip
    try:
        began = time.perf_counter()
        model.learn(frames)
        wait(device)
        return time.perf_counter() - began
    finally:
        vec.close()


# ---- what is counted -------------------------------------------------------------------------------------------------
def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Operations(TorchDispatchMode):
    """Without a GPU: operations that are no views stand for launches, and reads of a number for waits."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.found["waits"] += name in ("_local_scalar_dense", "nonzero", "equal", "is_nonzero")
        self.found["launches"] += not func.is_view
        self.found["kernels"] = self.found["launches"]
        return func(*args, **(kwargs or {}))


WAITING = ((torch.cuda.Stream, "synchronize"), (torch.cuda.Event, "synchronize"), (torch.cuda, "synchronize"))


@contextmanager
def counted(device: torch.device) -> Iterator[Counter[str]]:
    """Count launches (of kernels, of graphs, of copies) and the host's waits within the block."""
    found: Counter[str] = Counter()
    if device.type != "cuda":
        with _Operations(found):
            yield found
        return
    from torch.profiler import ProfilerActivity, profile

    wait(device)
    before = [(holder, name, getattr(holder, name)) for holder, name in WAITING]

    def counting(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found["waits"] += 1
            return plain(*args, **kwargs)

        return call

    mode = torch.cuda.get_sync_debug_mode()
    with (
        warnings.catch_warnings(record=True) as said,
        profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as traced,
    ):
        warnings.simplefilter("always")
        for holder, name, plain in before:
            setattr(holder, name, counting(plain))
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            for holder, name, plain in before:
                setattr(holder, name, plain)
            wait(device)
    found["waits"] += sum("synchronizing CUDA operation" in str(w.message) for w in said)
    for event in traced.events():
        if event.name.startswith(("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")):
            found["launches"] += 1
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found["kernels"] += 1
            found["nanoseconds"] += round(1000 * event.time_range.elapsed_us())
