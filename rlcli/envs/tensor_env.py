"""Envs whose observations are tensors on one device: what a user writes, and its face as a `VectorBackend`.

The face is for whoever wants arrays: one copy a step each way.  A collector whose policy lies on the same device steps
the tensors themselves (`collectors.actors.segment`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from rlcli.arguments import count
from rlcli.errors import EnvError
from rlcli.specs.dtypes import torch_dtype
from rlcli.vec_envs.actions import ActionFormat
from rlcli.vec_envs.episodes import mixed
from rlcli.vec_envs.observations import BadValue, described, leaves
from rlcli.vec_envs.vector_backend import VectorBackend, take


class TensorEnv:
    """Base of N envs that are stepped together, by torch, on one device; registered as a `vector_entry_point`.

    A subclass sets `single_observation_space` and `single_action_space`, and writes `reset` and `step`.  Neither has to
    read anything on the host.

    Parameters
    ----------
    num_envs : int
    device : torch device
        Where all tensors lie that it is given and that it returns.
    max_episode_steps : int, optional
        Truncate episodes after so many steps: whoever steps the env does, `step` need not.
    """

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.DISABLED}
    spec: Any = None
    single_observation_space: gym.Space
    single_action_space: gym.Space

    def __init__(self, num_envs: int, device: str | torch.device = "cpu", max_episode_steps: int | None = None) -> None:
        limit = max_episode_steps
        self.num_envs = count("num_envs", num_envs)
        self.max_episode_steps = None if limit is None else count("max_episode_steps", limit)
        self.device = torch.empty(0, device=device).device  # with its index

    @property
    def unwrapped(self) -> TensorEnv:
        return self

    def reset(self, mask: Tensor, seeds: Tensor) -> Any:
        """Begin an episode in each env of the `mask`, bool `[N]`, from its seed among `seeds`, int64 `[N]`.

        Returns
        -------
        Tensor ``[N, *shape]``, or dict of them
            What all envs show; it is read of those that were reset.
        """
        raise NotImplementedError

    def step(self, actions: Tensor) -> tuple[Any, Tensor, Tensor, Tensor]:
        """Return observation, reward `[N]`, terminated and truncated, bool `[N]`, and reset none.

        Actions are `[N]` or `[N, *shape]`, of the space's dtype, within its bounds.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release the envs."""

    def engine(self) -> TensorEngine:
        """Return the face by which it is stepped."""
        return TensorEngine(self)

    @staticmethod
    def uniform(seeds: Tensor, size: int) -> Tensor:
        """Return float32 `[N, size]` in [0, 1), a function of the seeds, int64 `[N]`, made where they lie."""
        places = torch.arange(1, size + 1, device=seeds.device) * 0x1E3779B1
        return (mixed(mixed(seeds)[:, None] ^ mixed(places)) >> 7).float() / 2**24


class TensorEngine(VectorBackend):
    """Step a `TensorEnv`: arrays by `step` and `reset`, tensors by `advance` and `begin`."""

    seeds_episodes = seeds_every = True

    def __init__(self, env: TensorEnv) -> None:
        needs = "num_envs", "device", "single_observation_space", "single_action_space"
        if absent := [name for name in needs if not hasattr(env, name)]:
            raise EnvError(
                f"{type(env).__name__} has no {' and no '.join(absent)}",
                fix="Call super().__init__(num_envs, device) and set both spaces in __init__.",
            )
        self.env, self.n, self.device = env, env.num_envs, env.device
        self.name = type(env).__name__ if env.spec is None else env.spec.id
        self.observation_space, self.action_space = env.single_observation_space, env.single_action_space
        self.limit = env.max_episode_steps
        self.leaves = list(leaves(self.observation_space, narrow=False))
        self._unseeded = np.random.default_rng()

    # ---- tensors -------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def advance(self, actions: Tensor) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        """Step all envs; the leaves of what they show, reward, terminated, truncated: checked, and not read."""
        given = self.env.step(actions)
        if not isinstance(given, tuple) or len(given) != 4:
            count = f" of {len(given)}" if isinstance(given, tuple) else ""
            raise BadValue("(observation, reward, terminated, truncated)", _described(given) + count)
        observation, reward, terminated, truncated = given
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            self._check(flag, (self.n,), torch.bool, f" as {name}")
        odd = torch.bool, torch.bfloat16, torch.complex64, torch.complex128
        known = isinstance(reward, Tensor) and reward.dtype not in odd
        self._check(reward, (self.n,), reward.dtype if known else torch.float32, " as reward")
        return self.parts(observation), reward.detach(), terminated, truncated

    @torch.no_grad()
    def begin(self, mask: Tensor, seeds: Tensor) -> list[Tensor]:
        """Begin episodes in the envs of a mask; the leaves of what all show."""
        return self.parts(self.env.reset(mask, seeds))

    def parts(self, observation: Any) -> list[Tensor]:
        """Return the leaves of an observation of all envs."""
        found = [leaf.find(observation) for leaf in self.leaves]
        for leaf, part in zip(self.leaves, found, strict=True):
            where = f" as {'.'.join(leaf.path)}" if leaf.path else ""
            self._check(part, (self.n, *leaf.shape), torch_dtype(leaf.dtype), where)
        return [part.detach() for part in found]

    def _check(self, value: Any, shape: tuple[int, ...], dtype: torch.dtype | None, where: str) -> None:
        if not isinstance(value, Tensor):
            raise BadValue(
                f"a torch tensor{where}", _described(value), "Return tensors: torch.from_numpy(array) is one."
            )
        if value.shape != shape or value.dtype != dtype or value.device != self.device:
            raise BadValue(
                f"{shape} {dtype} on {self.device}{where}", _described(value),
                None if value.device == self.device else "Make its tensors with device=self.device.",
            )  # fmt: skip

    def tree(self, parts: Sequence[Tensor]) -> Any:
        """Return these leaves as arrays, in the form of an observation."""
        root: dict[str, Any] = {}
        for leaf, part in zip(self.leaves, parts, strict=True):
            array = part.cpu().numpy()
            if not leaf.path:
                return array
            node = root
            for name in leaf.path[:-1]:
                node = node.setdefault(name, {})
            node[leaf.path[-1]] = array
        return root

    def sender(self, actions: ActionFormat) -> Callable[[Tensor], Tensor]:
        """Return the function from the loop's actions to what the env gets, as `ActionFormat.array_sender` does."""
        dtype = torch_dtype(actions.dtype)
        if actions.kind == "box":
            low, high = (torch.as_tensor(bound, device=self.device) for bound in (actions.low, actions.high))
            return lambda taken: taken.to(dtype).clamp(low, high)
        start = torch.as_tensor(actions.start, device=self.device)
        return lambda taken: taken.to(dtype) + start.to(dtype)

    # ---- arrays --------------------------------------------------------------------------------------------------
    def step(self, actions):
        parts, *given = self.advance(torch.tensor(actions, device=self.device))  # a copy: an env may write into it
        return self.tree(parts), *(value.cpu().numpy() for value in given)

    def reset(self, lanes, seeds):
        mask, given = torch.zeros(self.n, dtype=torch.bool), torch.zeros(self.n, dtype=torch.int64)
        mask[list(lanes)] = True
        drawn = [int(self._unseeded.integers(2**31)) if seed is None else seed for seed in seeds]
        given[list(lanes)] = torch.tensor(drawn)
        return take(self.tree(self.begin(mask.to(self.device), given.to(self.device))), lanes)

    def close(self) -> None:
        self.env.close()


def _described(value: Any) -> str:
    return f"{tuple(value.shape)} {value.dtype} on {value.device}" if isinstance(value, Tensor) else described(value)
