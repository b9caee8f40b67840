"""`python -m tests.bench processes`: envs in worker processes, ours and others', and what several cores could give.

Ours are stepped as a run steps them, by a collector that stores every frame, with random actions; the others by their
own `step`, and nothing is stored.  The floor is that of processes which step bare envs and do not speak to each other.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from rlcli.bench.harness import Report, Side, fill, ratio
from rlcli.bench.settings import env_problems
from rlcli.bench.workers import processes
from rlcli.collectors import Collector, MultiSyncCollector
from rlcli.envs import GymEnv, ParallelEnv, SerialEnv
from rlcli.errors import NumericsError
from rlcli.modules import build_actor_critic
from rlcli.processes.process import cores
from rlcli.vec_envs.make import GymRecipe
from rlcli.vec_envs.workers import dealt
from tests.bench.bare_processes import Independent, busy
from tests.bench.peers import processes as peers

CARTPOLE = "CartPole-v1"
SERIAL, COLLECTOR = "rlcli serial", "rlcli collector"
GYMNASIUM, SB3, TORCHRL, MULTI_SYNC = "gymnasium async", "SB3 subproc", "torchrl parallel", "torchrl 2 collectors"
BARS = {GYMNASIUM: ">= 10", SB3: ">= 10", TORCHRL: ">= 40"}
Ours = Collector | MultiSyncCollector
AS_IN_A_RUN: dict[str, Any] = {"next_obs": "exact", "seed": 0, "track_traj_ids": False}  # each frame is stored once
HELD, STEPS = 100, 128  # the env cost that has a bar, microseconds; the most steps of an env in one call of a side


def measure(settings: dict[str, Any]) -> Report:
    """Run the comparisons, in each of which the sides take turns."""
    report = Report("processes", settings, unit="step of one env")
    _Comparison(report, GymRecipe(CARTPOLE), "CartPole").with_peers()
    for cost in settings["costs"]:
        _Comparison(report, busy(cost), f"{cost} us").with_floor(cost, ">= 0.9" if cost == HELD else "")
    pong = settings["pong"]
    if pong and (problems := env_problems(pong)):
        report.notes.append(f"pong={pong} is left out: {problems[0]}")
    elif pong:
        _Comparison(report, GymRecipe(pong), pong.removeprefix("ALE/")).with_floor(250, ">= 0.9")
    _Comparison(report, GymRecipe(CARTPOLE), "CartPole, 2x64 net").of_collectors()
    report.notes.append(f"{settings['env.num']} envs, {cores()} cores")
    return report


def calling(workers: int) -> str:
    """Return the name of a ParallelEnv whose caller steps a share of the envs beside so many workers."""
    return f"rlcli caller + {apart(workers).removeprefix('rlcli ')}"


def apart(workers: int) -> str:
    """Return the name of one whose caller waits."""
    return f"rlcli {workers} worker{'s' * (workers != 1)}"


def collecting(workers: int) -> str:
    return f"rlcli {workers} collectors"


class _Comparison:
    def __init__(self, report: Report, recipe: GymRecipe, label: str) -> None:
        self.report, self.settings, self.recipe = report, report.settings, recipe
        self.num = self.settings["env.num"]
        self.label = label
        self.make = partial(GymEnv, recipe, categorical_action_encoding=True, narrow=True)
        self.shares = processes(self.num)
        self.most = self.shares[-1]  # processes that step at the same time

    # ---- what is compared ----------------------------------------------------------------------------------------
    def with_peers(self) -> None:
        """Our ways against other frameworks'."""
        steps = STEPS
        with ExitStack() as stack:
            others = {GYMNASIUM: peers.gymnasium_async(CARTPOLE, self.num)}
            stack.callback(others[GYMNASIUM].close)  # forked before there are pipes of ours that they would hold open
            for name, make in {SB3: peers.sb3_subproc, TORCHRL: peers.torchrl_parallel}.items():
                if peer := self.report.peer(name.split()[0], make, CARTPOLE, self.num):
                    others[name] = peer
                    stack.callback(peer.close)
            sides = {name: partial(peer.step, steps) for name, peer in others.items()}
            timed = self._timed(sides | self._ours(stack, steps), steps)
            for name in others:
                self._ratio(timed, name, calling(self.most - 1), BARS[name])
                self._ratio(timed, name, apart(self.most))
            self._ratio(timed, SERIAL, calling(self.most - 1))
            self._keep(timed)

    def with_floor(self, cost: int, bar: str) -> None:
        """Our ways against processes that step the same bare envs and say nothing; a step costs about `cost` us."""
        steps = min(max(round(self.settings["seconds"] * 1e6 / (self.num * max(cost, 1))), 16), STEPS)
        with ExitStack() as stack:
            floor = Independent(self.recipe, [len(part) for part in dealt(self.num, self.most)])
            stack.callback(floor.close)
            name = f"{self.most} bare processes"
            sides = {name: partial(floor.step, steps)} | self._ours(stack, steps, self._in_workers(None, steps))
            timed = self._timed(sides, steps)
            self._ratio(timed, name, calling(self.most - 1), bar)
            self._ratio(timed, name, apart(self.most))
            self._ratio(timed, name, collecting(self.most))
            self._ratio(timed, SERIAL, calling(self.most - 1))
            self._keep(timed)

    def of_collectors(self) -> None:
        """Collectors in two workers that act with a policy."""
        steps = STEPS
        with ExitStack() as stack:
            sides = {}
            if peer := self.report.peer("torchrl", peers.torchrl_multi_sync, CARTPOLE, 2, self.num // 2, steps):
                stack.callback(peer.close)
                sides[MULTI_SYNC] = partial(peer.step, steps)
            one = self.make()
            actor = build_actor_critic(one.observation_spec, one.action_spec, hidden=(64, 64), generator=0).actor
            collectors: dict[str, Ours] = {
                COLLECTOR: self._collector(SerialEnv(self.num, self.make), actor, steps),
                collecting(2): self._in_workers(actor, steps, 2),
            }
            sides |= self._rollouts(stack, collectors)
            timed = self._timed(sides, steps)
            if MULTI_SYNC in sides:
                self._ratio(timed, MULTI_SYNC, collecting(2), ">= 15")
            self._ratio(timed, COLLECTOR, collecting(2))
            self._keep(timed)

    # ---- ours ----------------------------------------------------------------------------------------------------
    def _ours(self, stack: ExitStack, steps: int, in_workers: Ours | None = None) -> dict[str, Any]:
        envs = {SERIAL: SerialEnv(self.num, self.make), apart(1): self._parallel(1, False)}
        for shares in self.shares:
            envs[calling(shares - 1)] = self._parallel(shares - 1, True)
            envs[apart(shares)] = self._parallel(shares, False)
        collectors: dict[str, Ours] = {name: self._collector(env, None, steps) for name, env in envs.items()}
        if in_workers is not None:
            collectors[collecting(self.most)] = in_workers
        return self._rollouts(stack, collectors)

    def _parallel(self, workers: int, caller_steps: bool) -> ParallelEnv:
        return ParallelEnv(self.num, self.make, workers=workers, caller_steps=caller_steps)

    def _collector(self, env: Any, policy: Any, steps: int) -> Collector:
        return Collector(env, policy, frames_per_batch=self.num * steps, **AS_IN_A_RUN)

    def _in_workers(self, policy: Any, steps: int, workers: int | None = None) -> MultiSyncCollector:
        makers = [partial(SerialEnv, len(part), self.make) for part in dealt(self.num, workers or self.most)]
        return MultiSyncCollector(makers, policy, frames_per_batch=self.num * steps, cat_results=0, **AS_IN_A_RUN)

    def _rollouts(self, stack: ExitStack, collectors: dict[str, Ours]) -> dict[str, Any]:
        """Return their ways to collect a batch, once all are seen to give the frames of the first."""
        for collector in collectors.values():
            stack.callback(collector.shutdown)
        (first, collector), *others = collectors.items()
        expected = collector.rollout()
        for name, collector in others:
            batch = collector.rollout()
            for key in expected.keys(True, True):
                rounded = key in ("logits", "sample_log_prob")  # of a product with as many rows as a process has envs
                if not (torch.allclose if rounded else torch.equal)(expected[key], batch[key]):
                    raise NumericsError(f"{name} collects other frames than {first}", where=f"{self.label}, {key}")
        self.report.checks[
            f"{self.label}: what {first.removeprefix('rlcli ')} and {len(others)} other ways collect"
        ] = "equal"
        return {name: collector.rollout for name, collector in collectors.items()}

    # ---- the report ----------------------------------------------------------------------------------------------
    def _timed(self, sides: dict[str, Any], steps: int) -> list[Side]:
        return fill(sides, self.settings["rounds"], self.settings["seconds"], self.num * steps)

    def _ratio(self, sides: list[Side], over: str, under: str, bar: str = "") -> None:
        measured = ratio(sides, over, under, bar)
        measured.over = f"{self.label}: {over}"
        self.report.ratios.append(measured)

    def _keep(self, sides: list[Side]) -> None:
        for side in sides:
            side.name = f"{self.label}: {side.name}"
        self.report.sides += sides
