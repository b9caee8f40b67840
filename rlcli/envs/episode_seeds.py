"""Seeds for environments: one number per (run seed, lane, episode), never the same twice within a run.

The counter `episode * lanes + lane` is sent through a bijection of 31-bit integers chosen by the run seed, so no two
episodes of a run can share a seed, and any engine that wants a non-negative 32-bit seed accepts it.
"""

from __future__ import annotations

_BITS = 31
_MASK = (1 << _BITS) - 1


def _mix(value: int) -> int:
    """A bijection of `[0, 2**31)`: odd multiplications and xor-shifts, each of which can be undone."""
    value = (value * 0x2C1B3C6D) & _MASK
    value ^= value >> 12
    value = (value * 0x297A2D39) & _MASK
    return value ^ (value >> 15)


def episode_seed(run_seed: int, lane: int, episode: int, lanes: int) -> int:
    """The seed of one episode.

    Parameters
    ----------
    run_seed : int
        Seed of the run (any non-negative integer).
    lane : int
        Index of the env among all `lanes` of the run, workers included.
    episode : int
        How many episodes this lane has begun before.
    lanes : int
        Number of envs of the whole run.
    """
    key = _mix(_mix(run_seed & _MASK) ^ ((run_seed >> _BITS) & _MASK) ^ 0x5BD1E995 & _MASK)
    return _mix(((episode * lanes + lane) & _MASK) ^ key)
