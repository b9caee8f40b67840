"""`ParallelEnv`: N envs in worker processes, stepped together.

Plain envs are stepped through shared memory (`rlcli.vec_envs.parallel_vec_env`). Of envs that only know TensorDicts,
what `SerialEnv` calls on each is called in the workers (`Apart`): what it is given and what it shows is sent as numpy
arrays.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from rlcli import arguments
from rlcli.envs.base import SPECS, EnvBase
from rlcli.envs.gym_env import GymEnv, VecEnvAdapter, made_again, recipe_of
from rlcli.envs.serial import BatchedEnv, Stacked, differing, made, one_each, transforms_within
from rlcli.errors import ArgumentError, EnvError, in_words
from rlcli.keys import Key
from rlcli.processes.channel import Channel, packed, unpacked
from rlcli.processes.group import WorkerGroup
from rlcli.processes.line import Line, serve
from rlcli.processes.process import seed_streams
from rlcli.processes.replacing import Lost, Owner
from rlcli.processes.worker import USUAL_METHOD, Worker
from rlcli.vec_envs.bounds import strictest
from rlcli.vec_envs.episodes import episode_seed
from rlcli.vec_envs.make import GymRecipe
from rlcli.vec_envs.parallel_vec_env import ParallelVecEnv
from rlcli.vec_envs.workers import Told, shared_out, told

Maker = str | EnvBase | Callable[[], EnvBase]
OPTIONS = ("categorical_action_encoding", "narrow", "out_of_bounds")


class ParallelEnv(BatchedEnv):
    """N envs in worker processes, batch size `(N,)`: what `SerialEnv` gives, to the bit.

    Parameters
    ----------
    num_workers : int
        How many envs.
    create_env_fn : str, EnvBase, callable, or sequence of them
        An id, an env that tells how its like is made, or what returns one. It is called here, once an env, and what
        it made is closed again; `functools.partial(GymEnv, ...)` is read without being called.
    workers : int, optional
        Processes beside this one: each steps its share of the envs.
    per_worker : int or "auto", optional
        Envs of each process at most, in the place of `workers`; "auto", as None, follows from the cores.
    caller_steps : bool, optional
        Whether this process steps a share of the envs itself while the workers step theirs, which is fastest; an env
        that hangs or ends its process does so to the caller then. By default it does where neither `workers` nor
        `per_worker` is given, nor `on_worker_error="restart"`: there are as many shares as cores, the caller's
        included, and at least one worker.
    step_timeout : float, optional
        Seconds after which a worker that has not answered to a step or a reset is killed.
    on_worker_error : {"raise", "restart"}
        A worker that ends, is killed, or whose env raises: an `EnvError`, or another worker in its place, each at
        most 5 times in a minute. The step of its envs that was not answered is truncated then, with no reward and with
        the observation before it as the one after it; new episodes begin. `lanes.restarts` tells how often that was,
        and how many such steps there are.
    start_method : {"forkserver", "spawn", "fork"}, optional
        How processes are made (see `rlcli.processes.worker`); by default `forkserver`.
    device : torch device, optional
        Where the TensorDict face puts its tensors.
    first : gymnasium.Env, optional
        The first env, where it was made already and the caller steps it.

    Raises
    ------
    ArgumentError
        An env that is no single one, or cannot be sent to another process.
    EnvError
        What `SerialEnv` raises too; and a worker has ended, by which signal or exit code.

    Notes
    -----
    Plain `GymEnv`s are stepped through shared memory (`vec_env`). Envs with parts of their own, such as transforms
    inside, are stepped through their TensorDict faces: their workers import torch, neither the caller steps some nor
    are workers replaced, and a running scale inside learns at every step, not once a batch.

    Pickled, it is the way to make its like: the other process starts workers of its own, whose envs begin anew.

    Workers import neither torch nor the caller's `__main__`, unless an env's own code does; the `repr` tells. With
    `start_method="fork"` they begin with all that this process has imported.
    """

    def __init__(
        self, num_workers: int, create_env_fn: Maker | Sequence[Maker], *, workers: int | None = None,
        per_worker: int | str | None = None, caller_steps: bool | None = None, step_timeout: float | None = None,
        on_worker_error: str = "raise", start_method: str | None = None, device=None, first: gym.Env | None = None,
    ) -> None:  # fmt: skip
        self.start_method = start_method or USUAL_METHOD
        self._processes: dict[str, Any] = {
            "workers": workers, "per_worker": per_worker, "caller_steps": caller_steps, "step_timeout": step_timeout,
            "on_worker_error": on_worker_error, "start_method": self.start_method,
        }  # fmt: skip
        self._makers = one_each("ParallelEnv", num_workers, create_env_fn)
        super().__init__(batch_size=(len(self._makers),), device=device)
        given: list[tuple[GymRecipe, dict[str, Any]]] = []
        for maker in self._makers:
            described = _described(maker)
            if isinstance(described, EnvBase):
                self.inner = Apart(sent(self._makers), described, **self._processes, device=device)
                break
            given.append(described)
        else:
            self.inner = self._plain(given, device, first)
        self.envs = getattr(self.inner, "envs", [])
        self._take_specs()

    def _plain(self, given: list[tuple[GymRecipe, dict[str, Any]]], device, first: gym.Env | None) -> VecEnvAdapter:
        """Step gymnasium envs without parts of their own."""
        options = given[0][1]
        for index, (_, other) in enumerate(given[1:], 1):
            for name in OPTIONS[:2]:
                if other[name] != options[name]:
                    raise differing(index, name, other[name], options[name])
        vec_env = ParallelVecEnv(
            sent([recipe for recipe, _ in given]), **self._processes,
            categorical=options["categorical_action_encoding"], narrow=options["narrow"],
            out_of_bounds=strictest(each["out_of_bounds"] for _, each in given),
            first=first,
        )  # fmt: skip
        self._makers = [partial(GymEnv, recipe, **each) for recipe, each in given]
        return VecEnvAdapter(vec_env, *vec_env.spaces, batched=True, device=device)

    def __reduce_ex__(self, protocol):
        if type(self) is not ParallelEnv:
            return super().__reduce_ex__(protocol)
        return made_again(partial(ParallelEnv, len(self._makers), self._makers, **self._processes, device=self.device))

    def __repr__(self) -> str:
        if self.vec_env is None:
            return f"ParallelEnv({self.envs[0]!r}, {len(self._makers)}, start_method={self.start_method!r})"
        vec_env: Any = self.vec_env
        heavy = f", imports {', '.join(vec_env.heavy)}" if vec_env.heavy else ""
        method = f"start_method={self.start_method!r}"
        workers = f"workers={len(vec_env.group.workers)}" + (", caller_steps=True" if vec_env.own else "")
        return f"ParallelEnv({vec_env.name}, {vec_env.n}, {workers}, {method}{heavy})"


def _described(maker: Maker) -> tuple[GymRecipe, dict[str, Any]] | EnvBase:
    """Return an env's recipe and `GymEnv` options; the env itself, closed, if it is another."""
    if isinstance(maker, str):
        maker = partial(GymEnv, maker)
    if isinstance(maker, partial) and maker.func is GymEnv and "policy" not in maker.keywords:
        arguments = inspect.signature(GymEnv).bind(*maker.args, **maker.keywords)
        arguments.apply_defaults()
        more = arguments.arguments.pop("kwargs")  # one of them may have that name
        given = {**arguments.arguments, **more}
        options = {name: given.pop(name) for name in OPTIONS}
        given.pop("device")
        return recipe_of(given.pop("env"), **given), options
    (env,) = made([maker], "ParallelEnv")
    if type(env) is not GymEnv or env.own_parts:
        if env is not maker:
            env.close()
        return env
    vec_env: Any = env.vec_env
    seen = vec_env.actions.categorical, any(leaf.stored != leaf.dtype for leaf in vec_env.leaves), env.out_of_bounds
    if env is not maker and not isinstance(env.recipe.source, gym.Env):  # else it is to be sent as it is
        env.close()
    return env.recipe, dict(zip(OPTIONS, seen, strict=True))


def sent(makers: Sequence[Any]) -> list[bytes]:
    """Pickle recipes and makers for workers; code of the user's `__main__`, which they do not run, by value."""
    import cloudpickle

    bodies = []
    for index, maker in enumerate(makers):
        try:
            bodies.append(cloudpickle.dumps(maker))
        except Exception as error:  # whatever an object of the user's raises
            raise ArgumentError(
                "this env cannot be sent to a worker process", where=f"env {index}", why=in_words(error),
                fix="Give its id, or register what builds it; or use SerialEnv.",
            ) from error  # fmt: skip
    return bodies


# ---- envs that only know TensorDicts --------------------------------------------------------------------------------
TARGET = f"{__name__}:work"
CALL = 1
Plain = dict[Key, np.ndarray | Tensor]


class Apart(Stacked, Owner):
    """Deal N single envs out over worker processes, by pickled `makers`; `envs` holds a closed `example` alone."""

    def __init__(
        self, makers: Sequence[bytes], example: EnvBase, *, workers: int | None, per_worker: int | str | None,
        caller_steps: bool | None, step_timeout: float | None, on_worker_error: str, start_method: str, device: Any,
    ) -> None:  # fmt: skip
        arguments.seconds("step_timeout", step_timeout)
        if on_worker_error == "restart" or caller_steps:
            asked = "caller_steps=True" if caller_steps else "on_worker_error='restart'"
            raise ArgumentError(
                f"{asked} is for plain GymEnvs", why=f"got {example!r}",
                fix="Leave it out, or put the transforms outside: TransformedEnv(ParallelEnv(n, make_env), transform).",
            )  # fmt: skip
        self.parts, _ = shared_out(len(makers), workers, per_worker, False, on_worker_error)
        start = partial(Worker, TARGET, start_method=start_method, preload=[__name__])
        self.group = WorkerGroup(start, len(self.parts), owner=self)
        try:
            parents, orders = told(), [makers[part.start : part.stop] for part in self.parts]
            answers = self._each(
                "build", [(parents, batch, part.start) for batch, part in zip(orders, self.parts, strict=True)]
            )
            self._transforms = [names for _, each in answers for names in each]
            for part, (specs, _) in zip(self.parts, answers, strict=True):
                for name in SPECS:
                    if specs[name] != answers[0][0][name]:
                        raise differing(part.start, name, specs[name], answers[0][0][name])
        except BaseException:
            self.close()
            raise
        self.step_timeout = step_timeout
        super().__init__([example], device, count=len(makers))

    def _each(self, name: str, arguments: Mapping[int, Any] | Sequence[Any]) -> list[Any]:
        """Call a method of each worker, or of some; return the results."""
        given = arguments if isinstance(arguments, Mapping) else dict(enumerate(arguments))
        bodies = [packed((name, args)) for args in given.values()]
        return self.group.call(lambda owner, _: owner.group.order(CALL, bodies, only=[*given]))

    def refusal(self, lost: Lost) -> Exception:
        if not self.group.is_open:
            return ArgumentError("the env is closed", where="ParallelEnv", fix="Make a new one.")
        part = self.parts[lost.index]
        return EnvError(
            f"a worker process {lost.how}" if lost.late is None else f"no answer for {lost.late:g} s",
            where=f"ParallelEnv, envs {part.start} to {part.stop - 1}", why="its envs were lost",
            fix="Debug them in one process: SerialEnv.",
        )  # fmt: skip

    def _called(self, name: str, given: Mapping[int, Any]) -> list[TensorDictBase]:
        """Call a method of these envs, with an argument each; return what they show."""
        of = {worker: [index for index in part if index in given] for worker, part in enumerate(self.parts)}
        orders = {worker: ({index: given[index] for index in indices},) for worker, indices in of.items() if indices}
        shown = [rows for answer in self._each(name, orders) for rows in answer]
        return [_tensordict(row, self.envs[0], self.device) for row in shown]

    # ---- what SerialEnv does in this process --------------------------------------------------------------------
    def seed_each(self, seed: int, first: int = 0, total: int | None = None) -> None:
        self._each("seed", [(seed, total or self.batch_size[0])] * len(self.parts))

    def reset_each(self, indices: Sequence[int]) -> list[TensorDictBase]:
        return self._called("reset", dict.fromkeys(indices))

    def step_each(self, rows: Sequence[TensorDictBase]) -> list[TensorDictBase]:
        return self._called("step", {index: _plain(row) for index, row in enumerate(rows)})

    def transforms_within(self, prefix: str) -> Iterator[tuple[str, Any]]:
        for number, names in enumerate(self._transforms):
            for name in names:
                yield f"{prefix}{number}/{name}", _There(self, number, name)

    def _move_specs(self, device: torch.device) -> None:
        EnvBase._move_specs(self, device)  # those in workers stay where they are

    def close(self) -> None:
        self.is_closed = True
        self.group.close()


class _There(NamedTuple):
    """Refer to a transform of an env in a worker, for checkpoints."""

    env: Apart
    number: int
    name: str

    def _call(self, method: str, *args: Any) -> Any:
        index = next(index for index, part in enumerate(self.env.parts) if self.number in part)
        return self.env._each("transform", {index: (self.number, self.name, method, *args)})[0]

    def state_dict(self) -> dict[str, Any]:
        return self._call("state_dict")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._call("load_state_dict", state)

    def modules(self) -> tuple[()]:
        """Return none: no scale here could be held still."""
        return ()


def _plain(td: TensorDictBase) -> Plain:
    """Return a TensorDict without its class, which takes long to pickle."""
    given = ((key, x.detach().cpu()) for key, x in td.items(True, True))
    return {key: x if x.dtype is torch.bfloat16 else x.numpy() for key, x in given}


def _tensordict(plain: Plain, env: EnvBase, device: Any) -> TensorDict:
    td = TensorDict({}, batch_size=env.batch_size, device=device)
    for key, x in plain.items():
        td.set(key, torch.as_tensor(x))
    return td


# ---- in a worker ----------------------------------------------------------------------------------------------------
def work(channel: Channel) -> None:
    torch.set_num_threads(1)
    envs = _Envs()
    try:
        serve(Line(channel), envs.carry_out)
    finally:
        envs.close()


class _Envs:
    """Neighbouring envs of one `Apart`, by their indices among all."""

    envs: dict[int, EnvBase]

    def __init__(self) -> None:
        self.envs = {}

    def carry_out(self, kind: int, body: bytes) -> Any:
        name, args = unpacked(body)
        return getattr(self, name)(*args)

    def build(self, parents: Told, makers: Sequence[bytes], first: int) -> tuple[dict[str, Any], list[list[str]]]:
        """Make the envs; return the specs of the first, and the names of each one's transforms."""
        parents.learn()
        given = [unpacked(maker) for maker in makers]
        self.envs = {first + i: env for i, env in enumerate(made(given, "ParallelEnv"))}
        self.stacked = Stacked([*self.envs.values()], None)
        seed_streams()
        names = [[name for name, _ in transforms_within(env)] for env in self.envs.values()]
        return {name: getattr(self.envs[first], name) for name in SPECS}, names

    def seed(self, seed: int, total: int) -> None:
        first = next(iter(self.envs))
        seed_streams(episode_seed(seed, first, 1, total))  # what transforms draw from
        self.stacked.seed_each(seed, first, total)

    def reset(self, indices: Mapping[int, None]) -> list[Plain]:
        first = next(iter(self.envs))
        return [_plain(row) for row in self.stacked.reset_each([index - first for index in indices])]

    def step(self, rows: Mapping[int, Plain]) -> list[Plain]:
        given = [_tensordict(row, env, env.device) for row, env in zip(rows.values(), self.envs.values(), strict=True)]
        return [_plain(row) for row in self.stacked.step_each(given)]

    def transform(self, index: int, name: str, method: str, *args: Any) -> Any:
        return getattr(dict(transforms_within(self.envs[index]))[name], method)(*args)

    def close(self) -> None:
        for env in self.envs.values():
            env.close()
