"""`SerialEnv`: N envs in this process, stepped together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from numbers import Integral
from typing import Any

import torch
from tensordict import TensorDictBase

from rlcli.arguments import refuse
from rlcli.envs.base import SEEDING, SPECS, EnvBase, next_of, own_methods, root_of
from rlcli.envs.gym_env import GymEnv, VecEnvAdapter, made_again
from rlcli.envs.transformed import TransformedEnv, transforms_on
from rlcli.errors import ArgumentError
from rlcli.keys import RESET
from rlcli.transforms import by_name
from rlcli.vec_envs.bounds import Bounds, strictest
from rlcli.vec_envs.episodes import episode_seed
from rlcli.vec_envs.gym_vec_env import GymVecEnv
from rlcli.vec_envs.vec_env import VecEnv

Maker = str | Callable[[], EnvBase]


def one_each(kind: str, num_workers: int, makers: Any) -> list[Any]:
    """Return as many env makers as there are envs, of one for all or of one each."""
    if not isinstance(num_workers, Integral) or num_workers < 1:
        raise ArgumentError(f"{kind} needs a number of envs, at least 1", why=f"num_workers is {num_workers!r}")
    several = isinstance(makers, Iterable) and not (isinstance(makers, str) or callable(makers))
    given = list(makers) if several else [makers] * int(num_workers)
    if len(given) != num_workers:
        raise ArgumentError(
            f"{kind} needs one env maker per env", why=f"num_workers is {num_workers}, got {len(given)} makers"
        )
    return given


class BatchedEnv(EnvBase):
    """N single envs, batch size `(N,)`, stepped by `inner`."""

    inner: EnvBase
    envs: list[EnvBase]  # those that are stepped here; of envs in other processes one that is like them, or none

    def _take_specs(self) -> None:
        self.vec_env: VecEnv | None = getattr(self.inner, "vec_env", None)  # None where the envs have none
        for name in SPECS:
            setattr(self, name, getattr(self.inner, name))

    def _move_specs(self, device: torch.device) -> None:
        self.inner.to(device)
        self._take_specs()

    @property
    def infos(self) -> dict[tuple[int, int], dict[str, float]]:
        """Return `info` of the envs whose episode the last step ended, by `(0, env)`."""
        return getattr(self.inner, "infos", {})

    @property
    def out_of_bounds(self) -> str:
        return self.inner.out_of_bounds

    @property
    def bounds(self) -> Bounds | None:
        """Return the bounds that all envs share, where they are stepped one by one."""
        return self.inner.bounds if isinstance(self.inner, Stacked) else None

    def _set_seed(self, seed: int) -> None:
        self.inner._set_seed(seed)

    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        return self.inner._reset(td)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        return self.inner._step(td)

    def close(self) -> None:
        super().close()
        self.inner.close()


class SerialEnv(BatchedEnv):
    """N envs in one process, batch size `(N,)`.

    Parameters
    ----------
    num_workers : int
        How many.
    create_env_fn : str, callable, or sequence of them
        An id, or what returns an `EnvBase` of batch size `()`.
    device : torch device, optional
        Where the TensorDict face puts its tensors.

    Notes
    -----
    Plain `GymEnv`s are stepped by one array loop (`vec_env`).  Envs with parts of their own, such as transforms inside,
    are stepped one by one through their TensorDict faces.

    Pickled, it is the way to make its like: the envs on the other side begin anew.
    """

    def __init__(self, num_workers: int, create_env_fn: Maker | Sequence[Maker], *, device=None) -> None:
        self._makers = makers = one_each("SerialEnv", num_workers, create_env_fn)
        super().__init__(batch_size=(len(makers),), device=device)
        envs: list[Any] = made(makers)
        self.envs = envs
        if all(type(env) is GymEnv and not env.own_parts for env in envs):
            first = envs[0]
            for index, env in enumerate(envs[1:], 1):
                other, mine = env.vec_env, first.vec_env
                if other.actions.categorical != mine.actions.categorical:
                    raise differing(index, "action_spec", env.action_spec, first.action_spec)
                if env.narrow != first.narrow and other.schema != mine.schema:
                    raise differing(index, "observation_spec", env.observation_spec, first.observation_spec)
            vec_env = GymVecEnv(
                [env.gym for env in envs], categorical=first.vec_env.actions.categorical, narrow=first.narrow,
                out_of_bounds=strictest(env.vec_env.bounds.mode for env in envs),
            )  # fmt: skip
            spaces = first.gym.observation_space, first.gym.action_space
            self.inner = VecEnvAdapter(vec_env, *spaces, batched=True, device=device)
        else:
            self.inner = Stacked(envs, device)
        self._take_specs()

    def __reduce_ex__(self, protocol):
        if type(self) is not SerialEnv:
            return super().__reduce_ex__(protocol)
        return made_again(partial(SerialEnv, len(self._makers), self._makers, device=self.device))


def times_called(env: EnvBase) -> int:
    """Count calls of `EnvBase`'s own `step` and `reset`, through `TransformedEnv` and `SerialEnv`."""
    base = env
    while isinstance(base, TransformedEnv):
        base = base.base_env
    members = base.envs if isinstance(base, BatchedEnv) else ()
    return env._times_called + sum(map(times_called, members))


def made(makers: Iterable[Any], kind: str = "SerialEnv") -> list[EnvBase]:
    """Make the single envs of some makers; raise ArgumentError for a shared one, or a batch size."""
    envs: list[EnvBase] = []
    seen: set[int] = set()
    for index, make in enumerate(makers):
        env: Any = make
        if isinstance(make, str):
            env = GymEnv(make)
        elif kind != "ParallelEnv" or not isinstance(make, EnvBase):  # there, an env is one that its pickle has made
            if not callable(make):
                raise ArgumentError(
                    f"{kind} is given what makes its envs", why=f"got {shown(make)}",
                    fix=f"Use {kind}(n, lambda: GymEnv(id)).",
                )  # fmt: skip
            env = make()
        if not isinstance(env, EnvBase):
            raise ArgumentError(
                f"{kind} puts envs that read and write TensorDicts together", why=f"a maker gave {shown(env)}",
                fix=f"Make GymEnvs: {kind}(n, lambda: GymEnv(env)).",
            )  # fmt: skip
        envs.append(env)
        below, inside = env, {id(env)}
        while isinstance(below, TransformedEnv):
            below = below.base_env
            inside.add(id(below))
        if isinstance(below, GymEnv):
            inside.add(id(below.gym.unwrapped))
        refuse(
            seen & inside, "one env cannot be several", where=f"env {index}",
            why="its maker gave one that is there already", fix="Make a new env in every call.",
        )  # fmt: skip
        seen |= inside
        refuse(
            env.batch_size, f"{kind} puts single envs together",
            why=f"{type(env).__name__} has batch size {tuple(env.batch_size)}",
            fix=f"Make one {kind} of all the single envs.",
        )  # fmt: skip
        for transform in transforms_on(env):
            name = type(transform).__name__
            refuse(
                transform.outside_batches, f"{name} lies inside an env of a batched env",
                why="what a step drops is still needed there: the batched env carries it to the next step",
                fix=f"Put it outside: TransformedEnv({kind}(n, make_env), {name}()).",
            )  # fmt: skip
    return envs


def shown(given: Any) -> str:
    """Return what was given in the place of an env, in a word."""
    return type(given).__name__ if isinstance(given, EnvBase) else repr(given)


def differing(index: int, name: str, *values: Any) -> ArgumentError:
    """Return the error for an env that is not like env 0: of what `name` says, its value and the other's."""
    value, first = (" ".join(repr(each).split()) for each in values)
    return ArgumentError(
        "envs that are stepped together have to be alike", where=f"env {index}",
        why=f"its {name} is {value}, that of env 0 is {first}",
        fix="Make all of them with the same options (categorical_action_encoding, narrow, transforms).",
    )  # fmt: skip


def _shared_bounds(envs: list[EnvBase]) -> Bounds | None:
    """Return one count for the observations of all these envs; None where their bounds differ."""
    vec_envs: list[VecEnv] = []
    specs = []
    for env in envs:
        while isinstance(env, TransformedEnv) and not own_methods(env):
            env = env.base_env
        vec_env = getattr(env, "vec_env", None)
        if not isinstance(vec_env, VecEnv) or own_methods(env):
            return None
        vec_envs.append(vec_env)
        specs.append(env.observation_spec)
    if any(spec != specs[0] for spec in specs):
        return None
    cells = [vec_env.bounds.rounded for vec_env in vec_envs]
    rounded = {key: [cell for each in cells for cell in each.get(key, ())] for key in cells[0]}
    shared = Bounds(vec_envs[0].bounds.intervals, strictest(vec_env.bounds.mode for vec_env in vec_envs), rounded)
    shared.begin_anew()
    for vec_env in vec_envs:
        vec_env.bounds = shared
    return shared


class Stacked(EnvBase):
    """Step envs, all alike, one by one, and stack their outputs; `count` is given where `envs` holds only one."""

    def __init__(self, envs: list[EnvBase], device, *, count: int | None = None) -> None:
        n, first = count or len(envs), envs[0]
        super().__init__(batch_size=(n, *first.batch_size), device=device)
        self.envs = envs
        self.bounds = None if count else _shared_bounds(envs)
        for index, env in enumerate(envs[1:], 1):
            for name in SPECS:
                if getattr(env, name) != getattr(first, name):
                    raise differing(index, name, getattr(env, name), getattr(first, name))
        self.observation_spec = first.observation_spec.expand(*self.batch_size)
        self.state_spec = first.state_spec.expand(*self.batch_size)
        self.action_spec = first.action_spec.expand(n, *first.action_spec.shape)
        self.reward_spec = first.reward_spec.expand(n, *first.reward_spec.shape)

    @property
    def out_of_bounds(self) -> str:
        return strictest(env.out_of_bounds for env in self.envs)

    def _move_specs(self, device: torch.device) -> None:
        for env in self.envs:
            env.to(device)
        super()._move_specs(device)

    def _set_seed(self, seed: int) -> None:
        self.seed_each(seed)

    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        n, mask = self.batch_size[0], None if td is None else td.get(RESET, None)
        chosen: Sequence[int] = range(n) if mask is None else mask.reshape(n, -1).any(-1).nonzero().squeeze(-1).tolist()
        shown = dict(zip(chosen, self.reset_each(chosen), strict=True))
        # in the place of a lane that goes on stands another's root: `reset` keeps what it had
        other: Any = next(iter(shown.values()), None if td is None else td[0].exclude(RESET, "next", "action"))
        return torch.stack([shown.get(i, other) for i in range(n)], 0)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        return torch.stack(self.step_each([td[i].clone(False) for i in range(self.batch_size[0])]), 0)

    # ---- what is done with each ---------------------------------------------------------------------------------
    def seed_each(self, seed: int, first: int = 0, total: int | None = None) -> None:
        """Seed these envs, of `total` ones the `first` and those that follow."""
        for index, env in enumerate(self.envs, first):
            _seed_one(env, seed, index, total or len(self.envs))

    def reset_each(self, indices: Sequence[int]) -> list[TensorDictBase]:
        return [root_of(env, env.reset()) for env in (self.envs[index] for index in indices)]

    def step_each(self, rows: Sequence[TensorDictBase]) -> list[TensorDictBase]:
        return [next_of(env, env.step(row)) for env, row in zip(self.envs, rows, strict=True)]

    def transforms_within(self, prefix: str) -> Iterator[tuple[str, Any]]:
        for number, env in enumerate(self.envs):
            yield from transforms_within(env, f"{prefix}{number}/")

    def close(self) -> None:
        super().close()
        for env in self.envs:
            env.close()


def _seed_one(env: EnvBase, seed: int, index: int, total: int) -> None:
    """Seed one of `total` envs: under transforms of ours, the episodes are those of a plain `GymEnv`."""
    base = env
    while isinstance(base, TransformedEnv) and not own_methods(base, SEEDING):
        base = base.base_env
    if isinstance(base, VecEnvAdapter) and not own_methods(base, SEEDING):
        base.vec_env.seed(seed, first_lane=index, total=total)
    else:  # mixed, not counted on: the seeds 3 and 4 have no env in common
        env.set_seed(episode_seed(seed, index, 0, total))


def transforms_within(env: EnvBase, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the transforms of an env and of all envs that it is made of, each under a name of its own."""
    if isinstance(env, TransformedEnv):
        yield from transforms_within(env.base_env, f"{prefix}below/")
        yield from ((f"{prefix}{name}", transform) for name, transform in by_name(env.transforms).items())
    elif isinstance(env, BatchedEnv) and isinstance(env.inner, Stacked):
        yield from env.inner.transforms_within(prefix)
