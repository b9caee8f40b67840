"""What an estimator refuses to learn from: numbers that are none, and batches without a row that counts.

Looked at on the CPU only: on a GPU it would wait for the device, and the update counts what is not finite there.
"""

from __future__ import annotations

from torch import Tensor

from rlcli.errors import ArgumentError, NumericsError
from rlcli.keys import Key, show
from rlcli.objectives.reduction import may_ask
from rlcli.objectives.value.parts import Ends, Values


def check_numbers(
    reward: Tensor, values: Values, ends: Ends, counts: Tensor | None, names: tuple[Key, Key], time: int
) -> None:
    """Refuse rewards and values that are not finite, by the first row where one is.

    Parameters
    ----------
    reward : Tensor ``[*B, F]``
    counts : bool Tensor ``[*B, F]``, optional
        Rows that count; others may hold anything.
    names : (Key, Key)
        Of the reward and of the value.
    time : int
        The batch dim that is time.

    Raises
    ------
    NumericsError, ArgumentError
    """
    if reward.is_meta or not may_ask(reward):
        return
    if counts is not None and not counts.any():
        raise ArgumentError("no row of the batch counts", why="its masks let none through")
    next_value = values.next_value.masked_fill(ends.terminated.unsqueeze(-1), 0)
    for name, x in ((show(names[0]), reward), (show(names[1]), values.value), (f"next {show(names[1])}", next_value)):
        seen = x if counts is None else x.masked_fill(~counts, 0)
        if seen.sum().isfinite() or seen.isfinite().all():
            continue
        place = (~seen.isfinite()).nonzero()[0].tolist()[: reward.ndim - 1]
        step = place.pop(time)
        where = f"step {step}" + (f" of env {place[0] if len(place) == 1 else place}" if place else "")
        raise NumericsError(
            f"{name} is not finite",
            where=where,
            why=f"it is {float(seen[~seen.isfinite()][0])}",
            fix="Look at the env's rewards and at the learning rate; a value network that has diverged stays so.",
        )
