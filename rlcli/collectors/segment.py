"""The loop of a policy and envs on one device: the host orders its steps, and reads nothing before a segment is over.

Noise goes there once a segment, and so does where each episode stands: seeds of the next ones are made there, and at
every step a mask resets the envs that finished.  Then rows, rewards, ends and the true last observations come back, and
what is delivered is what single steps give.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from rlcli.collectors.actors.rows import BoundActor, BoundFastActor
from rlcli.collectors.batch import Columns
from rlcli.collectors.devices import same_device
from rlcli.collectors.loop import BoundBatch
from rlcli.errors import NumericsError
from rlcli.keys import Key
from rlcli.specs.dtypes import torch_dtype
from rlcli.vec_envs.episodes import env_raised

STEPS = 32  # of a segment at most: the device holds its rows twice


class DeviceSegment:
    """Memory of one segment on the device of `vec_env`; `names` are those of the rows of its observations."""

    def __init__(self, bound: BoundFastActor, columns: Columns, vec_env: Any, names: Mapping[Key, Key]) -> None:
        self.vec_env, self.engine, self.actor = vec_env, vec_env.engine, bound.actor
        self.size, self.device = min(columns.steps, STEPS), vec_env.device
        n, actor = vec_env.n, bound.actor
        self.names = [names[leaf.key] for leaf in vec_env.leaves]
        self.after = [self._memory(leaf.shape, torch_dtype(leaf.stored)) for leaf in vec_env.leaves]
        self.rows = [self._memory(leaf.shape, torch_dtype(leaf.stored), 1) for leaf in vec_env.leaves]
        self.written = {key: self._memory(actor.written[key][0], torch.float32) for key in bound.kept}
        self.taken = self._memory(actor.actions.shape, torch_dtype(actor.taken))
        self.flags = torch.empty(2, self.size, n, dtype=torch.bool, device=self.device)
        self.send, self.lanes = self.engine.sender(actor.actions), torch.arange(n, device=self.device)
        self.on = {name: list(rows) for name, rows in zip(self.names, self.rows, strict=True)}
        self.on |= {key: list(rows) for key, rows in self.written.items()}
        for key in actor.written.keys() - self.written.keys():  # nobody wants these
            self.on[key] = [torch.empty(n, *actor.written[key][0], device=self.device)] * self.size
        self.seen: Any = None

    def _memory(self, shape: tuple[int, ...], dtype: torch.dtype, more: int = 0) -> Tensor:
        return torch.empty(self.size + more, self.vec_env.n, *shape, dtype=dtype, device=self.device)

    def run(self, batch: BoundBatch, bound: BoundFastActor, steps: Iterable[int], keep_finals: bool) -> int:
        """Take these steps of a leg that has begun, at least one; the step after them."""
        if self.seen != (bound.version, bound.seen):
            self.seen, self.forward = (bound.version, bound.seen), bound.in_turn(self.on)
        if bound.on_device is not None:
            bound.on_device.first = -1  # it keeps none of these rows
        for key, scale in bound.scales.items():
            self.written[key][...] = scale.value().detach()
        self.keep_finals, begun, t = keep_finals, -1, -1
        for t in steps:
            if begun < 0:
                begun = t
                self._begin(batch.columns, bound, t)
            self._step(bound, t - begun)
            if t + 1 - begun == self.size:
                self._take(batch, bound, begun, self.size)
                begun = -1
        if begun >= 0:
            self._take(batch, bound, begun, t + 1 - begun)
        return t + 1

    def _begin(self, columns: Columns, bound: BoundFastActor, t: int) -> None:
        """Bring the device what a segment from step t on begins with."""
        for name, rows in zip(self.names, self.rows, strict=True):
            rows[0].copy_(torch.from_numpy(columns.rows[name][t]))
        book, clock = self.vec_env, self.vec_env.clock[0]
        left = [deadline - clock for deadline in book.deadlines]
        standing = torch.tensor([book.episodes, left, book.limits]).to(self.device)
        self.episodes, self.left, self.limits = standing.unbind(0)
        self.rewards: list[Tensor] = []
        self.noise = None
        if bound.drawn is not None:
            noise = np.stack(list(bound.noise[t - bound.first : t - bound.first + self.size]))
            self.noise = torch.from_numpy(noise).to(self.device)

    def _step(self, bound: BoundFastActor, i: int) -> None:
        vec_env, function = self.vec_env, self.actor.function
        self.forward(i)
        params = tuple(self.written[key][i] for key in function.param_keys)
        family = function.family
        self.taken[i].copy_(family.mode(params) if self.noise is None else family.draw(params, self.noise[i]))
        terminated, truncated = self.flags[0, i], self.flags[1, i]
        try:
            vec_env.clock[0] += 1
            parts, reward, over, cut = self.engine.advance(self.send(self.taken[i]))
            self.rewards.append(reward.clone())  # an env may reuse its own
            self.left = self.left - 1
            terminated.copy_(over)
            torch.logical_or(cut, self.left <= 0, out=truncated)
            done = terminated | truncated
            for after, part in zip(self.after, parts, strict=True) if self.keep_finals else ():
                after[i].copy_(part)
            self.episodes = self.episodes + done
            self.left = torch.where(done, self.limits, self.left)
            vec_env.during = "reset"
            first = self.engine.begin(done, vec_env.seed_of(self.lanes, self.episodes))
            vec_env.during = "step"
        except BaseException as error:
            raise env_raised(vec_env, error, None, vec_env.during) from error
        spread = [done.view(-1, *[1] * (part.ndim - 1)) for part in parts]
        self.shown = [torch.where(mask, new, part) for mask, new, part in zip(spread, first, parts, strict=True)]
        for rows, part in zip(self.rows, self.shown, strict=True):
            rows[i + 1].copy_(part)

    def _take(self, batch: BoundBatch, bound: BoundFastActor, begun: int, steps: int) -> None:
        """Read what a segment of so many steps left: rows, rewards, ends."""
        vec_env, outcome, columns, end = self.vec_env, self.vec_env.outcome, batch.columns, begun + steps
        flags = self.flags[:, :steps].cpu().numpy()
        for name, rows in zip(self.names, self.rows, strict=True):
            target, source = columns.rows[name], rows[1 : steps + 1].cpu().numpy()
            for i in range(steps):
                np.copyto(target[begun + i + 1], source[i])
        bound.taken[begun:end] = taken = self.taken[:steps].cpu().numpy()
        for key, written in self.written.items():
            bound.kept[key][begun:end] = written[:steps].cpu()
        self._check(batch, bound, begun, end)
        outcome.reward_rows += list(torch.stack(self.rewards).cpu().numpy().astype(np.float64))
        send, dtype = vec_env.actions.array_sender(), vec_env.actions.dtype
        vec_env.history += [np.asarray(send(row), dtype) for row in taken.astype(dtype)]
        vec_env.show(self.engine.tree(self.shown))
        when, lanes = np.nonzero(flags[0] | flags[1])
        if len(when):
            ends = [(begun + when).tolist(), lanes.tolist(), *(flag[when, lanes].tolist() for flag in flags)]
            outcome.ends += zip(*ends, strict=True)
            if self.keep_finals:
                at = [torch.from_numpy(place).to(self.device) for place in (when, lanes)]
                last = {name: after[*at].cpu().numpy() for name, after in zip(self.names, self.after, strict=True)}
                batch.finals.add(list(zip(*ends[:2], strict=True)), last)
            clock = vec_env.clock[0] - steps + 1
            for i in np.unique(when).tolist():
                vec_env.begin_episodes(lanes[when == i].tolist(), clock + i)

    def _check(self, batch: BoundBatch, bound: BoundFastActor, begun: int, end: int) -> None:
        """Refuse parameters that no action can be drawn from; the envs went on meanwhile."""
        function = self.actor.function
        params = tuple(bound.kept[key][begun:end].flatten(0, 1).numpy() for key in function.param_keys)
        if function.family.is_legal(params):
            return
        t = next(t for t in range(begun, end) if not function.family.is_legal(bound.param_rows[t]))
        try:
            bound.check_odd(t, f"seen after step {end - 1}")
        except NumericsError as error:
            batch.blame(error, t)
            raise


def fits(bound: BoundActor, vec_env: Any) -> TypeGuard[BoundFastActor]:
    """Say whether what acts on rows can act on the device of `vec_env`, whose rows nothing else writes in the loop."""
    if not isinstance(bound, BoundFastActor) or bound.actor.calls or bound.states:
        return False
    policy = bound.actor.setting.placement.policy or torch.device("cpu")
    return same_device(policy, vec_env.device) and not any(leaf.choices for leaf in vec_env.leaves)
