"""What the bench of clusters measures, each side in a process of its own, whose children are the side's too."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import torch
from tensordict import TensorDict

from rlcli.collectors import MultiSyncCollector
from rlcli.collectors.distributed import DistributedSyncCollector, RayCollector, RPCCollector
from rlcli.collectors.workers.batches import merged
from rlcli.envs import GymEnv, SerialEnv
from rlcli.modules import build_actor_critic
from rlcli.processes import replacing
from rlcli.vec_envs.make import GymRecipe
from rlcli.weight_update import open_receiver
from rlcli.weight_update.schemes import RayWeightSyncScheme
from tests.bench.peers.clusters import torchrl_cluster
from tests.bench.weight_workers import net_of

WORKERS, ENVS, CARTPOLE = 2, 8, "CartPole-v1"
LOCAL, RAY, GLOO, RPC = "local", "Ray", "gloo", "RPC"
KINDS: dict[str, Callable[..., Any]] = {
    LOCAL: MultiSyncCollector,
    RAY: partial(RayCollector, sync=True),
    GLOO: DistributedSyncCollector,
    RPC: partial(RPCCollector, sync=True),
}
RLLIB = "RLlib's env runners"
PEERS = {  # what is measured against which of ours, and the least that it is to take of our time
    "torchrl RayCollector": (RAY, 20), "torchrl DistributedCollector": (GLOO, 20), RLLIB: (RAY, 10),
}  # fmt: skip


# ---- a process -------------------------------------------------------------------------------------------------------
class Side:
    """A process that makes something by `make(*given)`, and calls its methods."""

    def __init__(self, make: Callable[..., Any], *given: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._end, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, given))
        self._process.start()
        theirs.close()
        self.is_there: bool = self._answer()

    def call(self, name: str, *given: Any) -> Any:
        self._end.send((name, given))
        return self._answer()

    def _answer(self) -> Any:
        failed, answer = self._end.recv()
        if failed:
            raise AssertionError(f"a side of the bench failed: {answer}")
        return answer

    def cpu(self) -> dict[int, float]:
        """Seconds that the processes of this side have computed so far."""
        found = {}
        for process in [(whole := psutil.Process(self._process.pid)), *whole.children(recursive=True)]:
            try:
                found[process.pid] = time.clock_gettime((~process.pid << 3) | 2)  # the kernel's name of its CPU clock
            except OSError:  # it has ended
                continue
        return found

    def close(self) -> None:
        """End it, and all that it started."""
        left = psutil.Process(self._process.pid).children(recursive=True)
        self._end.close()
        psutil.wait_procs([psutil.Process(self._process.pid)], 30)
        self._process.kill()
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue


class Elsewhere(Side):
    """RLlib's env runners, in the environment of another Python."""

    def __init__(self, python: str, frames: int) -> None:
        program = [python, Path(__file__).parent / "peers/rllib.py", CARTPOLE, WORKERS, ENVS, frames]
        surroundings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [*map(str, program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=surroundings,
        )  # fmt: skip
        self._end, self.is_there = self._process.stdin, True
        while self._line() != "ready":
            pass

    def call(self, name: str, frames: int, batches: int) -> float:
        for _ in range(batches):
            self._end.write(f"{frames}\n")
            self._end.flush()
            assert int(self._line()) >= frames
        return float("nan")

    def _line(self) -> str:
        if not (line := self._process.stdout.readline()):
            raise AssertionError("a side of the bench failed: RLlib has ended")
        return line.strip()


def spent(before: dict[int, float], after: dict[int, float]) -> float:
    """Seconds computed between two looks of `Side.cpu`, by processes that are still there."""
    return sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())


def _serve(end: Any, make: Callable[..., Any], given: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        made = make(*given)
        end.send((False, made is not None))
        while True:
            try:
                name, given = end.recv()
            except EOFError:
                break
            end.send((False, getattr(made, name)(*given)))
        if made is not None:
            made.close()
    except BaseException as error:
        end.send((True, repr(error)))
        raise


# ---- collecting ------------------------------------------------------------------------------------------------------
class Ours:
    """A collector of two workers with a 2x64 net."""

    def __init__(self, kind: str, recipe: GymRecipe) -> None:
        make = partial(GymEnv, recipe, categorical_action_encoding=True, narrow=True)
        one = make()
        self.actor = build_actor_critic(one.observation_spec, one.action_spec, hidden=(64, 64), generator=0).actor
        self.collector = KINDS[kind](
            [partial(SerialEnv, ENVS, make)] * WORKERS, self.actor, frames_per_batch=WORKERS * ENVS * 64, seed=0,
            next_obs="exact", track_traj_ids=False, track_policy_version=True,
        )  # fmt: skip

    def collect(self, frames: int, batches: int) -> float:
        """Collect batches; a number that tells whether two sides collect the same."""
        for _ in range(batches):
            batch = self.collector.rollout(frames // (WORKERS * ENVS))
        return float(batch["observation"].double().sum())

    def publish(self, times: int) -> tuple[int, int]:
        """Publish the weights and collect, so many times: messages handed to the transport, rows of another version."""
        remote, puts, wrong = self.collector.group.processes.remote, [], 0
        carry = remote.carry
        remote.carry = lambda message: puts.append(len(message)) or carry(message)
        for _ in range(times):
            next(self.actor.parameters()).data += 1e-3
            self.collector.update_policy_weights_()
            rows = self.collector.rollout(2)["collector", "policy_version"]
            wrong += int((rows != self.collector.policy_version).sum())
        return len(puts), wrong

    def close(self) -> None:
        self.collector.shutdown()


class Theirs:
    """A collector of torchrl's, of two workers with a 2x64 net, which gives batches of one size."""

    def __init__(self, ray: bool, frames: int) -> None:
        self._next = torchrl_cluster(CARTPOLE, WORKERS, ENVS, frames, ray=ray)

    def collect(self, frames: int, batches: int) -> float:
        for _ in range(batches):
            assert self._next().numel() == frames
        return float("nan")

    def close(self) -> None:
        os._exit(0)  # its shutdown may take minutes


def theirs(ray: bool, frames: int) -> Theirs | None:
    made = Theirs(ray, frames)
    return None if made._next is None else made


# ---- bytes and copies ------------------------------------------------------------------------------------------------
class Pictures(gym.Env):
    """Show four frames of an Atari game's size; an episode ends every 200 steps."""

    observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = gym.spaces.Discrete(2)
    picture = np.random.default_rng(0).integers(0, 256, (4, 84, 84), dtype=np.uint8)
    clock = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        self.clock = 0
        return self.picture, {}

    def step(self, action: Any):
        self.clock += 1
        return self.picture, 0.0, False, self.clock >= 200, {}


def pictures() -> GymEnv:
    return GymEnv(Pictures(), categorical_action_encoding=True)


class Holder:
    """An actor that returns a TensorDict."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def get(self) -> Any:
        return self.batch


class Copied:
    """A collector of pictures on Ray: what a batch weighs, and what its way here costs."""

    def __init__(self, mode: str, frames: int) -> None:
        self.frames, self._orders = frames, {}
        self.collector = RayCollector([pictures] * WORKERS, None, sync=True, frames_per_batch=frames, next_obs=mode)
        self.remote = self.collector.group.processes.remote
        self.ray, submit = self.remote.cluster.ray, self.remote.submit

        def kept(worker: Any, *order: Any) -> Any:
            self._orders[worker] = order
            return submit(worker, *order)

        self.collector.next()
        self.remote.submit = kept
        self._submit = submit

    def size(self) -> tuple[int, int]:
        """Bytes of the largest object of the next batch, and of its rows and successors."""
        worker = self.ray._private.worker.global_worker
        came, joined = [], replacing.joined

        def seen(body: bytes, arrays: Any) -> Any:
            value = joined(body, arrays)
            stored = worker.get_serialization_context().serialize((0, body, list(arrays))).total_bytes
            finals = sum(x.nbytes for x in value.finals.values.values())
            came.append((stored, sum(x.nbytes for x in value.columns.values()) + finals))
            return value

        replacing.joined = seen
        self.collector.next()
        replacing.joined = joined
        return max(came)

    def grown(self) -> tuple[float, bool]:
        """By how much of a batch the private memory of this process grows for it; whether the store is empty then."""
        gc.collect()
        before = psutil.Process().memory_full_info().uss
        batch = self.collector.next()
        grown = (psutil.Process().memory_full_info().uss - before) / batch["observation"].nbytes
        whole = self.ray.cluster_resources()["object_store_memory"]
        until = time.monotonic() + 5
        while time.monotonic() < until:
            if empty := self.ray.available_resources()["object_store_memory"] == whole:
                break
            time.sleep(0.05)
        return grown, empty

    def hold(self) -> None:
        """Have an actor keep the next batch as a TensorDict."""
        batch = self.collector.next()
        plain = TensorDict({key: batch[key].clone() for key in ("observation", "action")}, batch.batch_size)
        self.holder = self.ray.remote(num_cpus=0)(Holder).remote(plain)

    def arrays(self) -> float:
        """Seconds for the last batch to come once more as it does: a turn that is repeated gives the same answer."""
        began = time.perf_counter()
        come = [self._submit(worker, *order) for worker, order in self._orders.items()]
        merged([replacing.joined(*future.result()[1:]) for future in come], {})
        return time.perf_counter() - began

    def pickled(self) -> float:
        """Seconds for the same batch as a TensorDict that Ray pickles."""
        began = time.perf_counter()
        self.ray.get(self.holder.get.remote())
        return time.perf_counter() - began

    def close(self) -> None:
        self.collector.shutdown()


# ---- weights ---------------------------------------------------------------------------------------------------------
class Follower:
    """An actor that follows a sender, and copies plain arrays."""

    def __init__(self, handle: Any, hidden: int) -> None:
        torch.set_num_threads(1)
        self.net = net_of(hidden)
        self.receiver = open_receiver(handle, None, self.net)
        self.own: Any = None

    def take(self, message: np.ndarray) -> float:
        self.receiver.take(message.data)
        self.receiver.receive()
        return next(self.net.parameters())[0, 0].item()

    def copy(self, array: np.ndarray) -> float:
        if self.own is None:
            self.own = np.empty_like(array)
        np.copyto(self.own, array)
        return 0.0


class Published:
    """A net of some size whose weights go to four actors."""

    def __init__(self, hidden: int, actors: int) -> None:
        from rlcli.collectors.distributed.cluster import cluster_of

        self.cluster = cluster_of(actors)
        ray = self.ray = self.cluster.ray
        self.net, self.version = net_of(hidden), 0
        self.sender = RayWeightSyncScheme().create_sender("policy", self.net)
        follower = ray.remote(num_cpus=1)(Follower)
        self.actors = [follower.remote(self.sender.handle(), hidden) for _ in range(actors)]
        self.plain = np.zeros(self.sender.layout.nbytes, np.uint8)
        self.adopted(), self.copied()

    def adopted(self) -> float:
        """Seconds from a publication until all actors act on it."""
        self.version += 1
        for tensor in self.net.parameters():
            tensor.data.fill_(self.version)
        began = time.perf_counter()
        self.sender.send(version=self.version)
        put = self.ray.put(np.frombuffer(self.sender.message(), np.uint8))  # as `RayRemote.carry` does
        numbers = self.ray.get([actor.take.remote(put) for actor in self.actors])
        took = time.perf_counter() - began
        assert numbers == [self.version] * len(numbers)
        return took

    def copied(self) -> float:
        """Seconds for one put, and a get and a plain copy by each actor."""
        began = time.perf_counter()
        put = self.ray.put(self.plain)
        self.ray.get([actor.copy.remote(put) for actor in self.actors])
        return time.perf_counter() - began

    def close(self) -> None:
        self.cluster.leave()
