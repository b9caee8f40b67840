"""An env whose every value is written down beforehand, and the three ways to run transforms on it.

The script knows, for every step of every lane, the true successor, the reward, both flags, and the reset
state that would follow; so the TensorDict face, the row face and the batch pass see exactly the same world.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict

from rlcli.transforms import choose_faces

FLAGS = ("done", "terminated", "truncated")


@dataclass
class Script:
    """`first` [N, *], `successor` and `restart` [S, N, *], `reward` [S, N, 1], flags [S, N, 1]."""

    first: np.ndarray
    successor: np.ndarray
    restart: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    memory: np.ndarray  # [S, N, 2], what a policy with a memory writes under `("next", "hidden")`

    @property
    def lanes(self) -> int:
        return self.first.shape[0]

    @property
    def steps(self) -> int:
        return self.successor.shape[0]


def write_script(*, batch: int, batches: int = 3, shape=(4,), dtype=np.float32, end_rate=0.15, seed=0) -> Script:
    """Three lanes; ends at step 0, at a batch's last step and the next one's first, one-step episodes."""
    rng = np.random.default_rng(seed)
    steps, lanes = batch * batches, 3

    def values(*lead):
        if np.dtype(dtype).kind == "u":
            return rng.integers(0, 256, (*lead, *shape), dtype)
        return rng.normal(3.0, 20.0, (*lead, *shape)).astype(dtype)

    terminated = rng.random((steps, lanes, 1)) < end_rate
    truncated = rng.random((steps, lanes, 1)) < end_rate
    terminated[0, 0] = truncated[batch - 1, 1] = terminated[batch, 1] = truncated[batch, 1] = True
    terminated[batch : batch + 3, 2] = True
    reward = rng.normal(0.3, 1.0, (steps, lanes, 1)).astype(np.float32)
    reward[rng.random(reward.shape) < 0.2] = -0.0
    return Script(
        values(lanes),
        values(steps, lanes),
        values(steps, lanes),
        reward,
        terminated,
        truncated,
        rng.random((steps, lanes, 2), np.float32),
    )


def run_tensordicts(script: Script, transform, batch: int, at_batch_start=None) -> list[TensorDict]:
    """Batches `[N, T]` made step by step through `_step` and `_reset`."""
    n = script.lanes

    def state(values):
        return TensorDict({"observation": torch.from_numpy(values.copy())}, batch_size=[n])

    if at_batch_start:
        at_batch_start(transform)
    root = transform._reset(None, state(script.first))
    batches, steps = [], []
    for t in range(script.steps):
        if t and t % batch == 0 and at_batch_start:
            at_batch_start(transform)
        following = state(script.successor[t])
        following["reward"] = torch.from_numpy(script.reward[t].copy())
        following["terminated"] = torch.from_numpy(script.terminated[t].copy())
        following["truncated"] = torch.from_numpy(script.truncated[t].copy())
        following["done"] = following["terminated"] | following["truncated"]
        if "hidden" in root:
            following["hidden"] = torch.from_numpy(script.memory[t].copy())
        following = transform._step(root, following)
        step = root.select(*[k for k in root.keys(True, True) if k not in FLAGS]).clone()
        steps.append(step.set("next", following.clone()))
        root = following.exclude("reward")
        if following["done"].any():
            mask = following["done"].clone()
            raw, lanes = script.successor[t].copy(), mask.numpy()[:, 0]
            raw[lanes] = script.restart[t][lanes]
            fresh = transform._reset(root, state(raw).set("_reset", mask)).exclude("_reset")
            root = torch.where(mask.squeeze(-1), fresh, root.select(*fresh.keys(True, True)))
        if len(steps) == batch:
            batches.append(torch.stack(steps, 1))
            steps = []
    return batches


def run_columns(script: Script, transform, batch: int, *, live=()) -> list[dict]:
    """Batches of columns `[N, T, *]` made by the collector's loop; `live` decides what runs inside it."""
    n, kind = script.lanes, (script.first.shape[1:], script.first.dtype)
    schema = {"observation": kind, ("next", "reward"): ((1,), np.dtype(np.float32))}
    faces = choose_faces(transform, schema, live)
    entry = faces.env_keys["observation"]
    carrier = {key: np.zeros((n, *shape), dtype) for key, (shape, dtype) in faces.rows.items()}
    batches = []
    for start in range(0, script.steps, batch):
        cols = {key: np.zeros((n, batch, *shape), dtype) for key, (shape, dtype) in faces.rows.items()}
        rows = {key: [*np.moveaxis(col, 1, 0), carrier[key]] for key, col in cols.items()}
        nexts = {key: np.zeros_like(col) for key, col in cols.items()}
        flags = {("next", name): np.zeros((n, batch, 1), bool) for name in FLAGS}
        rewards = script.reward[start : start + batch].swapaxes(0, 1).copy()
        rows["next", "reward"] = list(np.moveaxis(rewards, 1, 0))
        for key in faces.rows:
            rows[key][0][...] = carrier[key]
        ops = faces.bind(rows, n)
        fresh = np.full(n, start == 0)
        for op in ops:
            op.begin()
        if start == 0:
            rows[entry][0][...] = script.first
            for op in ops:
                op.reset(0, list(range(n)))
        for t in range(batch):
            now = start + t
            rows[entry][t + 1][...] = script.successor[now]
            if "hidden" in rows:
                rows["hidden"][t + 1][...] = script.memory[now]
            cut = [lane for op in ops for lane in (op.step(t + 1) or ())]
            flags["next", "terminated"][:, t] = script.terminated[now]
            flags["next", "truncated"][:, t] = script.truncated[now]
            flags["next", "truncated"][cut, t] = True
            done = flags["next", "done"][:, t]
            done[...] = flags["next", "terminated"][:, t] | flags["next", "truncated"][:, t]
            for key in faces.rows:
                nexts[key][:, t] = rows[key][t + 1]
            lanes = np.flatnonzero(done).tolist()
            if lanes:
                rows[entry][t + 1][lanes] = script.restart[now][lanes]
                for op in ops:
                    op.reset(t + 1, lanes)
        for op in ops:
            op.end()
        cols |= {("next", *([k] if isinstance(k, str) else k)): col for k, col in nexts.items()} | flags
        cols["next", "reward"] = rewards
        for late in faces.after:
            late.batch_pass(cols, fresh)
        batches.append({k: c for k, c in cols.items() if "_raw" not in str(k)})
    return batches


def assert_same(columns: list[dict], tensordicts: list[TensorDict]) -> None:
    """Every key of both, bit for bit, signs of zeros too."""
    assert len(columns) == len(tensordicts)
    for cols, td in zip(columns, tensordicts, strict=True):
        assert set(cols) == set(td.keys(True, True))
        for key, col in cols.items():
            value = td.get(key).numpy()
            assert value.dtype == col.dtype and value.shape == col.shape, key
            assert np.ascontiguousarray(value).tobytes() == np.ascontiguousarray(col).tobytes(), key
