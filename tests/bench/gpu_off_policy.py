"""Hand-written SAC and DQN of `python -m tests.bench gpu`: rows on the device, the whole update one graph.

As in `gpu_sides.py` nothing is hidden. A row of the replay is one piece of float32: a step writes by one copy, and a
minibatch is one gather, which lies in the graph; indices and noise are drawn on the device before a replay.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, softplus

from rlcli.modules import ActorCritic
from tests.bench.gpu_sides import in_a_graph, wait


class Replay:
    """Rows `[size, width]` of a device: observation, next one, action, reward, whether the episode terminated."""

    def __init__(self, size: int, obs: int, action: int, device: torch.device) -> None:
        self.widths = [obs, obs, action, 1, 1]
        self.rows = torch.zeros(size, sum(self.widths), device=device)
        self.at = self.filled = 0

    def write(self, *columns: np.ndarray) -> None:
        n = len(columns[0])
        joined = np.concatenate([x.reshape(n, -1) for x in columns], 1, dtype=np.float32)
        self.at = 0 if self.at + n > len(self.rows) else self.at
        self.rows[self.at : self.at + n].copy_(torch.from_numpy(joined))
        self.at += n
        self.filled = max(self.filled, self.at)

    def read(self, index: Tensor) -> tuple[Tensor, ...]:
        obs, later, action, reward, terminated = self.rows[index].split(self.widths, -1)
        return obs, later, action, reward.squeeze(-1), terminated.squeeze(-1)


class Learner:
    """Call it with indices of rows; a subclass has `losses`, each with what it is a loss of, and pairs of targets."""

    noise: Tensor | None = None

    def __init__(
        self, nets: Iterable[nn.Module], trained: nn.Module, target: nn.Module, replay: Replay, graph: bool,
        batch_size: int, others: Iterable[Tensor] = (), *, lr: float = 1e-3, gamma: float = 0.99, tau: float = 0.005,
        generator: torch.Generator | None = None,
    ) -> None:  # fmt: skip
        self.replay, self.gamma, self.tau, self.generator = replay, gamma, tau, generator
        device = replay.rows.device
        self.parameters = [*(p for net in nets for p in net.parameters()), *others]
        self.sources, self.targets = list(trained.parameters()), list(target.requires_grad_(False).parameters())
        self.adam = torch.optim.Adam(
            self.parameters, lr=torch.tensor(lr, device=device) if graph else lr, fused=True,
            capturable=graph and device.type == "cuda",
        )  # fmt: skip
        self.index = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.step = in_a_graph(self._step, device, graph)

    def losses(self) -> list[tuple[Tensor, list[Tensor]]]:
        raise NotImplementedError

    def _step(self) -> None:
        for loss, of in self.losses():
            for p, gradient in zip(of, torch.autograd.grad(loss, of, retain_graph=True), strict=True):
                p.grad = gradient
        self.adam.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.targets, self.sources, self.tau)

    def __call__(self, index: Tensor) -> None:
        self.index.copy_(index)
        for noise in () if self.noise is None else self.noise:
            noise.normal_(generator=self.generator)
        self.step()

    def update(self) -> None:
        self(torch.randint(self.replay.filled, self.index.shape, device=self.index.device))


class SAC(Learner):
    """Critics, actor and temperature step at once, as ours; actions are of the box [-half, half]."""

    def __init__(
        self, pair: ActorCritic, replay: Replay, graph: bool, batch_size: int, half: float = 1.0, **options: Any
    ) -> None:
        self.actor = pair.actor.module[0].module[0].module
        self.critics = nn.ModuleList([critic.module for critic in pair.critic])  # type: ignore[attr-defined]
        self.delayed, self.half = copy.deepcopy(self.critics), half
        device, width = replay.rows.device, replay.widths[2]
        self.log_alpha = torch.zeros((), device=device, requires_grad=True)
        self.noise, self.entropy = torch.zeros(2, batch_size, width, device=device), -float(width)
        nets = (self.actor, self.critics)
        super().__init__(nets, self.critics, self.delayed, replay, graph, batch_size, [self.log_alpha], **options)

    def draw(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        loc, log_scale = self.actor(obs).chunk(2, -1)
        log_scale = log_scale.clamp(-20, 2)
        x = loc + log_scale.exp() * noise
        slope = 2 * (math.log(2) - x - softplus(-2 * x)) + math.log(self.half)
        log_prob = -0.5 * noise.square() - log_scale - 0.5 * math.log(2 * math.pi) - slope
        return self.half * x.tanh(), log_prob.sum(-1)

    def losses(self) -> list[tuple[Tensor, list[Tensor]]]:
        obs, later, action, reward, terminated = self.replay.read(self.index)
        assert self.noise is not None
        alpha = self.log_alpha.detach().exp()
        with torch.no_grad():
            drawn, log_prob = self.draw(later, self.noise[0])
            least = torch.min(*(net(later, drawn).squeeze(-1) for net in self.delayed))
            target = reward + self.gamma * (1 - terminated) * (least - alpha * log_prob)
        error = sum(mse_loss(net(obs, action).squeeze(-1), target) for net in self.critics)
        drawn, log_prob = self.draw(obs, self.noise[1])
        least = torch.min(*(net(obs, drawn).squeeze(-1) for net in self.critics))
        return [
            (error, list(self.critics.parameters())),  # type: ignore[list-item]
            ((alpha * log_prob - least).mean(), list(self.actor.parameters())),
            (-(self.log_alpha * (log_prob.detach() + self.entropy)).mean(), [self.log_alpha]),
        ]


class DQN(Learner):
    """Double DQN on squared errors."""

    def __init__(self, net: nn.Module, replay: Replay, graph: bool, batch_size: int, **options: Any) -> None:
        self.net, self.delayed = net, copy.deepcopy(net)
        super().__init__([net], net, self.delayed, replay, graph, batch_size, **options)

    def losses(self) -> list[tuple[Tensor, list[Tensor]]]:
        obs, later, action, reward, terminated = self.replay.read(self.index)
        with torch.no_grad():
            best = self.net(later).argmax(-1, keepdim=True)
            target = reward + self.gamma * (1 - terminated) * self.delayed(later).gather(-1, best).squeeze(-1)
        value = self.net(obs).gather(-1, action.long()).squeeze(-1)
        return [(mse_loss(value, target), self.parameters)]


class Act:
    """Observations go to a static tensor, actions come back, in between is a graph."""

    def __init__(self, learner: SAC | DQN, envs: int, graph: bool) -> None:
        self.learner, device = learner, learner.index.device
        self.obs = torch.zeros(envs, learner.replay.widths[0], device=device)
        self.noise = torch.zeros(envs, learner.replay.widths[2], device=device)
        with torch.no_grad():
            self.action = self._choose()
        self.step = in_a_graph(self._step, device, graph)

    def _choose(self) -> Tensor:
        if isinstance(self.learner, SAC):
            return self.learner.draw(self.obs, self.noise)[0]
        return self.learner.net(self.obs).argmax(-1)

    @torch.no_grad()
    def _step(self) -> None:
        self.action.copy_(self._choose())

    @torch.no_grad()
    def __call__(self, obs: np.ndarray) -> np.ndarray:
        self.obs.copy_(torch.from_numpy(obs))
        if isinstance(self.learner, SAC):
            self.noise.normal_()
        self.step()
        return self.action.cpu().numpy()


def train_off_policy(
    learner: SAC | DQN, envs: Any, graph: bool, *, frames: int, random_frames: int, every: int, updates: int
) -> float:
    """Train: `updates` after every so many frames, once there were `random_frames`; return seconds."""
    obs, _ = envs.reset(seed=0)
    n, rng = len(obs), np.random.default_rng(0)
    envs.action_space.seed(0)
    act = Act(learner, n, graph)
    began = time.perf_counter()
    for frame in range(0, frames, n):
        tries = envs.action_space.sample()
        if frame < random_frames:
            action = tries
        elif isinstance(learner, SAC):
            action = act(obs)
        else:  # epsilon falls to 0.04 over 20,000 frames
            epsilon = max(0.04, 1 - 0.96 * frame / 20_000)
            action = np.where(rng.random(n) < epsilon, tries, act(obs))
        shown, reward, terminated, truncated, info = envs.step(action)
        later = shown
        if (terminated | truncated).any():
            later = shown.copy()
            for env in np.flatnonzero(terminated | truncated):
                later[env] = info["final_obs"][env]
        learner.replay.write(obs, later, action, reward, terminated)
        obs = shown
        if frame >= random_frames and (frame + n) % every == 0:
            for _ in range(updates):
                learner.update()
    wait(learner.index.device)
    return time.perf_counter() - began
