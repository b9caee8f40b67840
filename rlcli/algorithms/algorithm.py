"""Algorithms: what a run asks one for, and the parts that it makes."""

from __future__ import annotations

import dataclasses
import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, overload

from rlcli.build.buffer import build_buffer, load_buffer_compiler
from rlcli.build.collector import build_collector, devices
from rlcli.build.policy import actor_and_critic, users_policy
from rlcli.collectors import BaseCollector
from rlcli.config import registry
from rlcli.config.schemas import CollectConfig, Config
from rlcli.envs import EnvBase
from rlcli.errors import ConfigError
from rlcli.keys import Key
from rlcli.learning.loops import Hooks, Loop
from rlcli.learning.update import Update
from rlcli.modules import ActorCritic
from rlcli.objectives.loss import Loss
from rlcli.runs.folder import Run

if TYPE_CHECKING:
    from rlcli.data.buffer.replay_buffer import ReplayBuffer
    from rlcli.objectives.value.estimator import ValueEstimator


class Parts(NamedTuple):
    """What a training run holds beside its env and its policy.

    Attributes
    ----------
    collector : BaseCollector
    update : Update
    estimator : ValueEstimator or None
    buffer : ReplayBuffer or None
        The collector's too.
    """

    collector: BaseCollector
    update: Update
    estimator: ValueEstimator | None
    buffer: ReplayBuffer | None


class Algorithm(ABC):
    """How a run learns; made of the run's configuration.

    Parameters
    ----------
    cfg : Config
        Options that only an algorithm of a user's package has are in `cfg.loss.kwargs`; what none of its methods has
        read there by the time its loop is made is refused.

    Attributes
    ----------
    uses : tuple of str
        The keys that it reads, among those that not every algorithm does; what is typed of others is refused.
    off_policy : bool
        It learns from stored rows, whoever collected them.
    one_pass : bool
        A second pass over a batch learns from another policy's actions.
    stores : bool
        The collector writes into a buffer.
    """

    uses: ClassVar[tuple[str, ...]] = ()
    off_policy: ClassVar[bool] = False
    one_pass: ClassVar[bool] = False

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg

    @property
    @abstractmethod
    def stores(self) -> bool: ...

    @abstractmethod
    def networks(self, env: EnvBase) -> ActorCritic:
        """What acts, and what values; all that a checkpoint saves as the policy.  Not asked of a user's `policy=`."""

    @abstractmethod
    def loss(self, policy: ActorCritic, env: EnvBase) -> Loss:
        """The loss of these networks, which are on the device that they learn on."""

    def estimator(self, policy: ActorCritic) -> ValueEstimator | None:
        """The value stage; None where the loss needs none."""
        return None

    @abstractmethod
    def keys(self, loss: Loss, estimator: ValueEstimator | None, env: EnvBase) -> list[Key]:
        """What a collected row holds."""

    def rebuilt(self, estimator: ValueEstimator | None, env: EnvBase) -> Sequence[Key]:
        """Observations whose next value samples get from the row that follows in the storage."""
        return ()

    @abstractmethod
    def update(self, loss: Loss) -> Update:
        """The update stage."""

    @abstractmethod
    def loop(self, parts: Parts, policy: ActorCritic, hooks: Hooks) -> Loop:
        """The loop over these parts."""

    def load_kernels(self) -> None:
        """Compile or load what would otherwise be inside the first batch's timing."""
        if self.cfg.optim.compile:
            importlib.import_module("torch._inductor.compile_fx")
        if self.stores:
            load_buffer_compiler(self.cfg)

    def parts(self, env: EnvBase, policy: ActorCritic, run: Run) -> Parts:
        """All parts of a run; rows of a buffer on a disk go into the folder of `run`."""
        cfg = self.cfg
        estimator, loss = self.estimator(policy), self.loss(policy, env)
        collector = build_collector(cfg, env, policy, self.keys(loss, estimator, env))
        update, buffer = self.update(loss), None
        if self.stores:
            device = devices(cfg)["train_device"]
            n_steps = 1 if loss.recurrent else cfg.loss.n_steps  # which sums them along slices
            buffer = build_buffer(cfg, run, device, collector, self.rebuilt(estimator, env), n_steps)
            collector.replay_buffer = buffer
        return Parts(collector, update, estimator, buffer)


class Asked(dict[str, Any]):
    """Options, and in `unread` the names of those that nobody has asked for."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.unread = set(options)

    def __getitem__(self, name: str) -> Any:
        self.unread.discard(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.unread.discard(name)
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self.unread.discard(name)
        return super().pop(name, *default)

    def __iter__(self) -> Iterator[str]:  # as `**options` does
        self.unread.clear()
        return super().__iter__()

    def items(self) -> Any:
        self.unread.clear()
        return super().items()


def refuse_unread(algorithm: Algorithm) -> None:
    """Raise where something in `loss.kwargs` was read by no method of the algorithm.

    Raises
    ------
    ConfigError
    """
    unread = sorted(getattr(algorithm.cfg.loss.kwargs, "unread", ()))
    if unread:
        kind, names = algorithm.cfg.loss.kind, ", ".join(f"loss.kwargs.{name}" for name in unread)
        raise ConfigError(
            f"loss={kind} does not read {names}", where=type(algorithm).__name__,
            fix="Leave it out; or read it, self.cfg.loss.kwargs[...], in a method that makes a part of the run.",
        )  # fmt: skip


def algorithm_of(cfg: Config) -> Algorithm:
    """The algorithm that `loss=` names, with a configuration that remembers what is read of `loss.kwargs`.

    Raises
    ------
    ConfigError
        A user's cannot be made.
    """
    if cfg.loss.kwargs:
        cfg = dataclasses.replace(cfg, loss=dataclasses.replace(cfg.loss, kwargs=Asked(cfg.loss.kwargs)))
    return registry.build("algorithm", cfg.loss.kind, Algorithm, cfg)  # type: ignore[type-abstract]


@overload
def build_policy(cfg: Config, env: EnvBase) -> ActorCritic: ...
@overload
def build_policy(cfg: CollectConfig, env: EnvBase) -> ActorCritic | None: ...
def build_policy(cfg: CollectConfig, env: EnvBase) -> ActorCritic | None:
    """Actor and critic for the env; None for random actions, which are refused where they are to be trained."""
    p = cfg.policy
    if p.kind == "random":
        if isinstance(cfg, Config):
            raise ConfigError("a random policy cannot be trained", where="policy=random", fix="Use rlcli collect.")
        return None
    if p.kind in registry.users_names("policy"):
        return users_policy(cfg, env)
    if isinstance(cfg, Config):
        return algorithm_of(cfg).networks(env)
    return actor_and_critic(cfg, env)
