"""Rows drawn uniformly, with replacement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlcli.data.samplers.sampler import Draw, Sampler

if TYPE_CHECKING:
    from rlcli.data.ring.ring import Ring


class RandomSampler(Sampler):
    """Every stored row is equally likely at every draw.

    Parameters
    ----------
    seed : int, optional
        See `Sampler`.
    """

    def sample(self, ring: Ring, batch_size: int) -> Draw:
        return Draw((ring.base * ring.lanes + self.random.integers(len(ring), batch_size)) % ring.space.size)
