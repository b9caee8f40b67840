"""Observations and rewards scaled by running statistics, as PPO wants them on MuJoCo.

Every raw observation is counted once: reset states, successors, and the true last observation of an episode.
In a collector the scale is frozen while a batch is collected and refreshed at its end, so that a batch is one
function of its observations, whatever is stepped beside it; outside, in a rollout too, it is refreshed at every step.

Rewards are divided by the running deviation of the discounted return (as in OpenAI baselines' VecNormalize).  The mean
is not subtracted: that would change which policy is best.  Rewards keep their sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDictBase

from rlcli.keys import DONE, OBSERVATION, REWARD, Key, spell
from rlcli.specs import Bounded
from rlcli.transforms.base import RowOp, Transform, reset_mask
from rlcli.transforms.counters import Carry
from rlcli.transforms.maps import real


class RunningMoments:
    """Running mean and variance over the first dim, in float64, merged as Chan, Golub, LeVeque (1979) do."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = np.zeros(())
        self.deviation = np.zeros(())  # sum of squared deviations from the mean

    def add(self, rows: np.ndarray, offset: np.ndarray | float = 0.0) -> None:
        """Count `rows + offset`, `[n, *shape]`."""
        m = len(rows)
        if m == 0:
            return
        rows = rows.astype(np.float64)
        mean = rows.mean(0)
        deviation = np.square(rows - mean).sum(0)
        mean = mean + offset
        n, total, shift = self.count, self.count + m, mean - self.mean
        self.mean = self.mean + shift * (m / total)
        self.deviation = self.deviation + deviation + np.square(shift) * (n * m / total)
        self.count = total

    def scale(self, epsilon: float) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and 1 / sqrt(variance + epsilon), float32 `[*shape]`; 0 and 1 before the first rows."""
        if self.count == 0:
            return np.zeros((), np.float32), np.ones((), np.float32)
        inverse = 1.0 / np.sqrt(self.deviation / self.count + epsilon)
        return np.asarray(self.mean, np.float32), np.asarray(inverse, np.float32)

    def state(self) -> dict[str, torch.Tensor]:
        parts = {"count": self.count, "mean": self.mean, "deviation": self.deviation}
        return {name: torch.tensor(value) for name, value in parts.items()}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Continue from a checkpoint."""
        self.count = int(state["count"])
        self.mean = state["mean"].cpu().numpy().copy()
        self.deviation = state["deviation"].cpu().numpy().copy()


class _Learning(Transform):
    """Learn from what passes through until frozen; the parts are saved by name."""

    frozen = False

    def freeze(self, frozen: bool = True) -> Self:
        """Stop counting and refreshing (for evaluation), or go on; return itself."""
        self.frozen = frozen
        return self

    def _parts(self) -> dict[str, Any]:
        """Return the learned parts: each has `state()` and `load(state)`."""
        raise NotImplementedError

    def get_extra_state(self):
        return {f"{name}/{field}": x for name, part in self._parts().items() for field, x in part.state().items()}

    def set_extra_state(self, state):
        for name, part in self._parts().items():
            prefix = f"{name}/"
            part.load({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})


def _restarting(tensordict: TensorDictBase | None, reset_tensordict: TensorDictBase) -> np.ndarray:
    mask = reset_mask(tensordict, reset_tensordict)
    return np.ones(reset_tensordict.batch_size.numel(), bool) if mask is None else mask.reshape(-1).cpu().numpy()


class RunningNorm(_Learning):
    """`clip((x - mean) / sqrt(var + epsilon))`, float32, elementwise over all envs.

    Parameters
    ----------
    in_keys, out_keys : sequence of keys
        `("observation",)` by default.
    clip : float, default 10
        Largest absolute value.
    epsilon : float, default 1e-8
    refresh_each_step : bool, default True
        Whether, outside a collector, the scale is refreshed at every step; otherwise only by `refresh()`.
    """

    remembers = False

    def __init__(
        self,
        in_keys: Sequence[Key] = (OBSERVATION,),
        out_keys: Sequence[Key] | None = None,
        *,
        clip: float = 10.0,
        epsilon: float = 1e-8,
        refresh_each_step: bool = True,
    ) -> None:
        super().__init__(in_keys, out_keys)
        self.clip, self.epsilon, self.refresh_each_step = float(clip), epsilon, refresh_each_step
        self.tallies = [_Tally() for _ in self.in_keys]
        self.refresh()

    def adopt(self, state):
        self.load_state_dict(state)
        self.freeze()

    def refresh(self) -> None:
        """Scale by everything counted so far from now on."""
        for tally in self.tallies:
            tally.refresh(self.epsilon)

    # -- TensorDict face -----------------------------------------------------------------------------------
    def forward(self, tensordict):
        """Scale collected data `[*B]` without counting it."""
        for tally, source, target in zip(self.tallies, self.in_keys, self.out_keys, strict=True):
            value = self._need(tensordict, source)
            mean, inverse = (torch.from_numpy(part).to(value.device) for part in (tally.mean, tally.inverse))
            scaled = (value.to(torch.float32) - mean) * inverse
            tensordict.set(target, scaled.clamp(-self.clip, self.clip))
        return tensordict

    def _step(self, tensordict, next_tensordict):
        self._count(next_tensordict)
        return self.forward(next_tensordict)

    def _reset(self, tensordict, reset_tensordict):
        self._count(reset_tensordict, _restarting(tensordict, reset_tensordict))
        return self.forward(reset_tensordict)

    def _count(self, tensordict, restarting=None):
        if self.frozen:
            return
        for tally, key in zip(self.tallies, self.in_keys, strict=True):
            value = self._need(tensordict, key).detach().to("cpu", torch.float32)
            rows = value.reshape(-1, *value.shape[tensordict.ndim :]).numpy() - tally.mean  # [N, *shape]
            if restarting is None:
                tally.successors(rows.shape)[...] = rows
            else:
                tally.restarts += list(rows[restarting])
        if self.refresh_each_step:
            self.refresh()

    def transform_observation_spec(self, spec):
        def scaled(old):
            return Bounded(-self.clip, self.clip, old.shape, torch.float32, old.device)

        return self._mapped(spec, scaled)

    # -- column face ---------------------------------------------------------------------------------------
    def bind(self, rows, n):
        return _NormRows(self, self._row_pairs(rows))

    def _parts(self):
        return {spell(key): tally for key, tally in zip(self.in_keys, self.tallies, strict=True)}


class _Tally:
    """The scale of one key, and rows `x - mean` that wait to be folded into its moments, some hundred at once."""

    STEPS = 64

    def __init__(self) -> None:
        self.moments = RunningMoments()
        self.mean = self.inverse = np.zeros(())
        self.waiting: list[np.ndarray] = []  # views of one block, [N, *shape] each
        self.filled = 0
        self.restarts: list[np.ndarray] = []

    def successors(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return where to write the next rows `x - mean`, float32 `[N, *shape]`."""
        if self.filled == len(self.waiting) or self.waiting[0].shape != shape:
            self.fold()
            if not self.waiting or self.waiting[0].shape != shape:
                self.waiting = list(np.empty((self.STEPS, *shape), np.float32))
        rows = self.waiting[self.filled]
        self.filled += 1
        return rows

    def fold(self) -> None:
        """Count the waiting rows."""
        if self.filled:
            self.moments.add(np.concatenate(self.waiting[: self.filled]), self.mean)
        if self.restarts:
            self.moments.add(np.stack(self.restarts), self.mean)
        self.filled, self.restarts = 0, []

    def refresh(self, epsilon: float) -> None:
        self.fold()
        self.mean, self.inverse = self.moments.scale(epsilon)

    def state(self) -> dict[str, torch.Tensor]:
        self.fold()
        scale = {"scale_mean": self.mean, "scale_inverse": self.inverse}
        return {**self.moments.state(), **{name: torch.tensor(value) for name, value in scale.items()}}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        self.filled, self.restarts = 0, []
        self.moments.load(state)
        self.mean, self.inverse = (state[name].cpu().numpy().copy() for name in ("scale_mean", "scale_inverse"))


class _NormRows(RowOp):
    """Scale rows by constants of their full shape: broadcasting a vector costs three times the subtraction."""

    def __init__(self, transform: RunningNorm, pairs):
        self.transform, self.pairs = transform, pairs

    def begin(self):
        transform = self.transform
        self.stepped = False
        self.parts = []
        for (source, target), tally in zip(self.pairs, transform.tallies, strict=True):
            shape, clip = target[0].shape, np.float32(transform.clip)
            full = [np.array(np.broadcast_to(c, shape)) for c in (tally.mean, tally.inverse, -clip, clip)]
            self.parts.append((source, target, tally, np.empty(shape, np.float32), *full))

    def step(self, t):
        frozen, self.stepped = self.transform.frozen, True
        for source, target, tally, out, mean, inverse, low, high in self.parts:
            centred = out if frozen else tally.successors(out.shape)
            raw = source[t]
            if raw.dtype != out.dtype:
                raw = raw.astype(np.float32)  # cast first: the arithmetic is float32, as on tensors
            np.subtract(raw, mean, centred)
            np.multiply(centred, inverse, out)
            np.maximum(out, low, out=out)
            np.minimum(out, high, out=target[t])

    def reset(self, t, lanes):
        for source, target, tally, _, mean, inverse, low, high in self.parts:
            raw, out = source[t], target[t]
            for lane in lanes:
                centred = raw[lane].astype(np.float32) - mean[lane]
                if not self.transform.frozen:
                    tally.restarts.append(centred)
                scaled = np.maximum(centred * inverse[lane], low[lane])
                np.minimum(scaled, high[lane], out=out[lane, ...])

    def end(self):
        # Resets alone do not change the scale: a handful of first states says little about the rest.
        if self.stepped and not self.transform.frozen:
            self.transform.refresh()


class RewardNorm(_Learning):
    """`clip(reward / sqrt(var(R) + epsilon))`, with the return R = gamma R + reward, 0 at episode starts.

    In a collector the whole batch is counted first and then scaled, once; step by step elsewhere, and where what comes
    after it reads the rewards of single steps (a warning says so).

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
        self.moments = RunningMoments()
        self.returns = Carry(np.float64)

    def transform_reward_spec(self, spec):
        return Bounded(-self.clip, self.clip, spec.shape, real(spec).dtype, spec.device)

    def adopt(self, state):
        self.load_state_dict(state)
        self.returns = Carry(np.float64)  # of the other envs
        self.freeze()

    def _step(self, tensordict, next_tensordict):
        reward = self._need(next_tensordict, "reward")
        if not self.frozen:
            now = reward.detach().cpu().double().numpy().reshape(-1)
            returns = self.returns.take(np.zeros(now.shape, bool), 0) * self.gamma + now
            self.returns.keep(returns)
            self.moments.add(returns)
        _, inverse = self.moments.scale(self.epsilon)
        scaled = (reward * float(inverse)).clamp(-self.clip, self.clip)
        return next_tensordict.set("reward", scaled)

    def _reset(self, tensordict, reset_tensordict):
        self.returns.keep(self.returns.take(_restarting(tensordict, reset_tensordict), 0))
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
        """Return discounted returns `[T, N]`, float64, and carry the last of them on."""
        carried = self.returns.take(fresh, 0)
        returns = np.ascontiguousarray(reward.T, np.float64)
        decay = np.full(returns.shape, self.gamma)
        decay[1:] *= ~done.T[:-1]
        for now, keep in zip(returns, decay, strict=True):
            now += carried * keep
            carried = now
        self.returns.keep(np.where(done[:, -1], 0, carried))
        return returns

    def _parts(self):
        return {"moments": self.moments, "returns": self.returns}
