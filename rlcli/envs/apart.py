"""Envs that only know TensorDicts, in worker processes: what `SerialEnv` calls on each of its envs is called there.

What an env is given and what it shows is sent as numpy arrays. Envs without parts of their own are stepped through
shared memory instead: `rlcli.vec_envs.parallel_vec_env`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from rlcli import arguments
from rlcli.envs.base import SPECS, EnvBase
from rlcli.envs.serial import Stacked, brief, differing, made, transforms_within
from rlcli.errors import ArgumentError, EnvError
from rlcli.keys import Key
from rlcli.processes.channel import Channel, packed, unpacked
from rlcli.processes.crew import Crew, Lost
from rlcli.processes.line import Line
from rlcli.processes.serving import serve
from rlcli.processes.streams import seed_streams
from rlcli.processes.worker import Worker
from rlcli.vec_envs.episodes import episode_seed
from rlcli.vec_envs.shares import shared_out
from rlcli.vec_envs.told import Told, told

TARGET = f"{__name__}:work"
CALL = 1
Plain = dict[Key, np.ndarray | Tensor]


class Apart(Stacked):
    """Deal N single envs out over worker processes, by pickled `makers`; `envs` holds a closed `example` alone."""

    fast = True

    def __init__(
        self,
        makers: Sequence[bytes],
        example: EnvBase,
        *,
        workers: int | None,
        per_worker: int | str | None,
        caller_steps: bool | None,
        step_timeout: float | None,
        on_worker_error: str,
        start_method: str,
        device: Any,
    ) -> None:
        arguments.seconds("step_timeout", step_timeout)
        if on_worker_error == "restart" or caller_steps:
            asked = "caller_steps=True" if caller_steps else "on_worker_error='restart'"
            raise ArgumentError(
                f"{asked} is for plain GymEnvs", why=f"got {example!r}",
                fix="Leave it out, or put the transforms outside: TransformedEnv(ParallelEnv(n, make_env), transform).",
            )  # fmt: skip
        self.parts, _ = shared_out(len(makers), workers, per_worker, False, on_worker_error)
        started: list[Worker] = []
        try:
            for _ in self.parts:
                started.append(Worker(TARGET, start_method=start_method, preload=[__name__]))
        finally:
            self.crew = Crew(started)
        self.step_timeout: float | None = None
        try:
            parents, orders = told(), [makers[part.start : part.stop] for part in self.parts]
            answers = self._each(
                "build", [(parents, batch, part.start) for batch, part in zip(orders, self.parts, strict=True)]
            )
            self._transforms = [names for _, each in answers for names in each]
            for part, (specs, _) in zip(self.parts, answers, strict=True):
                for name in SPECS:
                    if specs[name] != answers[0][0][name]:
                        raise differing(part.start, name, brief(specs[name]), brief(answers[0][0][name]))
        except BaseException:
            self.close()
            raise
        self.step_timeout = step_timeout
        super().__init__([example], device, count=len(makers))

    def _each(self, name: str, arguments: Mapping[int, Any] | Sequence[Any]) -> list[Any]:
        """Call a method of each worker, or of some; return the results."""
        given = arguments if isinstance(arguments, Mapping) else dict(enumerate(arguments))
        self.crew.patience = self.step_timeout
        try:
            return self.crew.order(CALL, [packed((name, args)) for args in given.values()], only=[*given])
        except Lost as lost:
            if not self.crew.close.alive:
                raise ArgumentError("the env is closed", where="ParallelEnv", fix="Make a new one.") from None
            part = self.parts[lost.index]
            raise EnvError(
                f"a worker process {lost.how}" if lost.late is None else f"no answer for {lost.late:g} s",
                where=f"ParallelEnv, envs {part.start} to {part.stop - 1}", why="its envs were lost",
                fix="Debug them in one process: SerialEnv.",
            ) from None  # fmt: skip

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
        self.crew.close()


class _There(NamedTuple):
    """Refer to a transform of an env in a worker, for checkpoints."""

    env: Apart
    number: int
    name: str

    def _call(self, name: str, *args: Any) -> Any:
        index = next(index for index, part in enumerate(self.env.parts) if self.number in part)
        return self.env._each(name, {index: (self.number, self.name, *args)})[0]

    def state_dict(self) -> dict[str, Any]:
        return self._call("state_of")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._call("load_state_of", state)

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

    def state_of(self, index: int, name: str) -> dict[str, Any]:
        return dict(transforms_within(self.envs[index]))[name].state_dict()

    def load_state_of(self, index: int, name: str, state: dict[str, Any]) -> None:
        dict(transforms_within(self.envs[index]))[name].load_state_dict(state)

    def close(self) -> None:
        for env in self.envs.values():
            env.close()
