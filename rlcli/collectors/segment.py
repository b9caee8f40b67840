"""The loop of a policy and envs on one device: the host orders its steps, and reads nothing before a segment is over.

Noise goes there once a segment, and so does where each episode stands: seeds of the next ones are made there, and at
every step a mask resets the envs that finished.  Then actions, rewards, ends and the true last observations come back,
and all other rows, unless the batch is to lie there: then they stay.  What is delivered is what single steps give.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from rlcli.collectors.actors.rows import BoundActor, BoundFastActor
from rlcli.collectors.batch import Columns, KeptRows
from rlcli.collectors.devices import same_device
from rlcli.data.next_obs.modes import places_of_ends
from rlcli.errors import NumericsError
from rlcli.graphs.static import sent
from rlcli.keys import ACTION, DONE, END_FLAGS, REWARD, TERMINATED, TRUNCATED, Key, under_next
from rlcli.specs.dtypes import torch_dtype
from rlcli.vec_envs.episodes import env_raised

STEPS = 32  # of a segment at most: the device holds its rows twice


class DeviceSegment:
    """Memory of one segment on the device of `vec_env`; `names` are those of the rows of its observations."""

    def __init__(
        self, bound: BoundFastActor, columns: Columns, vec_env: Any, names: Mapping[Key, Key], bounded: Container[Key]
    ) -> None:  # fmt: skip
        self.vec_env, self.engine, self.actor = vec_env, vec_env.engine, bound.actor
        self.size, self.device = min(columns.steps, STEPS), vec_env.device
        n, actor = vec_env.n, bound.actor
        self.names = [names[leaf.key] for leaf in vec_env.leaves]
        self.bounded = bounded  # of these, those which the host looks at
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
        self.at: Any = None  # where the envs were when the last rows were written, `steps` of them
        self.steps = 0
        self.stays: dict[Key, Tensor] | None = None  # columns, where these are to lie here
        self.last: list[dict[Key, Tensor]] = []  # true next observations of ends

    def _memory(self, shape: tuple[int, ...], dtype: torch.dtype, more: int = 0) -> Tensor:
        return torch.empty(self.size + more, self.vec_env.n, *shape, dtype=dtype, device=self.device)

    def run(
        self, columns: Columns, finals: KeptRows, blame: Callable[[NumericsError, int], None], bound: BoundFastActor,
        steps: Iterable[int], keep_finals: bool, moves: bool,
    ) -> int:  # fmt: skip
        """Take these steps of a leg that has begun, at least one; the step after them."""
        place = bound.actor.setting.placement
        stays = moves and place.storing_is_elsewhere and place.storing == self.device
        self.stays, self.last, self.finals, self.blame = {} if stays else None, [], finals, blame
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
                self._begin(columns, bound, t)
            self._step(bound, t - begun)
            if t + 1 - begun == self.size:
                self._take(columns, bound, begun, self.size)
                begun = -1
        if begun >= 0:
            self._take(columns, bound, begun, t + 1 - begun)
        shown = self.engine.tree(self.shown)
        self.vec_env.show(shown)
        for leaf, name in zip(self.vec_env.leaves, self.names, strict=True):
            np.copyto(columns.rows[name][t + 1], leaf.find(shown), casting="same_kind")
        return t + 1

    def _begin(self, columns: Columns, bound: BoundFastActor, t: int) -> None:
        """Bring the device what a segment from step t on begins with."""
        book, clock = self.vec_env, self.vec_env.clock[0]
        left = [deadline - clock for deadline in book.deadlines]
        up: dict[Any, Tensor] = {"standing": torch.tensor([book.episodes, left, book.limits])}
        if bound.drawn is not None:
            up["noise"] = torch.from_numpy(np.stack(bound.noise[t - bound.first : t - bound.first + self.size]))
        if self.at != book.moved():  # somebody else stepped them, or reset some
            up |= {(name,): torch.from_numpy(columns.rows[name][t]) for name in self.names}
        got = sent(up, self.device)
        for name, rows in zip(self.names, self.rows, strict=True):
            rows[0].copy_(got.get((name,), rows[self.steps]))
        self.episodes, self.left, self.limits = got["standing"].unbind(0)
        self.rewards: list[Tensor] = []
        self.noise = got.get("noise")

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

    def _take(self, columns: Columns, bound: BoundFastActor, begun: int, steps: int) -> None:
        """Read what the host has to know of a segment of so many steps."""
        vec_env, outcome, end = self.vec_env, self.vec_env.outcome, begun + steps
        flags, rewards, self.steps = self.flags[:, :steps].cpu().numpy(), torch.stack(self.rewards), steps
        bound.taken[begun:end] = taken = self.taken[:steps].cpu().numpy()
        if self.stays is not None and not self._stay(columns.data, bound, begun, rewards):
            for key, column in self.stays.items():  # something is not finite: the host looks at all of it
                columns.data[key][:, :begun] = column[:, :begun].cpu()
            self.stays = None
        for name, rows in zip(self.names, self.rows, strict=True):
            if self.stays is None or name in self.bounded:
                for i, row in enumerate(rows[: steps + 1].cpu().numpy()):
                    np.copyto(columns.rows[name][begun + i], row)
        if self.stays is None:
            for key, written in self.written.items():
                bound.kept[key][begun:end] = written[:steps].cpu()
            self._check(bound, begun, end)
            bound.end(begun, end)
        outcome.reward_rows += list(rewards.cpu().numpy().astype(np.float64))
        send, dtype = vec_env.actions.array_sender(), vec_env.actions.dtype
        vec_env.history += [np.asarray(send(row), dtype) for row in taken.astype(dtype)]
        when, lanes = np.nonzero(flags[0] | flags[1])
        if len(when):
            ends = [(begun + when).tolist(), lanes.tolist(), *(flag[when, lanes].tolist() for flag in flags)]
            outcome.ends += zip(*ends, strict=True)
            if self.keep_finals:
                at = (self.flags[0, :steps] | self.flags[1, :steps]).nonzero(as_tuple=True)
                self.last.append({name: after[*at] for name, after in zip(self.names, self.after, strict=True)})
                last = {name: x.cpu().numpy() for name, x in self.last[-1].items()}
                self.finals.add(list(zip(*ends[:2], strict=True)), last)
            clock = vec_env.clock[0] - steps + 1
            for i in np.unique(when).tolist():
                vec_env.begin_episodes(lanes[when == i].tolist(), clock + i)
        self.at = vec_env.moved()

    def _stay(self, data: dict[Key, np.ndarray], bound: BoundFastActor, begun: int, rewards: Tensor) -> bool:
        """Write a segment's columns where the batch is to lie, if all that was computed is finite."""
        steps, function, actions = self.steps, self.actor.function, self.actor.actions
        found = {key: x[:steps] for key, x in self.written.items()}
        taken = self.taken[:steps]
        found |= bound.concluded([found[key] for key in function.param_keys], taken)
        rows = [x[: steps + 1] for x in self.rows] + [x[:steps] for x in self.after if self.keep_finals]
        if not torch.stack([x.isfinite().all() for x in (taken, *found.values(), *rows)]).all().item():
            return False
        if actions.encoded:
            parts = taken.reshape(steps, self.vec_env.n, -1).unbind(-1)
            taken = torch.cat([one_hot(part.long(), n) for part, n in zip(parts, actions.nvec, strict=True)], -1)
        over, cut = self.flags[:, :steps, :, None]
        found |= {name: x[:steps] for name, x in zip(self.names, self.rows, strict=True)}
        found |= {ACTION: taken, REWARD: rewards[..., None], TERMINATED: over, TRUNCATED: cut, DONE: over | cut}
        found |= dict.fromkeys(END_FLAGS, torch.zeros_like(over))
        assert self.stays is not None
        for key in found.keys() & data.keys():
            if key not in self.stays:
                self.stays[key] = torch.empty_like(torch.from_numpy(data[key]), device=self.device)
            self.stays[key][:, begun : begun + steps].copy_(found[key].transpose(0, 1))
        return True

    def there(self, steps: int, keys: Container[Key]) -> dict[Key, Tensor]:
        """Return the columns of a batch that lie here, and the next observations of its ends."""
        there, last, self.stays, self.last = self.stays, self.last, None, []
        if there is None:
            return {}
        there = {key: x[:, :steps].contiguous() for key, x in there.items()}
        order = places_of_ends(self.vec_env.n, steps, self.finals.places)[1] if self.keep_finals else None
        at = None if order is None else sent({"at": torch.from_numpy(order)}, self.device)["at"]
        for name, rows in zip(self.names, self.rows, strict=True):
            ends = torch.cat([rows[self.steps], *(parts[name] for parts in last)])
            there[under_next(name)] = ends if at is None else ends[at]
        return there

    def _check(self, bound: BoundFastActor, begun: int, end: int) -> None:
        """Refuse parameters that no action can be drawn from; the envs went on meanwhile."""
        function = self.actor.function
        params = tuple(bound.kept[key][begun:end].flatten(0, 1).numpy() for key in function.param_keys)
        if function.family.is_legal(params):
            return
        t = next(t for t in range(begun, end) if not function.family.is_legal(bound.param_rows[t]))
        try:
            bound.check_odd(t, f"seen after step {end - 1}")
        except NumericsError as error:
            self.blame(error, t)
            raise


def fits(bound: BoundActor, vec_env: Any) -> TypeGuard[BoundFastActor]:
    """Say whether what acts on rows can act on the device of `vec_env`, whose rows nothing else writes in the loop."""
    if not isinstance(bound, BoundFastActor) or bound.actor.calls or bound.states:
        return False
    policy = bound.actor.setting.placement.policy or torch.device("cpu")
    return same_device(policy, vec_env.device) and not any(leaf.choices for leaf in vec_env.leaves)
