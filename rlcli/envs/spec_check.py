"""`check_env_specs`: whether an env gives what its specs say, step by step and across resets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.arguments import refuse
from rlcli.envs.base import EnvBase
from rlcli.envs.mdp import step_mdp
from rlcli.errors import EnvError
from rlcli.keys import DONE, END_FLAGS, RESET, Key, show, under_next, unravel
from rlcli.specs import Composite, TensorSpec


def check_env_specs(
    env: EnvBase,
    return_contiguous: bool | None = None,
    check_dtype: bool = True,
    seed: int | None = None,
    tensordict: TensorDictBase | None = None,
    break_when_any_done: bool | str | None = None,
    *,
    steps: int = 10,
) -> None:
    """Play random actions and compare what the env gives with its specs. For tests: it moves the env on.

    Looked at are the reset, `steps` steps with the resets between them, a reset half-way, for batched envs one of the
    first env alone, and a rollout: keys, shapes, dtypes and legal values; that a step begins with the observation at
    which the one before it ended; and that what was handed out stays as it was.

    Parameters
    ----------
    env : EnvBase
    return_contiguous : bool, optional
        Nothing: rows of a rollout are always stacked.
    check_dtype : bool
        False lets every dtype pass.
    seed : int, optional
        Of the env and, while this runs, of torch's random actions.
    tensordict : TensorDict, optional
        Handed to the first reset.
    break_when_any_done : bool or "both", optional
        Whether the rollout ends with an episode; by default, and with "both", one that does and one that does not.
    steps : int

    Raises
    ------
    EnvError
        With the first difference: what was expected, what came, and at which step.
    """
    with contextlib.ExitStack() as stack:
        if seed is not None:
            stack.enter_context(torch.random.fork_rng())
            torch.manual_seed(seed)
            env.set_seed(seed)
        check = _Check(env, check_dtype)
        td = check.reset("the reset", env.reset(tensordict))
        for number in range(steps):
            if number == steps // 2:
                td = check.reset(f"the reset after step {number}", env.reset())
                td = check.partial_reset(td)
            td = check.step(f"step {number + 1}", td)
        both = (True, False)
        for stops in both if break_when_any_done in (None, "both") else (bool(break_when_any_done),):
            check.rollout(env.rollout(max(steps, 1), break_when_any_done=stops))


class _Check:
    """Hold what is expected of one env, by its specs and by the layout of one step (`fake_tensordict`)."""

    def __init__(self, env: EnvBase, check_dtype: bool) -> None:
        self.env, self.check_dtype = env, check_dtype
        self.fake = env.fake_tensordict()
        self.observed = _keys(env.full_observation_spec)
        self.states = _keys(env.full_state_spec)
        self.flags = _keys(env.full_done_spec)
        self.carried: set[Key] = {under_next(key) for key in self.states}  # a step may write its state, or not
        self.layout = [key for key in _keys(self.fake) if key not in self.carried]
        self.specs: dict[Key, TensorSpec] = {}
        for spec in (env.full_observation_spec, env.full_state_spec, env.full_done_spec, env.full_action_spec):
            self.specs |= {unravel(key): leaf for key, leaf in spec.items(True, True)}
        for spec in (env.full_observation_spec, env.full_state_spec, env.full_done_spec, env.full_reward_spec):
            self.specs |= {under_next(key): leaf for key, leaf in spec.items(True, True)}

    def reset(self, when: str, td: TensorDictBase) -> TensorDictBase:
        """Check the root: observations, states and flags, nothing else, and no episode over."""
        self._same_keys(when, _keys(td), {*self.observed, *self.states, *self.flags})
        self._legal(when, td)
        self._not_over(when, td, torch.ones_like(td.get(self.flags[0])))
        return td

    def partial_reset(self, td: TensorDictBase) -> TensorDictBase:
        """Check a reset of the first of several envs alone."""
        if not self.env.batch_size:
            return td
        stepped = self.env.rand_step(td)
        td = step_mdp(stepped)
        self.env._promoted(stepped, td)
        first = torch.zeros(*self.env.batch_size, 1, dtype=torch.bool, device=self.env.device)
        first.view(-1)[0] = True
        when, over = "a reset of the first env alone", td.get("done").clone()
        out = self.env.reset(td.clone(False).set(RESET, first))
        self._legal(when, out)
        self._not_over(when, out, first)
        return self.env.maybe_reset(out.set("done", over & ~first))

    def step(self, when: str, td: TensorDictBase) -> TensorDictBase:
        """Check a step with a random action: its layout, its flags, and the root of the next one."""
        given = {key: (x, x.clone()) for key in self.observed if (x := td.get(key, None)) is not None}
        stepped, following = self.env.step_and_maybe_reset(self.env.rand_action(td))
        for key, (x, before) in given.items():
            changed = not _equal(x, before, torch.ones_like(stepped.get(DONE)))
            why = f"it changed the {show(key)} that it had given before"
            self._refuse(changed, when, why, "Give a new tensor at every step.")
        self._same_keys(when, [key for key in _keys(stepped) if key not in self.carried], self.layout)
        self._legal(when, stepped)
        done = stepped.get(DONE)
        for key in self.observed:
            after = stepped.get(under_next(key), None)
            odd = after is not None and not _equal(following.get(key), after, ~done)
            self._refuse(odd, when, f"the step after it does not begin with its next.{show(key)}")
        self._not_over(f"the root after {when}", following, done)
        return following

    def rollout(self, rows: TensorDictBase) -> None:
        """Check that all rows are in the layout of one step."""
        for key in self.layout:
            x, one, dims = rows.get(key), self.fake.get(key), rows.ndim
            shape = (*rows.shape, *one.shape[dims - 1 :])
            self._refuse(x.shape != shape, "a rollout", f"{show(key)} has shape {tuple(x.shape)}, not {shape}")

    # ---- parts -------------------------------------------------------------------------------------------------
    def _same_keys(self, when: str, keys: Iterable[Key], expected: Iterable[Key]) -> None:
        keys, expected = list(keys), list(expected)
        lost = [show(key) for key in expected if key not in keys]
        more = [show(key) for key in keys if key not in expected]
        named, fix = f"it gives no {', '.join(lost)}, which the specs name", "Write it, or take it out of the specs."
        self._refuse(lost, when, named, fix)
        fix = "Add it to observation_spec, or leave it out."
        self._refuse(more, when, f"it gives {', '.join(more)}, which no spec names", fix)

    def _legal(self, when: str, td: TensorDictBase) -> None:
        for key, spec in self.specs.items():
            x = td.get(key, None)
            if x is None:
                continue
            shapes = f"expected shape {tuple(spec.shape)}, got {tuple(x.shape)}"
            self._refuse(x.shape != spec.shape, when, f"{show(key)}: {shapes}")
            why = spec.mismatch(x if self.check_dtype else x.to(spec.dtype))
            self._refuse(why is not None, when, f"{show(key)}: {why}")

    def _not_over(self, when: str, td: TensorDictBase, fresh: Tensor) -> None:
        over = [name for name in END_FLAGS if bool((td.get(name) & fresh).any())]
        self._refuse(over, when, f"{' and '.join(over)} is True in an episode that has just begun")

    def _refuse(self, condition: object, when: str, why: str, fix: str | None = None) -> None:
        where = f"{type(self.env).__name__}, {when}"
        refuse(condition, "the env does not give what its specs say", where=where, why=why, fix=fix, error=EnvError)


def _keys(td: Composite | TensorDictBase) -> list[Key]:
    return [unravel(key) for key in td.keys(True, True)]  # type: ignore[arg-type]


def _equal(a: Tensor, b: Tensor, rows: Tensor) -> bool:
    """Return True if both `[*batch, *F]` are the same where `rows` `[*batch, 1]`; NaN equals NaN."""
    where = rows.reshape((*rows.shape[:-1], *[1] * (a.ndim - rows.ndim + 1))).expand_as(a)
    same = (a == b) | ((a != a) & (b != b))
    return bool((same | ~where).all())
