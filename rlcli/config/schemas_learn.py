"""The fields of `value`, `loss` and `optim`: every detail of PPO, DQN and SAC that changes a number."""

from __future__ import annotations

from dataclasses import dataclass

from rlcli.config.option import option

ESTIMATORS = ("gae", "td0", "td1", "td_lambda", "vtrace")
POLICY_GRADIENTS = ("ppo_clip", "ppo_kl", "a2c", "reinforce")
OFF_POLICY = ("dqn", "sac")
ONE_PASS = ("a2c", "reinforce")  # no ratio of policies: a second pass learns from another policy's actions
LOSSES = (*POLICY_GRADIENTS, *OFF_POLICY)
GRADIENTS, STORED = {"loss": POLICY_GRADIENTS}, {"loss": OFF_POLICY}  # `used_by` of an option


@dataclass
class ValueConfig:
    """Advantages and value targets."""

    kind: str = option("gae", "which estimator choice this is", choices=ESTIMATORS, used_by=GRADIENTS)
    gamma: float = option(0.99, "discount per step", ge=0, le=1)
    lmbda: float = option(
        0.95,
        "weight of longer returns: 0 is one step, 1 the whole trajectory",
        ge=0,
        le=1,
        used_by={**GRADIENTS, "value": ("gae", "td_lambda")},
    )
    average: bool = option(True, "normalise advantages to mean 0, deviation 1", used_by=GRADIENTS)
    average_over: str = option(
        "minibatch",
        "rows the normalisation runs over",
        choices=("batch", "minibatch"),
        used_by={**GRADIENTS, "value.average": (True,)},
    )
    shifted: bool = option(
        False, "one call of the value net for rows and next rows; needs no next observations", used_by=GRADIENTS
    )
    shifted_budget: int = option(
        1,
        "shifted: next observations an env's row of a batch has room for",
        ge=1,
        used_by={**GRADIENTS, "value.shifted": (True,)},
    )
    normaliser: str = option(
        "none", "values in units of their spread", choices=("none", "running", "popart"), used_by=GRADIENTS
    )
    rho_thresh: float = option(
        1.0, "vtrace: upper limit of a step's importance weight", gt=0, used_by={**GRADIENTS, "value": ("vtrace",)}
    )
    c_thresh: float = option(
        1.0,
        "vtrace: upper limit of the weight that is carried through a step",
        gt=0,
        used_by={**GRADIENTS, "value": ("vtrace",)},
    )
    two_calls: bool = option(
        False, "value net on observations and on next observations, one call each", used_by=GRADIENTS
    )
    num_chunks: int | None = option(
        None, "call the value net on so many parts of a batch: less memory", ge=1, used_by=GRADIENTS
    )
    value_chunk_size: int | None = option(
        None, "the same by size: envs, or rows of a flat batch, in a part", ge=1, used_by=GRADIENTS
    )
    compute_dtype: str = option(
        "float32",
        "precision the value net is called in for estimates",
        choices=("float32", "bfloat16", "float16"),
        used_by=GRADIENTS,
    )
    backend: str = option(
        "auto", "implementation of the recursion", choices=("auto", "reference", "cpu", "triton"), used_by=GRADIENTS
    )


@dataclass
class LossConfig:
    """What is minimised: a policy gradient with its value and entropy terms, DQN's or SAC's losses."""

    kind: str = option("ppo_clip", "which loss choice this is", choices=LOSSES)
    clip_epsilon: float = option(
        0.2, "ppo_clip: range of the probability ratio around 1", gt=0, lt=1, used_by={"loss": ("ppo_clip",)}
    )
    anneal_clip: bool = option(
        False, "ppo_clip: lower clip_epsilon to 0 along the run", used_by={"loss": ("ppo_clip",)}
    )
    clip_value: float | None = option(
        None, "ppo, a2c: range of a value change per update", gt=0, used_by={"loss": ("ppo_clip", "ppo_kl", "a2c")}
    )
    entropy_coeff: float = option(0.01, "policy gradients: weight of the entropy bonus", ge=0, used_by=GRADIENTS)
    critic_coeff: float = option(
        0.5, "policy gradients: weight of the value loss", ge=0, used_by={**GRADIENTS, "loss.baseline": (True,)}
    )
    target_kl: float | None = option(
        None,
        "ppo: stop a batch's epochs once one's mean divergence exceeds this",
        gt=0,
        used_by={"loss": ("ppo_clip", "ppo_kl")},
    )
    kl_target: float = option(
        0.01, "ppo_kl: divergence of a batch's policies aimed at", gt=0, used_by={"loss": ("ppo_kl",)}
    )
    kl_coeff: float = option(1.0, "ppo_kl: weight of the divergence at first", ge=0, used_by={"loss": ("ppo_kl",)})
    baseline: bool = option(True, "reinforce: subtract a learned value from returns", used_by={"loss": ("reinforce",)})
    distance: str = option(
        "smooth_l1", "dqn, sac: of a value and its target", choices=("smooth_l1", "l2", "l1"), used_by=STORED
    )
    double: bool = option(
        False, "dqn: the trained net chooses the next action, the target net values it", used_by={"loss": ("dqn",)}
    )
    n_steps: int = option(1, "dqn, sac: rewards summed before the next value", ge=1, used_by=STORED)
    tau: float = option(
        1.0, "dqn, sac: share of the trained weights that target nets take over at a time", gt=0, le=1, used_by=STORED
    )
    target_every: int = option(1, "dqn, sac: updates from one such time to the next", ge=1, used_by=STORED)
    alpha: float | int | str = option(
        "auto", "sac: weight of the entropy; auto: learned", gt=0, words=("auto",), used_by={"loss": ("sac",)}
    )
    alpha_init: float = option(
        1.0, "sac: where a learned alpha begins", gt=0, used_by={"loss": ("sac",), "loss.alpha": ("auto",)}
    )
    target_entropy: float | int | str = option(
        "auto", "sac: that a learned alpha aims at; auto: minus the action dims, of actions scaled to [-1, 1]",
        words=("auto",), used_by={"loss": ("sac",), "loss.alpha": ("auto",)})  # fmt: skip


@dataclass
class OptimConfig:
    """How gradients become weights."""

    kind: str = option("adam", "which optimizer choice this is", choices=("adam", "adamw", "rmsprop", "sgd"))
    lr: float = option(3e-4, "learning rate", gt=0)
    anneal_lr: bool = option(True, "lower the learning rate to 0 along the run")
    epochs: int = option(
        10, "policy gradients: passes over a batch, or as many rows drawn by sampler=slice", ge=1, used_by=GRADIENTS
    )
    updates_per_frame: float = option(1.0, "dqn, sac: updates for every frame that is collected", gt=0, used_by=STORED)
    max_grad_norm: float | None = option(0.5, "clip the gradient's norm; null does not", gt=0)
    eps: float = option(
        1e-5, "adam, adamw, rmsprop: added to the denominator", gt=0, used_by={"optim": ("adam", "adamw", "rmsprop")}
    )
    betas: list[float] = option(
        [0.9, 0.999], "adam, adamw: decay of the two moments", ge=0, lt=1, used_by={"optim": ("adam", "adamw")}
    )
    weight_decay: float = option(0.0, "weight decay", ge=0)
    momentum: float = option(0.0, "sgd, rmsprop: momentum", ge=0, lt=1, used_by={"optim": ("sgd", "rmsprop")})
    alpha: float = option(0.99, "rmsprop: decay of the squared gradient", ge=0, lt=1, used_by={"optim": ("rmsprop",)})
    compile: bool = option(False, "torch.compile the update")
