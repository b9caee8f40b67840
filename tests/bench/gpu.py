"""`python -m tests.bench gpu`: what a GPU is given, part by part, with the bars of each; `parts=update` runs one alone.

Sides take turns in one process. Each part has a share of `seconds`, prints its table at once and writes it to a file of
its own, so that whoever has a GPU for a quarter of an hour has the whole. A side that fails, for memory or for what it
needs, is told and the others go on. `device=cpu` walks the same way with tiny sizes.
"""

from __future__ import annotations

import copy
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

import rlcli
from rlcli.bench.harness import Figure, Report, claim, publish
from rlcli.collectors import Collector
from rlcli.collectors.devices import resolve
from rlcli.config.problem import raise_all, unknown
from rlcli.data import LazyTensorStorage, ReplayBuffer
from rlcli.envs import GymEnv, SerialEnv
from rlcli.errors import NumericsError, in_words
from rlcli.graphs import graph
from rlcli.learning.update import Update
from rlcli.modules import ActorCritic, build_actor_critic, build_q_actor, build_soft_actor_critic
from rlcli.objectives import ClipPPOLoss, DQNLoss, SACLoss, SoftUpdate
from rlcli.objectives.value.functional import generalized_advantage_estimate
from rlcli.specs import Bounded, Categorical, Composite, Unbounded
from tests.bench import gpu_machine as machine
from tests.bench import gpu_off_policy as hand_off
from tests.bench import gpu_sides as hand
from tests.bench import rnn
from tests.bench.gpu_env import env
from tests.bench.gpu_part import (
    AUTO,
    CPU,
    EAGER,
    GRAPH,
    LOG_PROB_OFF,
    NO_TIME,
    OFF,
    RANDOM,
    SB3,
    WAY_OFF,
    Part,
)  # fmt: skip
from tests.bench.peers.learning import torchrl_estimates, torchrl_recurrent, torchrl_update

SHARES = {
    "trace": 12, "act": 20, "update": 35, "values": 10, "train": 100, "workers": 20, "rnn": 35, "eval": 12, "start": 35,
    "replay": 5, "env": 12,
}  # fmt: skip


def measure(settings: dict[str, Any]) -> Report:
    """Run the parts in turn; each is printed and written when it is done, all of them again at the end."""
    asked = [name for name in settings["parts"].split(",") if name]
    raise_all(unknown("part", name, PARTS) for name in asked if name not in PARTS)
    resolve(settings["device"])
    whole = Report("gpu", settings, "unit of the part")
    began = time.perf_counter()
    if settings["device"] == "cpu":
        whole.note("device=cpu: the way is walked in tiny sizes; bars are a GPU's, and say nothing here")
    if settings["peers"] and {"update", "values", "rnn"} & {*asked}:
        torchrl_estimates()  # what is imported is on no part's clock
    for at, name in enumerate(asked):
        left = settings["seconds"] - (time.perf_counter() - began)
        share = SHARES[name] / sum(SHARES[later] for later in asked[at:])
        unit, run = PARTS[name]
        part = Part(name, settings, unit, max(0.0, left) * share)
        try:
            run(part)
        except Exception as error:  # the parts that follow are measured all the same
            if settings["strict"]:
                raise
            part.refuse("all: the rest", in_words(error))
        finally:
            graph.use("auto")
            gc.collect()
        path = Path(settings["folder"]) / f"{name}.json"
        claim(path)
        publish(part.report, path)
        for of, found in ((whole.sides, part.report.sides), (whole.ratios, part.report.ratios)):
            of += found  # type: ignore[operator]
        whole.figures += part.report.figures
        whole.checks |= part.report.checks
        whole.refused |= part.report.refused
        for line in part.report.notes:
            whole.note(line)
    barred = [
        (x.name if isinstance(x, Figure) else f"{x.over} / {x.under}", x.met) for x in (*whole.ratios, *whole.figures)
    ]
    missed = [name for name, met in barred if met is False]
    whole.note(
        f"{sum(met is True for _, met in barred)} bars met, {len(missed)} missed; {len(whole.refused)} sides left out"
    )
    for name in missed:
        whole.note(f"missed: {name}")
    return whole


# ---- what sides are made of ------------------------------------------------------------------------------------------
def with_graphs(mode: str, make: Callable[[], Callable[[], Any]]) -> Callable[[], Any]:
    """Make a side that makes and calls its graphs, or none, as `device.graphs` says."""
    graph.use(mode)
    call = make()

    def side() -> Any:
        graph.use(mode)
        return call()

    return side


class Net(NamedTuple):
    name: str
    shape: tuple[int, ...]
    actions: int

    def pair(self, device: torch.device) -> ActorCritic:
        image = len(self.shape) == 3
        seen = Bounded(0, 255, self.shape, dtype=torch.uint8) if image else Unbounded(self.shape)
        options: dict[str, Any] = {"shared": None} if image else {"hidden": (64, 64), "activation": "tanh"}
        pair = build_actor_critic(Composite({"observation": seen}), Categorical(self.actions), generator=0, **options)
        return ActorCritic(*(part.to(device) for part in pair))


def _nets(part: Part) -> list[Net]:
    return [Net("MLP 64 x 2", (4,), 2), Net("Nature CNN", part.pick((4, 84, 84), (4, 36, 36)), 6)]


def _batch(net: Net, n: int, device: torch.device) -> TensorDictBase:
    """Rows `[n]` as a PPO update reads them."""
    draw = torch.Generator().manual_seed(0)
    image = len(net.shape) == 3
    obs = (
        torch.randint(256, (n, *net.shape), generator=draw, dtype=torch.uint8)
        if image else torch.randn(n, *net.shape, generator=draw)
    )  # fmt: skip
    td = TensorDict(
        {
            "observation": obs,
            "action": torch.randint(net.actions, (n,), generator=draw),
            "sample_log_prob": -float(np.log(net.actions)) + 0.1 * torch.randn(n, generator=draw),
            "advantage": torch.randn(n, 1, generator=draw),
            "value_target": torch.randn(n, 1, generator=draw),
        },
        [n],
    )
    return td.to(device)


# ---- trace -----------------------------------------------------------------------------------------------------------
def trace(part: Part) -> None:
    """Ten steps and ten minibatches of ours: what twenty launch and wait for, less what ten do."""
    for net in _nets(part):
        for mode in ("auto", "off"):
            side = AUTO if mode == "auto" else OFF
            case = f"{net.name}, {side}"
            found = part.made(case, {
                what: partial(_twice, part, partial(make, part, net, mode=mode))
                for what, make in (("a step", _acting), ("a minibatch", _updating))
            })  # fmt: skip
            for what, (each, beside) in found.items():
                bars = ("<= 1" if what == "a step" else "<= 0", "<= 1") if mode == "auto" else ("", "")
                part.figure(f"{case}: {what}: launches", each["launches"], "")
                part.figure(f"{case}: {what}: waits", each["waits"], "", bars[0])
                part.figure(f"{case}: waits of a batch beside {what}", beside["waits"], "", bars[1])


def _twice(part: Part, make: Callable[[int], Callable[[], Any]]) -> tuple[dict[str, float], dict[str, float]]:
    """Count what ten units take, and what a batch takes beside its units."""
    found = []
    for units in (10, 20):
        call = make(units)
        for _ in range(hand.WARM):
            call()
        with hand.counted(part.device) as count:
            call()
        found.append(count)
    ten, twenty = found
    each = {name: (twenty[name] - ten[name]) / 10 for name in ("launches", "waits")}
    return each, {name: ten[name] - 10 * each[name] for name in each}


# ---- act -------------------------------------------------------------------------------------------------------------
ENVS = 8


def _acting(
    part: Part, net: Net, steps: int, *, mode: str, pair: ActorCritic | None = None, device: torch.device | None = None
) -> Callable[[], Any]:
    """Collect `steps` steps of eight envs that stand still."""
    device = part.device if device is None else device
    pair = net.pair(device) if pair is None else pair
    actor = pair.actor.to(device)
    return with_graphs(mode, lambda: _collector(net, steps, actor, device))


def _collector(net: Net, steps: int, actor: Any, device: torch.device) -> Callable[[], Any]:
    env = SerialEnv(ENVS, lambda: GymEnv(hand.Still(net.shape, net.actions), categorical_action_encoding=True))
    where = (
        {}
        if device.type == "cpu"
        else {"storing_device": device, **({} if actor is None else {"policy_device": device})}
    )
    return Collector(
        env, actor, frames_per_batch=ENVS * steps, next_obs="exact", seed=0, track_traj_ids=False, **where
    ).rollout


def act(part: Part) -> None:
    """Acting alone: hand-written sides are given rows; of ours, collecting with random actions is taken off."""
    steps = part.pick(128, 2)
    for net in _nets(part):
        pair = net.pair(part.device)
        shown = np.stack([hand.Still(net.shape, net.actions).shown] * ENVS)
        heads = hand.TwoHeads(pair)

        def by_hand(in_graph: bool, heads=heads, shown=shown) -> Callable[[], Any]:
            acts = hand.Act(heads, shown, part.device, in_graph)

            def call() -> hand.Act:
                for _ in range(steps):
                    acts(shown)
                return acts

            return call

        sides = part.made(net.name, {
            AUTO: partial(_acting, part, net, steps, mode="auto", pair=pair),
            OFF: partial(_acting, part, net, steps, mode="off", pair=pair),
            RANDOM: partial(_collector, net, steps, None, part.device),
            EAGER: partial(by_hand, False), GRAPH: partial(by_hand, True),
        })  # fmt: skip
        _check_acting(part, net, pair, sides, steps)
        timed = part.fill(net.name, sides, steps)
        bare = timed[RANDOM].median if RANDOM in timed else 0.0
        alone = {
            name: side.median - (bare if name in (AUTO, OFF) else 0) for name, side in timed.items() if name != RANDOM
        }
        image = len(net.shape) == 3
        for name, seconds in alone.items():
            part.figure(f"{net.name}: acting, {name}", seconds * 1e6, "us a step",
                        "<= 90" if name == AUTO and not image else "")  # fmt: skip
        for other, bar in ((GRAPH, ">= 1"), (EAGER, ">= 4"), (OFF, "")):
            if other in alone and AUTO in alone:
                value = alone[other] / max(alone[AUTO], 1e-9)
                part.figure(f"{net.name}: acting, {other} / {AUTO}", value, "x", bar if image else "")


def _check_acting(part: Part, net: Net, pair: ActorCritic, sides: Mapping[str, Callable[[], Any]], steps: int) -> None:
    """Log-probabilities of all sides are those of their actions; with graphs, actions are those of our CPU run."""
    batches = {}
    for name in (AUTO, OFF):
        for _ in range(hand.WARM if name in sides else 0):  # the last one is of a replay
            batches[name] = sides[name]()
    if AUTO in batches:
        here = _acting(part, net, steps, mode="off", pair=copy.deepcopy(pair), device=torch.device("cpu"))
        expected = [here()["action"].clone() for _ in range(hand.WARM)][-1]
        differ = (batches[AUTO]["action"].cpu() != expected).double().mean()
        part.same(
            f"{net.name}: share of actions of {AUTO} that are not those of a CPU run",
            float(differ),
            part.pick(0.02, 0.0),
        )
    stored = {name: (b["observation"], b["action"], b["sample_log_prob"]) for name, b in batches.items()}
    for name in (EAGER, GRAPH):
        for _ in range(hand.WARM + 1 if name in sides else 0):
            acts = sides[name]()
            stored[name] = (acts.obs, acts.action, acts.log_prob)
    for name, (obs, action, log_prob) in stored.items():
        with torch.no_grad():
            law = pair.actor.get_dist(TensorDict({"observation": obs}, action.shape).to(part.device))
            gap = float((law.log_prob(action.to(part.device)) - log_prob.to(part.device)).abs().max())
        part.same(f"{net.name}, {name}: log-probabilities of actions", gap, LOG_PROB_OFF[part.device.type])


# ---- update ----------------------------------------------------------------------------------------------------------
def _updating(
    part: Part, net: Net, minibatches: int, *, mode: str, pair: ActorCritic | None = None, size: int | None = None
) -> Callable[[], Any]:
    """Update on a batch of so many minibatches once."""
    size = part.pick(256, 8) if size is None else size
    batch = _batch(net, minibatches * size, part.device)
    pair = net.pair(part.device) if pair is None else pair

    def make() -> Callable[[], Any]:
        loss = ClipPPOLoss(*pair, critic_coeff=0.5, loss_critic_type="l2")
        draws = torch.Generator().manual_seed(1)
        update = Update(loss, lr=3e-4, optimizer_options={"eps": 1e-5}, epochs=1, batch_size=size, generator=draws)
        return lambda: update(batch)

    return with_graphs(mode, make)


def update(part: Part) -> None:
    """PPO of both nets against hand-written updates, then SAC and DQN on one minibatch."""
    minibatches, size = part.pick((16, 256), (4, 8))
    for net in _nets(part):
        start, batch = net.pair(part.device), _batch(net, minibatches * size, part.device)
        pairs: dict[str, ActorCritic] = {name: copy.deepcopy(start) for name in (AUTO, OFF, EAGER, GRAPH, "torchrl")}

        def by_hand(name: str, pairs=pairs, batch=batch) -> Callable[[], Any]:
            draws = torch.Generator().manual_seed(1)
            ppo = hand.PPO(hand.TwoHeads(pairs[name]), part.device, name == GRAPH, size, draws)
            columns = {to: batch[key].squeeze(-1) if key in ("advantage", "value_target") else batch[key]
                       for to, key in hand.COLUMNS.items()}  # fmt: skip
            return lambda: ppo(columns, 1)

        def theirs(pairs=pairs, batch=batch) -> Callable[[], Any]:
            draws = torch.Generator().manual_seed(1)
            made = torchrl_update(*pairs["torchrl"], batch, epochs=1, batch_size=size, generator=draws)
            if made is None:
                raise ImportError("it is not installed")
            return made

        ours = {
            name: partial(_updating, part, net, minibatches, mode=mode, pair=pairs[name], size=size)
            for name, mode in ((AUTO, "auto"), (OFF, "off"))
        }
        peers = {"torchrl": theirs} if part.settings["peers"] else {}
        sides = part.made(net.name, {**ours, EAGER: partial(by_hand, EAGER), GRAPH: partial(by_hand, GRAPH), **peers})
        sides = part.again(net.name, sides, 2)  # plain, recorded, proven and replayed
        weights = {name: _weights(pairs[name]) for name in sides}
        for name, other in ((AUTO, OFF), (AUTO, EAGER), (GRAPH, EAGER), ("torchrl", EAGER)):
            if {name, other} <= weights.keys():
                gap = _apart(weights[name], weights[other], _weights(start))
                most = 0.0 if part.tiny and other == OFF else WAY_OFF[part.device.type]
                part.same(f"{net.name}: weights of {name} and {other}, in ways that they went", gap, most)
        timed = part.fill(net.name, sides, minibatches)
        image = len(net.shape) == 3
        part.ratio(timed, EAGER, AUTO, ">= 2.5" if image else "")
        part.ratio(timed, GRAPH, AUTO, ">= 1.0" if image else "")
        part.ratio(timed, OFF, AUTO, "" if image else ">= 8")
        part.ratio(timed, "torchrl", AUTO)
    for algo in ("SAC", "DQN"):
        _off_policy(part, algo)


def _weights(pair: ActorCritic) -> Tensor:
    return torch.cat([p.detach().flatten() for p in nn.ModuleList([*pair]).parameters()])  # shared ones once


def _apart(a: Tensor, b: Tensor, start: Tensor) -> float:
    return float((a - b).norm() / (b - start).norm())


def _off_policy(part: Part, algo: str) -> None:
    """SAC or DQN on one minibatch: ours beside hand-written updates of the same nets, rows and noise."""
    n = part.pick(256 if algo == "SAC" else 128, 16)
    rows = hand_off.Replay(n, *((3, 1) if algo == "SAC" else (4, 1)), part.device)
    draw = torch.Generator().manual_seed(0)
    rows.rows.copy_(torch.randn(rows.rows.shape, generator=draw))
    obs, later, action, reward, _ = rows.rows.split(rows.widths, -1)
    action.copy_(torch.rand(action.shape, generator=draw) * 2 - 1 if algo == "SAC" else action > 0)
    rows.rows[:, -1] = rows.rows[:, -1] > 1.5
    ended = rows.rows[:, -1:] > 0
    batch = TensorDict({
        "observation": obs, "action": action.clone() if algo == "SAC" else action[:, 0].long(),
        "next": {"observation": later, "reward": reward, "terminated": ended, "done": ended.clone()},
    }, [n])  # fmt: skip
    index, weights, starts = torch.arange(n, device=part.device), {}, {}
    way = part.pick("auto", "autograd")  # which is what a GPU takes

    def noise() -> torch.Generator:
        return torch.Generator(device=part.device).manual_seed(0)

    def kept(name: str, parameters: list[Tensor]) -> None:
        weights[name] = lambda: torch.cat([p.detach().flatten() for p in parameters])
        starts[name] = weights[name]().clone()

    def ours(name: str) -> Callable[[], Any]:
        nets, draws = _off_policy_nets(algo, part.device), noise()
        loss: Any
        if algo == "SAC":
            loss = SACLoss(nets.actor, list(nets.critic), loss_function="l2", generator=draws)  # type: ignore[call-overload]
            parts = [*loss.actor_network.parameters(), *loss.qvalue_network.parameters(), loss.log_alpha]
        else:
            loss = DQNLoss(nets.actor[0], loss_function="l2", double_dqn=True)  # type: ignore[index]
            parts = list(loss.value_network.parameters())
        loss.to(part.device)
        one = Update(loss, SoftUpdate(loss, tau=0.005), lr=1e-3, generator=draws, max_grad_norm=None, gradient=way)
        kept(name, parts)

        def step() -> None:
            one.begin()
            one.on(one.read(batch))

        return step

    def by_hand(name: str) -> Callable[[], Any]:
        learner = off_policy_learner(algo, part.device, rows, name == GRAPH, n, generator=noise())
        kept(name, learner.parameters)
        return partial(learner, index)

    sides = part.made(algo, {
        **{name: partial(with_graphs, mode, partial(ours, name)) for name, mode in ((AUTO, "auto"), (OFF, "off"))},
        **{name: partial(by_hand, name) for name in (EAGER, GRAPH)},
    })  # fmt: skip
    sides = part.again(algo, sides, 6)
    for name, other in ((AUTO, OFF), (AUTO, EAGER), (GRAPH, EAGER)):
        if {name, other} <= sides.keys():
            gap = _apart(weights[name](), weights[other](), starts[other])
            most = 0.0 if part.tiny and other == OFF else WAY_OFF[part.device.type]
            part.same(f"{algo}: weights of {name} and {other}, in ways that they went", gap, most)
    timed = part.fill(algo, sides)
    part.ratio(timed, OFF, AUTO, ">= 8" if algo == "SAC" else "")
    for other in (EAGER, GRAPH):
        part.ratio(timed, other, AUTO)


def _off_policy_nets(algo: str, device: torch.device) -> ActorCritic:
    """Return networks as the recipes have them, of Pendulum or CartPole."""
    seen = Composite({"observation": Unbounded((3 if algo == "SAC" else 4,))})
    if algo == "SAC":
        pair = build_soft_actor_critic(seen, Bounded(-1.0, 1.0, (1,)), hidden=(64, 64), activation="relu", generator=0)
    else:
        pair = build_q_actor(seen, Categorical(2), hidden=(128, 128), activation="relu", generator=0)
    return ActorCritic(*(x if x is None else x.to(device) for x in pair))


def off_policy_learner(
    algo: str, device: torch.device, rows: hand_off.Replay, graph: bool, batch_size: int, **options: Any
) -> hand_off.SAC | hand_off.DQN:
    nets = _off_policy_nets(algo, device)
    if algo == "SAC":
        return hand_off.SAC(nets, rows, graph, batch_size, **options)
    net = nets.actor[0].module[0].module  # type: ignore[index]
    return hand_off.DQN(net, rows, graph, batch_size, **options)


# ---- values ----------------------------------------------------------------------------------------------------------
def values(part: Part) -> None:
    """GAE as a call and in a graph, against what the device needs to read and write as many bytes."""
    for shape in part.pick(((8, 128), (64, 512), (4096, 32)), ((4, 16),)):
        case = "GAE {} x {}".format(*shape)
        draw = torch.Generator().manual_seed(0)
        done = torch.rand(*shape, 1, generator=draw) < 0.02
        terminated = done & (torch.rand(*shape, 1, generator=draw) < 0.5)
        floats = [torch.randn(*shape, 1, generator=draw) for _ in range(3)]
        columns = [x.to(part.device) for x in (*floats, done, terminated)]
        ours = partial(generalized_advantage_estimate, 0.99, 0.95, *columns)
        out: list[Tensor] = []

        def kept(ours=ours, out=out) -> list[Tensor]:
            out[:] = ours()
            return out

        in_graph = hand.GraphModule(kept, part.device)
        sides: dict[str, Callable[[], Any]] = {AUTO: ours, "rlcli, in a graph": in_graph}
        if part.settings["peers"]:
            sides |= {
                name: partial(f, 0.99, 0.95, *columns) for name, f in torchrl_estimates().items() if "loop" not in name
            }
        expected = generalized_advantage_estimate(0.99, 0.95, *(x.cpu() for x in columns), backend="reference")
        sides = part.again(case, sides, hand.WARM + 1)
        checked = {AUTO: ours} if AUTO in sides else {}
        if "rlcli, in a graph" in sides:
            checked["rlcli, in a graph"] = lambda out=out: out
        for name, compute in checked.items():
            found = compute()
            gap = max(float((a.cpu() - b).abs().max()) for a, b in zip(found, expected, strict=True))
            part.same(f"{case}: advantages of {name} and of the reference", gap, 1e-4)
        source = torch.empty(11 * columns[0].numel(), dtype=torch.uint8, device=part.device)  # read, and written: 22
        sides["a copy of as many bytes, in a graph"] = hand.GraphModule(
            partial(torch.empty_like(source).copy_, source), part.device
        )
        timed = part.fill(case, sides)
        if AUTO in timed:
            part.figure(f"{case}: a call", timed[AUTO].median * 1e6, "us", "<= 40")
        floor, graphed = timed.get("a copy of as many bytes, in a graph"), timed.get("rlcli, in a graph")
        if floor and graphed:
            most = max(8.0, 1.3 * floor.median * 1e6)
            part.figure(f"{case}: in a graph", graphed.median * 1e6, "us", f"<= {most:.1f}")


# ---- train -----------------------------------------------------------------------------------------------------------
class Recipe(NamedTuple):
    frames: int
    tiny: int
    over_sb3: str
    over_hand: str = ""


RECIPES = {
    "ppo_pong": Recipe(4096, 1024, ">= 3", ">= 0.95"),
    "sac_pendulum": Recipe(800, 480, ">= 6", ">= 0.9"),
    "ppo_exact": Recipe(8192, 1024, ">= 5"),
    "dqn_cartpole": Recipe(4096, 4096, ">= 5"),
}


def train(part: Part) -> None:
    """Runs of recipes: seconds of steps and updates, what is compiled before and the start of envs left out."""
    asked = [name for name in part.settings["recipes"].split(",") if name]
    raise_all(unknown("recipe", name, RECIPES) for name in asked if name not in RECIPES)
    with tempfile.TemporaryDirectory() as folder:
        for at, name in enumerate(asked):
            recipe = RECIPES[name]
            until = time.perf_counter() + part.left / (len(asked) - at)
            runs: dict[str, Callable[[int], float]] = {
                AUTO: partial(_ours, folder, name, part.settings["device"], "auto"),
                OFF: partial(_ours, folder, name, part.settings["device"], "off"),
            }
            if not part.tiny:
                runs[CPU] = partial(_ours, folder, name, "cpu", "off")
            loop = _ppo_loop if name.startswith("ppo") else _off_policy_loop
            runs |= {EAGER: partial(loop, part, name, False), GRAPH: partial(loop, part, name, True)}
            if part.settings["peers"]:
                runs[SB3] = lambda frames, name=name: hand.train_sb3(name, frames, part.device)
            timed = part.turns(name, runs, part.pick(recipe.frames, recipe.tiny), until)
            for side in timed.values():
                part.figure(side.name.partition(", ")[2], 1 / side.median, "frames/s")
            part.ratio(timed, CPU, AUTO, ">= 1.0")
            part.ratio(timed, SB3, AUTO, recipe.over_sb3)
            part.ratio(timed, GRAPH, AUTO, recipe.over_hand)
            part.ratio(timed, EAGER, AUTO)
            part.ratio(timed, OFF, AUTO)


def _ours(folder: str, recipe: str, device: str, mode: str, frames: int) -> float:
    words = [f"recipe={recipe}", f"device={device}", *machine.QUIET, f"total_frames={frames}"]
    if device != "cpu":
        words.append(f"device.graphs={mode}")
    place = tempfile.mkdtemp(dir=folder)
    run = rlcli.train([*words, f"run.dir={place}/run"])
    found = run.summary["throughput"]
    return found["seconds"] - found["stages"].get("compile", {"seconds": 0.0})["seconds"]


def _ppo_loop(part: Part, recipe: str, in_graph: bool, frames: int) -> float:
    """Train by the hand-written loop, its envs stepped by gymnasium: in processes where a step is long."""
    steps = min(128, max(1, frames // ENVS))
    options = {"frames": frames, "steps": steps, "batch_size": min(256, ENVS * steps)}
    if recipe == "ppo_pong":
        net = Net("Nature CNN", (4, 84, 84), 6)
        make = [hand.stacked_pong] * ENVS
        envs: Any = AsyncVectorEnv(make, autoreset_mode=AutoresetMode.SAME_STEP)
        options["epochs"] = 4
    else:
        net = Net("MLP 64 x 2", (4,), 2)
        envs = SyncVectorEnv([partial(gym.make, "CartPole-v1")] * ENVS, autoreset_mode=AutoresetMode.SAME_STEP)
        options["epochs"] = 10
    try:
        return hand.train_ppo(net.pair(part.device), envs, part.device, in_graph, **options)
    finally:
        envs.close()


def _off_policy_loop(part: Part, recipe: str, in_graph: bool, frames: int) -> float:
    algo, name, n, batch_size, widths, half = {
        "sac_pendulum": ("SAC", "Pendulum-v1", 1, 256, (3, 1), {"half": 2.0}),
        "dqn_cartpole": ("DQN", "CartPole-v1", ENVS, 128, (4, 1), {}),
    }[recipe]
    rows = hand_off.Replay(100_000, *widths, part.device)
    learner = off_policy_learner(algo, part.device, rows, in_graph, batch_size, **half)
    envs = SyncVectorEnv([partial(gym.make, name)] * n, autoreset_mode=AutoresetMode.SAME_STEP)
    options = {"random_frames": 100, "every": 1, "updates": 1}
    if algo == "DQN":
        options = {"random_frames": 1000, "every": 256, "updates": 128}
    try:
        return hand_off.train_off_policy(learner, envs, in_graph, frames=frames, **options)
    finally:
        envs.close()


# ---- rnn -------------------------------------------------------------------------------------------------------------
GPU_TIME = {
    (128, 128, 64): "<= 1.0", (128, 128, 256): "<= 1.0", (1024, 32, 128): "<= 1.0",
    (64, 512, 128): "<= 1.3", (8, 128, 64): "<= 1.3",
}  # fmt: skip
SIZES = ((128, 128, 64), (128, 128, 256), (64, 512, 128), (1024, 32, 128), (8, 128, 64))


def recurrent(part: Part) -> None:
    """Layers with 3 % resets against torch.nn's without any: wall time, in a graph, launches, peak memory."""
    cells, sizes = ("gru", "lstm"), part.pick(SIZES, ((3, 5, 4),))
    for size in sizes:
        for cell in cells:
            case = "{} {} x {} x {}".format(cell.upper(), *size)
            if part.left < 0:
                part.refuse(f"{case}: all", NO_TIME)
                continue
            batch = rnn.Batch(cell, size, size[-1], 3, part.device)
            module, zeros = rnn.around(batch.layer), [s.new_zeros(size[0], s.shape[1]) for s in batch.states]
            states = [s.requires_grad_() for s in zeros]
            out: list[Any] = []

            def kept(batch=batch, module=module, out=out) -> None:
                out[:] = [batch.module(module)]

            eager, floor = partial(batch.module, module), partial(batch.floor, states)
            in_graph = "rlcli, in a graph"
            sides = {AUTO: eager, in_graph: hand.GraphModule(kept, part.device), rnn.FLOOR: floor}
            if size == sizes[0]:
                sides[rnn.PAD] = partial(batch.ours, backend="pad")
            if part.settings["peers"] and size == sizes[0]:
                theirs = torchrl_recurrent(batch.layer).get("pad")
                if theirs is not None and not isinstance(theirs, str):
                    sides["torchrl, pad"] = partial(batch.module, theirs)
                part.refuse(
                    f"{case}: torchrl, triton", "it compiles for half a minute: python -m tests.bench rnn device=cuda"
                )
            there = part.again(case, sides, hand.WARM + 1)
            if AUTO in there and in_graph in there:
                pairs = zip((*eager().outputs, *eager().gradients), (*out[0].outputs, *out[0].gradients), strict=True)
                gap = max(float((a - b).abs().max() / (1 + b.abs().max())) for a, b in pairs)
                part.same(
                    f"{case}: outputs and gradients with a graph and without", gap, rnn.TOLERANCE[part.device.type]
                )
            timed = part.fill(case, there, share=0.5 / len(sizes) / len(cells))
            part.ratio(timed, AUTO, rnn.FLOOR, "<= 1.0")
            part.ratio(timed, in_graph, rnn.FLOOR, "<= 0.7")
            part.ratio(timed, rnn.PAD, AUTO, ">= 3")
            for name in (name for name in timed if name.startswith("torchrl")):
                part.ratio(timed, name, AUTO)
            counts: dict[str, Any] = {}
            for name in (name for name in (AUTO, rnn.FLOOR) if name in timed):
                with hand.counted(part.device) as counts[name]:
                    sides[name]()
                bars = ("<= 12", "<= 0") if name == AUTO else ("", "")
                part.figure(f"{case}: {name}: kernels a pass", counts[name]["kernels"], "", bars[0])
                part.figure(f"{case}: {name}: waits a pass", counts[name]["waits"], "", bars[1])
            if len(counts) == 2 and counts[rnn.FLOOR]["nanoseconds"]:
                share = counts[AUTO]["nanoseconds"] / counts[rnn.FLOOR]["nanoseconds"]
                part.figure(f"{case}: GPU time, {AUTO} / {rnn.FLOOR}", share, "x", GPU_TIME.get(size, ""))
            if AUTO in timed and rnn.FLOOR in timed:
                peaks = [rnn._peak(side, part.device) for side in (eager, floor)]
                part.figure(f"{case}: peak, {AUTO} / {rnn.FLOOR}", peaks[0] / peaks[1], "of the bytes", "<= 0.5")


# ---- eval ------------------------------------------------------------------------------------------------------------
def evaluation(part: Part) -> None:
    """Whole episodes of a policy that has hardly been trained, its nets where it was trained."""
    recipe, episodes, frames = part.pick(("ppo_pong", 20, 1024), ("ppo_exact", 2, 1024))
    with tempfile.TemporaryDirectory() as folder:
        words = [f"recipe={recipe}", f"device={part.settings['device']}", *machine.QUIET, f"total_frames={frames}"]
        run = rlcli.train([*words, f"run.dir={folder}/run"])
        steps: list[int] = []

        def play(count: int) -> float:
            began = time.perf_counter()
            steps.append(int(rlcli.evaluate(run.path, episodes=count).lengths.sum()))
            return time.perf_counter() - began

        timed = part.turns(recipe, {AUTO: play}, episodes, part.ends)
        if AUTO in timed:
            whole = statistics.median(timed[AUTO].seconds)
            part.figure(f"{episodes} episodes of {recipe}", whole, "s", part.pick("<= 3.5", ""))
            part.figure(f"{episodes} episodes of {recipe}: steps a second", steps[-1] / whole, "")


# ---- replay ----------------------------------------------------------------------------------------------------------
def replay(part: Part) -> None:
    """Draw a minibatch of image stacks, to the device and on it; the device's own gather is the floor."""
    rows, size, shape = part.pick((8192, 256, (4, 84, 84)), (64, 8, (4, 8, 8)))
    net, case = Net("rows", shape, 6), f"{size} of {rows} stacks"
    batch = _batch(net, rows, torch.device("cpu"))
    pinned = batch.pin_memory() if part.device.type == "cuda" else batch

    def ours(on: str | torch.device = "cpu", **options: Any) -> Callable[[], Any]:
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(rows, device=on), batch_size=size, device=part.device,
            generator=torch.Generator().manual_seed(0), **options,
        )  # fmt: skip
        buffer.extend(batch)
        return buffer.sample

    def by_hand() -> Callable[[], Any]:
        draws = torch.Generator().manual_seed(0)
        staging = {
            k: x[:size].clone().pin_memory() if part.device.type == "cuda" else x[:size].clone()
            for k, x in batch.items()
        }

        def draw() -> dict[str, Tensor]:
            hand.wait(part.device)  # the last copy has left the staging memory
            at = torch.randint(rows, (size,), generator=draws)
            for k, x in staging.items():
                torch.index_select(pinned[k], 0, at, out=x)
            return {k: x.to(part.device, non_blocking=True) for k, x in staging.items()}

        return draw

    def there() -> Callable[[], Any]:
        draws, held = torch.Generator().manual_seed(0), batch.to(part.device)

        def draw() -> dict[str, Tensor]:
            at = torch.randint(rows, (size,), generator=draws).to(part.device)
            return {k: x.index_select(0, at) for k, x in held.items()}

        return draw

    pin = {"pin_memory": True} if part.device.type == "cuda" else {}
    sides = part.made(case, {
        "rlcli, host memory to device": ours, "rlcli, pinned, one ahead": partial(ours, prefetch=1, **pin),
        "rlcli, on the device": partial(ours, part.device),
        "by hand, pinned": by_hand, "by hand, on the device": there,
    })  # fmt: skip
    for name, draw in sides.items():
        found = draw()
        keys = set(batch.keys())
        wrong = [
            k for k in keys if found[k].shape != (size, *batch[k].shape[1:]) or found[k].device.type != part.device.type
        ]
        if wrong:
            raise NumericsError("a side draws other rows", where=f"{case}: {name}", why=f"shape or place of {wrong}")
    timed = part.fill(case, sides, share=0.5)
    for other in ("by hand, pinned", "by hand, on the device"):
        for ours_name in (name for name in timed if name.startswith("rlcli")):
            part.ratio(timed, ours_name, other)


PARTS: dict[str, tuple[str, Callable[[Part], None]]] = {
    "trace": ("step or minibatch", trace), "act": ("step of eight envs", act), "update": ("minibatch", update),
    "values": ("batch", values), "train": ("frame", train), "rnn": ("pass, forward and backward", recurrent),
    "workers": ("step of all envs", machine.workers), "start": ("run", machine.start),
    "eval": ("episode", evaluation), "replay": ("sample", replay), "env": ("frame", env),
}  # fmt: skip
