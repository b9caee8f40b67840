"""`ParallelEnv`: N envs in worker processes, stepped together."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium as gym

from rlcli.envs.apart import Apart
from rlcli.envs.base import EnvBase
from rlcli.envs.gym_env import GymEnv, VecEnvAdapter, made_again, recipe_of
from rlcli.envs.serial import BatchedEnv, differing, made, narrows, one_each
from rlcli.errors import ArgumentError, in_words
from rlcli.processes.worker import USUAL_METHOD
from rlcli.vec_envs.bounds import strictest
from rlcli.vec_envs.make import GymRecipe
from rlcli.vec_envs.parallel_vec_env import ParallelVecEnv

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

    fast = True

    def __init__(
        self,
        num_workers: int,
        create_env_fn: Maker | Sequence[Maker],
        *,
        workers: int | None = None,
        per_worker: int | str | None = None,
        caller_steps: bool | None = None,
        step_timeout: float | None = None,
        on_worker_error: str = "raise",
        start_method: str | None = None,
        device=None,
        first: gym.Env | None = None,
    ) -> None:
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
        self._take_specs()

    def _plain(self, given: list[tuple[GymRecipe, dict[str, Any]]], device, first: gym.Env | None) -> VecEnvAdapter:
        """Step gymnasium envs without parts of their own."""
        options = given[0][1]
        for index, (_, other) in enumerate(given[1:], 1):
            for name in OPTIONS[:2]:
                if other[name] != options[name]:
                    raise differing(index, name, str(other[name]), str(options[name]))
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
        workers = f"workers={len(vec_env.crew.workers)}" + (", caller_steps=True" if vec_env.own else "")
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
    seen = vec_env.actions.categorical, narrows(vec_env), env.out_of_bounds
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
