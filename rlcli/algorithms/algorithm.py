"""Algorithms: what a run gives one, asks one for, and the parts that it makes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from rlcli.collectors import BaseCollector
from rlcli.envs import EnvBase
from rlcli.keys import Key
from rlcli.learning.loops import Hooks, Loop
from rlcli.learning.update import Update
from rlcli.modules import ActorCritic
from rlcli.modules.masks import find_action_mask
from rlcli.objectives.loss import Loss

if TYPE_CHECKING:
    from rlcli.data.buffer.replay_buffer import ReplayBuffer
    from rlcli.objectives.value.estimator import ValueEstimator


@dataclass(frozen=True)
class Setup:
    """What a run gives its algorithm: the options of its loss, and what it needs of everything else.

    Attributes
    ----------
    options : object
        The options of `loss=`, by their names; a user's own are in `options.kwargs`.
    config : object
        The whole configuration, for algorithms of a user's package: `self.cfg`.
    network, gradient_actor, greedy_actor : dict
        Arguments of `rlcli.modules.build_actor_critic` and its siblings: those of all networks, and those of either
        kind of actor.
    keep : sequence of keys
        Stored with every row, whoever reads them.
    draws : {"batch", "rows", "slices"}
        What an update learns from: parts of the new batch, stored rows, or slices of stored trajectories.
    strict_length : int, optional
        Rows that a stored trajectory has at least, to be drawn from.
    update : dict
        Arguments of `Update`: the optimizer, its learning rate and options, the largest norm of a gradient.
    beta : function, optional
        Progress in [0, 1] -> exponent of the importance weights, where rows are drawn by their priorities.
    estimator : function
        Critic (None: every value is 0), actor -> the value estimator that `value=` names.
    next_dropped : bool
        Rows do not hold what follows where an episode ends.
    """

    options: Any
    config: Any
    seed: int
    total_frames: int
    gamma: float
    network: Mapping[str, Any]
    gradient_actor: Mapping[str, Any]
    greedy_actor: Mapping[str, Any]
    action_mask_key: str | None
    device: torch.device | None
    storing_device: torch.device | None
    keep: Sequence[Key]
    next_dropped: bool
    whole_trajectories: bool
    draws: str
    batch_size: int
    slice_len: int | None
    strict_length: int | None
    epochs: int
    update: Mapping[str, Any]
    updates_per_frame: float
    learning_starts: int
    beta: Callable[[float], float] | None
    estimator: Callable[[Any, Any], ValueEstimator]
    average_minibatch: bool

    def action_mask(self, env: EnvBase) -> Key | None:
        """Return the observation that says which actions are allowed; None where there is none."""
        return find_action_mask(self.action_mask_key, env.observation_spec, env.action_spec)


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
    """How a run learns; made of what the run gives it.

    Parameters
    ----------
    setup : Setup

    Attributes
    ----------
    cfg : Config
        The whole configuration. Options that only an algorithm of a user's package has are in `cfg.loss.kwargs`; what
        none of its methods has read there by the time its loop is made is refused.
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

    def __init__(self, setup: Setup) -> None:
        self.setup, self.options, self.cfg = setup, setup.options, setup.config

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

    def load_kernels(self) -> None:  # noqa: B027, most have none
        """Compile or load what would otherwise be inside the first batch's timing."""
