"""A trained policy for the user's own code: from what an env shows to the action that it is to be sent.

What training put between env and network is done here too, in the same arithmetic: doubles are narrowed, Discrete
observations become one-hot, and the run's transforms (normalisation with its saved statistics, frame stacks, casts) are
applied. What gymnasium wrappers do is the env's: `make_env` makes one that has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import set_interaction_type
from torch import Tensor

from rlcli.envs import EnvBase, TransformedEnv
from rlcli.envs.mdp import merged, on_tensordicts
from rlcli.envs.transformed import with_policy_transforms
from rlcli.errors import ArgumentError, ConfigError, MissingKeyError, NumericsError, RlcliError, in_words
from rlcli.keys import ACTION, IS_INIT, OBSERVATION, RESET, REWARD, Key, show
from rlcli.modules import ActorCritic
from rlcli.modules.exploration import EXPLORATION
from rlcli.modules.masks import mask_key_of, refuse_no_option
from rlcli.specs.dtypes import dtype_name
from rlcli.specs.field import Field
from rlcli.transforms import Compose, Transform
from rlcli.transforms.base import planned
from rlcli.vec_envs.observations import BadValue, ObservationLeaf, as_array


class TrainedPolicy:
    """A policy as it was trained, to be called on what its env shows.

    `rlcli.load(RUN)` and `rlcli.train(...).policy()` make one.

    Parameters
    ----------
    config : Config
        Of the run; only for its owner to read.
    networks : ActorCritic
        With the trained weights.
    env : EnvBase
        Of batch size `(1,)`, with the run's transforms and their saved statistics; it is only looked at.
    make : callable
        Arguments for `gymnasium.make` -> an env as the run made it.
    title : str
        Env and loss, as `repr` names them.
    frames : int
        Frames of training behind the weights.

    Attributes
    ----------
    actor, critic : nn.Module
        The networks themselves, in eval mode, on tensordicts that the run's transforms have gone over.
    transforms : list of Transform
        Those that decide what the actor reads, innermost first.
    remembers : bool
        Whether an action depends on earlier observations (a frame stack, a recurrent state): then `reset()` has to be
        called where an episode begins, and observations have to come one after the other.
    exploration : {"deterministic", "mode", "mean", "random"}
        How actions are taken from the policy's distribution; `rlcli eval` takes "deterministic".

    Examples
    --------
    >>> import rlcli
    >>> run = rlcli.train(recipe="ppo_exact", total_frames=1024, console="off", run={"eval_episodes": 0})
    >>> policy = rlcli.load(run.path)
    >>> env = policy.make_env()
    >>> observation, info = env.reset(seed=0)
    >>> policy.reset()
    >>> for step in range(10):
    ...     observation, reward, terminated, truncated, info = env.step(policy(observation))
    """

    def __init__(
        self,
        config: Any,
        networks: ActorCritic,
        env: EnvBase,
        *,
        make: Callable[..., gym.Env],
        title: str = "",
        frames: int = 0,
    ) -> None:
        env = with_policy_transforms(env, networks.actor)
        base, transforms = (env.base_env, env.transforms) if isinstance(env, TransformedEnv) else (env, [])
        vec_env = base.vec_env  # type: ignore[attr-defined]
        self.config, self.frames, self.title, self._make = config, frames, title, make
        self.actor, self.critic = networks
        self.exploration = "deterministic"
        self._mask = mask_key_of(self.actor)
        self.device = torch.device("cpu")
        self._leaves: list[ObservationLeaf] = vec_env.leaves
        self._actions = vec_env.actions
        self._send: Callable = vec_env.actions.sender()
        offered = [key for key in env.observation_spec.keys(True, True)]
        self._act = on_tensordicts(self.actor, offered)
        read = getattr(self._act, "in_keys", None)
        self.transforms = _needed(transforms, vec_env.schema, offered if read is None else read)
        self._observed = Compose(*self.transforms)
        self._outwards = Compose(*[t for t in transforms if type(t).inv is not Transform.inv])
        self.remembers = any(transform.remembers for transform in self.transforms)
        self._last: TensorDictBase | None = None  # the root of the last step, with what the policy wrote
        self._begins: Tensor | None = None  # lanes that begin an episode with the next observation

    def reset(self, begins: Sequence[bool] | np.ndarray | Tensor | None = None) -> None:
        """The next observation begins an episode: forget what came before.

        Parameters
        ----------
        begins : bool `[N]`, optional
            Of N envs that are stepped together, those that begin anew; all of them by default.
        """
        if begins is None or self._last is None:
            self._last = self._begins = None
            return
        flags = torch.as_tensor(np.asarray(begins, np.bool_)).reshape(-1, 1)
        if len(flags) != len(self._last):
            raise ArgumentError("reset takes one flag per env", why=f"expected {len(self._last)}, got {len(flags)}")
        self._begins = flags if self._begins is None else self._begins | flags

    def __call__(self, observation: Any, *, exploration: str | None = None) -> Any:
        """The action for an observation.

        Parameters
        ----------
        observation : array, tensor, int, dict of them, or TensorDict
            As the env gives it: one observation, or several with leading dims. A TensorDict holds it under the env's
            keys (Discrete observations one-hot) and gains `action`; where the policy remembers, `is_init` says there
            where episodes begin.
        exploration : {"deterministic", "mode", "mean", "random"}, optional
            Instead of `self.exploration`. Random ones are drawn from torch's global generator.

        Returns
        -------
        action : int, array or tensor
            What the env's `step` takes, clipped to its bounds: with the leading dims of the observation, a tensor
            where one was given. Or the TensorDict, its `action` as the run stores it: an index from 0, not clipped.

        Raises
        ------
        ArgumentError
            An observation that is not one of the env's.
            Or its action mask allows no action.
        NumericsError
            The action is not finite.
        """
        if isinstance(observation, TensorDictBase):
            return self._on_tensordict(observation, exploration)
        rows, leading = _read(self._leaves, observation)
        if self.remembers and len(leading) > 1:
            raise ArgumentError(
                "this policy is recurrent, so it takes one step at a time",
                why=f"the observation has leading dims {leading}",
                fix="Give one observation, or those of N envs that are stepped together.",
            )
        action = self._chosen(rows, exploration)
        sent = self._send(self._actions.decode(action.numpy()))
        array = np.asarray(sent, self._actions.dtype).reshape((*leading, *self._actions.shape))
        device = _device_of(observation)
        if device is not None:
            return torch.from_numpy(array).to(device)
        return int(array) if array.ndim == 0 and self._actions.kind == "discrete" else array

    def make_env(self, **kwargs: Any) -> gym.Env:
        """A gymnasium env as the run made it, wrappers and all.

        Parameters
        ----------
        **kwargs
            More arguments for `gymnasium.make`: `render_mode="human"`.

        Raises
        ------
        ConfigError
            The run used an engine that no gymnasium env shows the same as.
        """
        return self._make(**kwargs)

    def to(self, device: torch.device | str) -> TrainedPolicy:
        """Move the networks; observations follow. Returns itself."""
        self.device = torch.device(device)
        self.actor.to(self.device)
        if self.critic is not None:
            self.critic.to(self.device)
        self.reset()
        return self

    def __repr__(self) -> str:
        memory = ", recurrent" if self.remembers else ""
        return f"TrainedPolicy({self.title}, {self.frames:,} frames{memory})"

    # ---- from rows to actions ------------------------------------------------------------------------------------
    def _chosen(self, rows: Mapping[Key, Tensor], exploration: str | None) -> Tensor:
        """Return the stored form `[N, *]` of the actions for rows `[N, *shape]`, on the CPU."""
        name = self.exploration if exploration is None else exploration
        if name not in EXPLORATION:
            raise ArgumentError(f"unknown exploration {name!r}", fix=f"Choose one of {', '.join(EXPLORATION)}.")
        n = len(next(iter(rows.values())))
        shown = TensorDict({}, [n])
        for key, value in rows.items():
            shown.set(key, value)
        root = self._root(shown).to(self.device)
        if self._mask is not None and self._mask in root.keys(True):
            mask = root.get(self._mask).reshape(n, -1).cpu().numpy()
            refuse_no_option(mask, self._actions.sizes, self._mask, "as the policy was shown it")
        with torch.no_grad(), set_interaction_type(EXPLORATION[name]):
            out = self._act(root)
        if self.remembers:
            self._last, self._begins = out.to("cpu"), None
        action = out.get(ACTION, None)
        if action is None:
            raise MissingKeyError("the policy wrote no action", where=type(self.actor).__name__)
        if len(self._outwards):
            sent = _through(reversed([*self._outwards]), lambda t, td: t.inv(td), TensorDict({ACTION: action}, [n]))
            action = sent.get(ACTION)
        if action.is_floating_point() and not bool(torch.isfinite(action).all()):
            raise NumericsError(
                "the policy's action is not finite", why="a weight or an observation is NaN or infinite"
            )
        return action.cpu()

    def _root(self, shown: TensorDictBase) -> TensorDictBase:
        """Return what the actor reads where the envs show `shown` `[N]`."""
        last, begins = self._last, self._begins
        if last is None:
            return _through(self._observed, lambda t, td: t._reset(None, td), shown)
        if len(last) != len(shown):
            raise ArgumentError(
                f"this policy holds the state of {len(last)} envs, and was given observations of {len(shown)}",
                fix="Call reset() before another episode, or another number of envs.",
            )
        successor = _through(self._observed, lambda t, td: t._step(last, td), shown.clone())
        if begins is None or not bool(begins.any()):
            return successor
        root, fresh = (td.set(RESET, begins) for td in (last.clone(False), shown.clone()))
        fresh = _through(self._observed, lambda t, td: t._reset(root, td), fresh)
        return merged(successor, fresh.exclude(RESET), begins)

    def _on_tensordict(self, td: TensorDictBase, exploration: str | None) -> TensorDictBase:
        n, dims = td.batch_size.numel(), td.batch_dims
        rows: dict[Key, Tensor] = {}
        for leaf in self._leaves:
            value = td.get(leaf.key, None)
            if value is None:
                keys = ", ".join(sorted(show(key) for key in td.keys(True, True)))
                raise MissingKeyError(f"the tensordict has no {show(leaf.key)}", why=f"it holds {keys or 'nothing'}")
            shape = (leaf.choices,) if leaf.choices else leaf.shape
            if tuple(value.shape[dims:]) != shape:
                raise _misfit(leaf, f"{(*td.batch_size, *shape)}", f"{tuple(value.shape)}")
            stored = torch.from_numpy(np.empty(0, leaf.stored)).dtype
            if not (torch.can_cast(value.dtype, stored) or leaf.choices):  # any numbers do for a one-hot vector
                raise _misfit(leaf, f"dtype {leaf.stored}", f"dtype {dtype_name(value.dtype)}")
            rows[leaf.key] = value.detach().to("cpu", stored).reshape(n, *shape)
        if self.remembers:
            flags = td.get(IS_INIT, None)
            if flags is None:
                raise MissingKeyError(
                    "this policy is recurrent, and the tensordict does not say where episodes begin",
                    why="it has no is_init",
                    fix="Put an InitTracker into the env: TransformedEnv(env, InitTracker()).",
                )
            if bool(flags.all()):
                self.reset()
            else:
                self.reset(flags.reshape(n).cpu())
        action = self._chosen(rows, exploration)
        return td.set(ACTION, action.reshape((*td.batch_size, *action.shape[1:])).to(td.device or "cpu"))


def _needed(transforms: Sequence[Transform], schema: Mapping, read: Sequence[Key]) -> list[Transform]:
    """Return the transforms, in order, that the policy's input depends on; refuses any that needs rewards."""
    shown = {**schema, REWARD: Field((1,), np.dtype(np.float32))}
    schemas = list(accumulate(transforms, lambda now, transform: now | planned(transform, now), initial=shown))
    wanted, needed = set(read), []
    for transform, before in zip(reversed(transforms), schemas[-2::-1], strict=True):
        written = set(transform.writes(before))
        if written and not written & wanted:
            continue
        reads = set(transform.reads(before))
        if REWARD in reads:
            raise ConfigError(
                f"the policy reads {' and '.join(map(show, written & wanted))}, which follows from rewards",
                where=f"env.transforms: {type(transform).__name__}",
                fix="Use load(RUN).actor on tensordicts that hold it.",
            )
        wanted |= reads
        needed.append(transform)
    return needed[::-1]


def _through(
    transforms: Iterable[Transform], face: Callable[[Transform, TensorDictBase], TensorDictBase], shown: TensorDictBase
) -> TensorDictBase:
    """Pass `shown` through a method of every transform; one that needs more than a policy is shown is named."""
    for transform in transforms:
        keys = ", ".join(sorted(show(key) for key in shown.keys(True, True)))
        try:
            shown = face(transform, shown)
        except Exception as error:  # the user's code may raise anything where a reward or flag is not there
            if isinstance(error, RlcliError) and not isinstance(error, MissingKeyError):
                raise
            raise ConfigError(
                "a transform of the run fails on what a policy is given: observations without rewards and flags",
                where=f"env.transforms: {type(transform).__name__}",
                why=f"given {keys or 'nothing'}, it raised {in_words(error)}",
                fix="Use load(RUN).actor on tensordicts that hold what it writes; if the actor does not read that, say "
                "what the transform writes: its out_keys.",
            ) from error
    return shown


# ---- the border ------------------------------------------------------------------------------------------------------
def _read(leaves: Sequence[ObservationLeaf], observation: Any) -> tuple[dict[Key, Tensor], tuple[int, ...]]:
    """Return rows `[N, *shape]` in their stored form, and the leading dims that N stands for."""
    rows: dict[Key, Tensor] = {}
    leading: tuple[int, ...] | None = None
    for leaf in leaves:
        try:
            path = leaf.path or (OBSERVATION,) * isinstance(observation, Mapping)
            value = replace(leaf, path=path).find(observation)
            value = value.detach().cpu().numpy() if isinstance(value, Tensor) else as_array(value, "numbers")
            dims = max(0, value.ndim - len(leaf.shape))
            if value.shape[dims:] != leaf.shape or leading not in (None, value.shape[:dims]):
                wanted = "leading dims or none" if leading is None else f"leading dims {leading}, as the others have"
                raise BadValue(f"shape {leaf.shape} behind {wanted}", f"shape {value.shape}")
            leading = value.shape[:dims]
            flat = replace(leaf, path=()).read(value.reshape(-1, *leaf.shape), (math.prod(leading),), count=False)
        except BadValue as error:
            raise _misfit(leaf, error.expected, error.got) from None
        rows[leaf.key] = torch.from_numpy(np.array(flat, leaf.stored))  # a copy: what is shown may be written again
    assert leading is not None  # an env shows something
    return rows, leading


def _misfit(leaf: ObservationLeaf, expected: str, got: str) -> ArgumentError:
    return ArgumentError(
        "this is not an observation of the env", where=show(leaf.key), why=f"expected {expected}, got {got}"
    )


def _device_of(observation: Any) -> torch.device | None:
    """Return the device of an observation's tensors; None if it has none."""
    if isinstance(observation, Mapping):
        return next((place for part in observation.values() if (place := _device_of(part)) is not None), None)
    return observation.device if isinstance(observation, Tensor) else None
