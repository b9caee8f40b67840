"""What the benches of buffers share: rows whose values say where they belong, so that what a buffer gives back can be
checked, and buffers by hand, as an engineer writes them who knows the keys and needs nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

LENGTH = 200  # rows of a trajectory
STACK = (4, 84, 84)


def small_rows(start: int, count: int) -> TensorDict:
    """Rows `start, start + 1, ...` of 8 small keys, ids among them: trajectories of 200 rows, one after another."""
    number = torch.arange(start, start + count)
    seven = seven_keys(start, count)
    seven["collector"] = TensorDict({"traj_ids": number // LENGTH}, [count])
    return seven


def seven_keys(start: int, count: int) -> TensorDict:
    """The same without ids: 7 keys, 47 bytes a row."""
    number = torch.arange(start, start + count)
    done = (number % LENGTH == LENGTH - 1).unsqueeze(-1)
    return TensorDict(
        {
            "observation": _observation(number),
            "action": number % 2,
            "next": TensorDict(
                {
                    "observation": _observation(number + 1),
                    "reward": (number % 7).float().unsqueeze(-1),
                    "done": done,
                    "terminated": done.clone(),
                    "truncated": torch.zeros_like(done),
                },
                [count],
            ),
        },
        [count],
    )


def image_rows(start: int, count: int) -> TensorDict:
    """Rows of an observation and a next observation, both stacks of four 84x84 frames: 56,449 bytes a row."""
    stacks = (torch.arange(start, start + count + 1) % 251).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, *STACK)
    number = torch.arange(start, start + count)
    done = (number % LENGTH == LENGTH - 1).unsqueeze(-1)
    following = TensorDict({"observation": stacks[1:].contiguous(), "done": done}, [count])
    return TensorDict({"observation": stacks[:-1].contiguous(), "next": following}, [count])


def numbers_of(rows: TensorDictBase) -> Tensor:
    """Which rows these are."""
    return rows["observation"][:, 0].long() * LENGTH + rows["observation"][:, 1].long()


def _observation(number: Tensor) -> Tensor:
    """Trajectory and step of a row, and two numbers more: whole numbers, exact in float32."""
    columns = (number // LENGTH, number % LENGTH, number % 1000, number % 11)
    return torch.stack([column.float() for column in columns], -1)


class ByHand:
    """A ring of preallocated tensors; no trajectories, no checks."""

    def __init__(self, capacity: int, like: TensorDictBase) -> None:
        leaves = like.items(include_nested=True, leaves_only=True)
        self.columns = {key: torch.zeros((capacity, *x.shape[1:]), dtype=x.dtype) for key, x in leaves}
        self.capacity, self.cursor = capacity, 0

    def extend(self, batch: TensorDictBase) -> None:
        """Copy a batch that does not reach over the end."""
        at, count = self.cursor, batch.shape[0]
        for key, column in self.columns.items():
            column[at : at + count] = batch.get(key)
        self.cursor = (at + count) % self.capacity

    def rows(self, start: int, count: int) -> dict[object, Tensor]:
        """What lies there."""
        return {key: column[start : start + count] for key, column in self.columns.items()}


def bare_copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """The bytes, once."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def gather_images(columns: list[Tensor], batch_size: int) -> Callable[[], list[Tensor]]:
    """Random rows of every column `[N, *F]`, into buffers made once."""
    out = [torch.empty((batch_size, *column.shape[1:]), dtype=column.dtype) for column in columns]

    def side() -> list[Tensor]:
        rows = torch.randint(len(columns[0]), (batch_size,))
        for column, target in zip(columns, out, strict=True):
            torch.index_select(column, 0, rows, out=target)
        return out

    return side
