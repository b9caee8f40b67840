"""Flat batches of episodes whose observations say where they are: (episode, position)."""

from __future__ import annotations

import torch
from tensordict import TensorDict


def episodes(lengths, *, ids=True, terminated=True, first=0, flags=("done", "terminated", "truncated")):
    """Episodes of these lengths, end to end ``[N]``; every last row is terminated, or truncated."""
    total = sum(lengths)
    number = torch.repeat_interleave(torch.arange(first, first + len(lengths)), torch.tensor(lengths))
    position = torch.cat([torch.arange(n) for n in lengths])
    ends = torch.zeros(total, 1, dtype=torch.bool)
    ends[torch.tensor(lengths).cumsum(0) - 1] = True
    observation = torch.stack((number, position), 1).float()
    following = observation + torch.tensor([0.0, 1.0])
    kinds = {"done": ends, "terminated": ends & terminated, "truncated": ends & (not terminated)}
    batch = TensorDict(
        {
            "observation": observation,
            "action": torch.arange(total),
            "next": {"observation": following, "reward": position[:, None].float(), **{k: kinds[k] for k in flags}},
        },
        batch_size=[total],
    )
    if ids:
        batch["collector", "traj_ids"] = number
    return batch


def slices_of(sample, lengths):
    """[(episode, first position, length)] of the slices in a sample, each of which must be consecutive rows."""
    found = []
    for part in sample.split(list(lengths)):
        episode, position = part["observation"].unbind(1)
        assert (episode == episode[0]).all() and (position.diff() == 1).all()
        found.append((int(episode[0]), int(position[0]), len(part)))
    return found
