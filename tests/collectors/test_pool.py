"""Memory of batches: taken, given back, and never written while somebody holds what was handed out of it."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import Counter

from rlcli.collectors import Collector
from rlcli.envs import GymEnv, SerialEnv
from rlcli.errors import EnvError

KEPT = {
    "nothing": lambda batch: None,
    "batch": lambda batch: batch,
    "tensor": lambda batch: batch["observation"],
    "view": lambda batch: batch["observation"][1:, 1:],
    "array": lambda batch: batch["next", "reward"].numpy(),
    "flat": lambda batch: batch.reshape(-1)["action"],
    "graph": lambda batch: (batch["observation"] * torch.ones(1, requires_grad=True)).sum(),
}


def collector(**options) -> Collector:
    return Collector(SerialEnv(2, lambda: GymEnv(Counter())), frames_per_batch=8, seed=0, **options)


def place(batch) -> int:
    return batch["observation"].data_ptr()


def bytes_of(kept) -> bytes:
    if kept is None:
        return b""
    if isinstance(kept, np.ndarray):
        return kept.tobytes()
    if isinstance(kept, torch.Tensor):
        return kept.detach().contiguous().numpy().tobytes()
    return b"".join(bytes_of(x) for x in kept.values(True, True))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(KEPT)), st.sampled_from([3, 4]), st.integers(0, 4)), min_size=2, max_size=12
    )
)
def test_what_a_consumer_keeps_is_never_overwritten(walk):
    made = collector()
    held = []
    for what, steps, dropped in walk:
        kept = KEPT[what](made.deliver(steps).raw)
        held.append((kept, bytes_of(kept)))
        assert all(bytes_of(kept) == before for kept, before in held)
        held = held[dropped:]


def test_a_gradient_through_an_old_batch_is_that_of_its_own_values():
    made = collector()
    weight = torch.ones(1, requires_grad=True)
    batch = made.rollout()
    expected = float((batch["observation"] ** 2).sum())
    loss = (batch["observation"] ** 2 * weight).sum()
    del batch
    for _ in range(4):
        made.rollout()
    loss.backward()
    assert float(weight.grad) == expected


def test_a_batch_that_is_held_until_the_next_comes_costs_one_more():
    made, places, before = collector(), set(), None
    for _ in range(12):
        batch = made.rollout()
        places.add(place(batch))
        before, batch = batch, None
    assert before is not None and len(places) == 2


def test_reused_memory_is_always_the_same():
    made = collector(reuse_batch=True)
    held = [made.rollout() for _ in range(5)]
    assert len({place(batch) for batch in held}) == 1


def test_memory_that_is_being_written_is_nobody_elses():
    pool = collector()._engine.pool
    first, second = pool.take(4), pool.take(4)
    assert first is not second
    pool.give_back(first)
    assert pool.take(4) is first


def test_a_batch_that_failed_gives_its_memory_back():
    class Fails(Counter):
        broken = False

        def step(self, action):
            if Fails.broken:
                raise RuntimeError("the cable came off")
            return super().step(action)

    made = Collector(GymEnv(Fails()), frames_per_batch=8, seed=0)
    before = place(made.rollout())
    for Fails.broken in (True, False):
        try:
            after = place(made.rollout())
        except EnvError:
            assert Fails.broken
    assert after == before
