"""Rewards divided by the running deviation of the discounted return (as in OpenAI baselines' VecNormalize).

The mean is not subtracted: that would change which policy is best. Rewards keep their sign.
"""

from __future__ import annotations

import numpy as np

from rlcli.keys import DONE, REWARD
from rlcli.transforms.base import Transform, reset_mask
from rlcli.transforms.carry import Carry
from rlcli.transforms.running_moments import RunningMoments


class RewardNorm(Transform):
    """`clip(reward / sqrt(var(R) + epsilon))`, with the return R = gamma R + reward, 0 at episode starts.

    In a collector the whole batch is counted first and then scaled, once; step by step elsewhere.

    Parameters
    ----------
    gamma : float, default 0.99
    clip : float, default 10
        Largest absolute value.
    epsilon : float, default 1e-8
    """

    has_batch_pass = True
    batch_only = True

    def __init__(self, gamma: float = 0.99, *, clip: float = 10.0, epsilon: float = 1e-8) -> None:
        super().__init__(in_keys=["reward"])
        self.gamma, self.clip, self.epsilon = float(gamma), float(clip), float(epsilon)
        self.frozen = False
        self.moments = RunningMoments()
        self.returns = Carry(np.float64)

    def freeze(self, frozen: bool = True) -> RewardNorm:
        """Stop counting (for evaluation), or go on; returns itself."""
        self.frozen = frozen
        return self

    def adopt(self, state):
        self.load_state_dict(state)
        self.returns = Carry(np.float64)  # of the other envs
        self.freeze()

    def _step(self, tensordict, next_tensordict):
        reward = self._need(next_tensordict, "reward")
        if not self.frozen:
            now = reward.detach().cpu().numpy().reshape(-1)
            held = self.returns.take(np.zeros(now.shape, bool), 0) * self.gamma + now
            self.returns.keep(held)
            self.moments.add(held)
        _, inverse = self.moments.scale(self.epsilon)
        scaled = (reward * float(inverse)).clamp(-self.clip, self.clip)
        return next_tensordict.set("reward", scaled)

    def _reset(self, tensordict, reset_tensordict):
        mask = reset_mask(tensordict, reset_tensordict)
        n = reset_tensordict.batch_size.numel()
        lanes = np.ones(n, bool) if mask is None else mask.reshape(-1).cpu().numpy()
        self.returns.keep(self.returns.take(lanes, 0))
        return reset_tensordict

    def reads(self, schema):
        return [REWARD, DONE]

    def batch_pass(self, cols, fresh):
        reward = cols[REWARD][..., 0]  # [N, T]
        if not self.frozen:
            self.moments.add(self._returns(reward, cols[DONE][..., 0], fresh).reshape(-1))
        _, inverse = self.moments.scale(self.epsilon)
        np.multiply(reward, inverse, out=reward)
        np.maximum(reward, np.float32(-self.clip), out=reward)
        np.minimum(reward, np.float32(self.clip), out=reward)

    def _returns(self, reward: np.ndarray, done: np.ndarray, fresh: np.ndarray) -> np.ndarray:
        """Discounted returns `[T, N]`, float64, and the last of them carried on."""
        held = self.returns.take(fresh, 0)
        returns = np.ascontiguousarray(reward.T, np.float64)
        decay = np.full(returns.shape, self.gamma)
        decay[1:] *= ~done.T[:-1]
        for now, keep in zip(returns, decay, strict=True):
            now += held * keep
            held = now
        self.returns.keep(np.where(done[:, -1], 0, held))
        return returns

    def get_extra_state(self):
        named = {"moments": self.moments.state(), "returns": self.returns.state()}
        return {f"{part}/{name}": value for part, state in named.items() for name, value in state.items()}

    def set_extra_state(self, state):
        for part in (self.moments, self.returns):
            prefix = "moments/" if part is self.moments else "returns/"
            part.load({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})
