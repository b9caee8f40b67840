"""The ledger's bytes are the tensors' own, each address once, and `saved` is what `full` would add."""

from __future__ import annotations

import mmap
import os

import pytest
import torch
from face import Rows
from tensordict import TensorDict

from rlcli.data.next_obs.rows import Successors
from rlcli.processes.memory import process_memory
from rlcli.report.ledger import Claims, Ledger, batch_entries, learner_entries
from rlcli.report.view import memory_rows

N, T = 4, 25
FRAMES = N * T


def batch(**next_keys: torch.Tensor) -> TensorDict:
    return TensorDict(
        {
            "observation": torch.zeros(N, T, 4),
            "action": torch.zeros(N, T, dtype=torch.int64),
            "next": {
                "reward": torch.zeros(N, T, 1),
                "done": torch.zeros(N, T, 1, dtype=torch.bool),
                **next_keys,
            },
        },
        [N, T],
    )


def lines(entries) -> dict:
    return {entry.key: entry for entry in entries}


def test_every_key_is_listed_with_its_bytes():
    found = lines(batch_entries(batch(observation=torch.zeros(N, T, 4)), ["observation"]))
    assert {key: entry.bytes for key, entry in found.items()} == {
        "observation": 16 * FRAMES,
        "action": 8 * FRAMES,
        "next.reward": 4 * FRAMES,
        "next.done": FRAMES,
        "next.observation": 16 * FRAMES,
    }
    assert found["observation"].shape == (N, T, 4) and found["observation"].dtype == "float32"
    assert found["observation"].per_frame == 16 and found["next.done"].device == "cpu"
    assert sum(entry.saved for entry in found.values()) == 0


def test_compact_saves_the_next_observation():
    found = lines(batch_entries(batch(), ["observation"]))
    assert found["next.observation"].bytes == 0
    assert found["next.observation"].saved == 16 * FRAMES
    assert found["next.observation"].note == "not stored"


def ends(count: int) -> Successors:
    """Of a batch in storage order; its last row is always one."""
    return Successors(torch.Size([N, T]), torch.arange(FRAMES - count, FRAMES, dtype=torch.int32))


def test_exact_holds_its_extra_rows_and_ends_and_saves_the_rest():
    td = batch()
    td["next", "observation"] = Rows.from_ends(td["observation"], ends(7), torch.zeros(7, 4))
    found = lines(batch_entries(td, ["observation"]))
    held = 7 * 16 + 7 * 4
    assert found["observation"].bytes == 16 * FRAMES
    assert found["next.observation"].bytes == held
    assert found["next.observation"].saved == 16 * FRAMES - held
    assert found["next.observation"].shape == (N, T, 4) and found["next.observation"].note == "exact"


def test_reading_the_ledger_builds_no_index():
    td = batch()
    td["next", "observation"] = rows = Rows.from_ends(td["observation"], ends(7), torch.zeros(7, 4))
    before = rows.nbytes_held
    for _ in range(2):
        assert lines(batch_entries(td))["next.observation"].bytes == before == rows.nbytes_held
    _ = rows.index
    assert lines(batch_entries(td))["next.observation"].bytes == before + 4 * FRAMES == rows.nbytes_held


def test_an_index_given_outright_is_counted():
    td = batch()
    index = torch.zeros(N, T, dtype=torch.int32)
    td["next", "observation"] = Rows(td["observation"], torch.zeros(7, 4), index)
    assert lines(batch_entries(td))["next.observation"].bytes == 7 * 16 + 4 * FRAMES


def test_ends_shared_by_two_observations_are_counted_once():
    shared = ends(7)
    td = TensorDict({"a": torch.zeros(N, T, 4), "b": torch.zeros(N, T, 2)}, [N, T])
    td["next", "a"] = Rows.from_ends(td["a"], shared, torch.zeros(7, 4))
    td["next", "b"] = Rows.from_ends(td["b"], shared, torch.zeros(7, 2))
    found = lines(batch_entries(td, ["a", "b"]))
    assert found["next.a"].bytes == 7 * 16 + 7 * 4 and found["next.b"].bytes == 7 * 8


def test_observations_kept_alive_only_by_their_successors_are_counted_there():
    td = batch()
    td["next", "observation"] = Rows.from_ends(td["observation"], ends(7), torch.zeros(7, 4))
    del td["observation"]
    assert lines(batch_entries(td))["next.observation"].bytes == 16 * FRAMES + 7 * 20


def test_keys_that_share_memory_are_counted_once():
    done = torch.zeros(N, T, 1, dtype=torch.bool)
    found = lines(batch_entries(TensorDict({"done": done, "next": {"done": done}}, [N, T])))
    assert sorted(entry.bytes for entry in found.values()) == [0, FRAMES]
    assert [entry.note for entry in found.values() if not entry.bytes] == ["shared with a key above"]


def test_overlapping_views_of_one_buffer_add_up_to_the_buffer():
    flat = torch.zeros(100)
    claims = Claims()
    assert [claims.claim(view) for view in (flat[10:30], flat[20:60], flat, flat[5:7])] == [80, 120, 200, 0]


def test_an_expanded_tensor_is_as_large_as_its_memory():
    assert Claims().claim(torch.zeros(1, 4).expand(1000, 4)) == 16
    assert Claims().claim(torch.zeros(0, 4)) == 0


def test_parameters_gradients_and_optimizer_state_are_counted():
    net = torch.nn.Linear(4, 8)  # 40 parameters
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.zeros(1, 4)).sum().backward()
    optimizer.step()
    found = lines(learner_entries({"actor": net, "again": net}, optimizer))
    assert found["parameters"].bytes == 160 and found["gradients"].bytes == 160
    assert found["optimizer"].bytes == 2 * 160 + 2 * 4  # two moments, a step count for each of two tensors


def test_flat_parameters_are_not_counted_beside_their_views():
    net = torch.nn.Linear(4, 8)
    flat = torch.zeros(40)
    net.weight.data, net.bias.data = flat[:32].view(8, 4), flat[32:]
    found = lines(learner_entries({"net": net}, {"params": flat, "m": torch.zeros(40)}))
    assert found["parameters"].bytes + found["optimizer"].bytes == 320


def test_peaks_keep_the_largest_reading():
    ledger = Ledger()
    ledger.read(batch_entries(TensorDict({"a": torch.zeros(2, 8)}, [2])))
    ledger.read(batch_entries(TensorDict({"a": torch.zeros(2, 4)}, [2])))
    assert ledger.component("rollout").bytes == 32 and ledger.component("rollout").peak == 64


def test_reading_keeps_no_reference_to_the_batch():
    import sys

    column = torch.zeros(4, 4)
    td = TensorDict({"a": column}, [4])
    before = sys.getrefcount(column)
    ledger = Ledger()
    ledger.read(batch_entries(td))
    assert sys.getrefcount(column) == before


def test_the_views_rows_fold_the_ledger_without_losing_a_byte():
    ledger = Ledger()
    learner = learner_entries({"net": torch.nn.Linear(4, 2)})
    ledger.read([*batch_entries(batch(), ["observation"]), *learner])
    rows = memory_rows(ledger, ["observation"], {"process": {"now": 10, "peak": 20}}, "compact")
    assert [row.label for row in rows] == [
        "obs",
        "next.obs compact",
        "rest of batch",
        "params+optim",
        "process RSS",
    ]
    assert sum(row.now for row in rows[:-1]) == sum(entry.bytes for entry in ledger.entries)
    assert sum(row.saved or 0 for row in rows) == ledger.saved == 16 * FRAMES


def test_the_process_peak_is_at_least_what_it_holds():
    now, peak = process_memory()
    assert 1 << 20 < now <= peak


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's high-water mark")
def test_a_peak_that_passed_is_remembered():
    before = process_memory()[0]
    with mmap.mmap(-1, 64 << 20) as block:  # of the system's: an allocator may have as much to spare
        block.write(b"1" * (64 << 20))
    assert process_memory()[1] >= before + (60 << 20)
