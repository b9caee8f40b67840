"""Rows whose values say where they belong, so that what a buffer gives back can be checked."""

from __future__ import annotations

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
