"""Actor and critic from a configuration, what trains them, and how many threads their size is worth."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import is_lazy

from rlcli.build.collector import devices, shares_meanwhile
from rlcli.build.ranks import ranks_of
from rlcli.config import registry
from rlcli.config.choices import collect, learn
from rlcli.config.option import as_choice
from rlcli.config.schemas import CollectConfig, Config
from rlcli.envs import EnvBase
from rlcli.errors import ConfigError, in_words
from rlcli.graphs.host import is_elsewhere
from rlcli.keys import unravel
from rlcli.modules import ActorCritic, build_actor_critic, recurrent
from rlcli.modules.build import RECURRENT
from rlcli.modules.masks import find_action_mask, mask_key_of, with_action_mask
from rlcli.processes.process import cores

WORTH_A_THREAD = 32_000_000  # multiply-adds of one layer for a minibatch above which a second thread pays


def actor_and_critic(cfg: CollectConfig, env: EnvBase) -> ActorCritic:
    """Return those of a policy gradient."""
    asked, options = as_choice(collect.NetworkOptions, cfg.policy).action_mask_key, network_options(cfg)
    mask = find_action_mask(asked, env.observation_spec, env.action_spec)
    networks = options["gradient_actor"] | options["network"]
    return build_actor_critic(env.observation_spec, env.action_spec, action_mask_key=mask, **networks)


def network_options(cfg: CollectConfig) -> dict[str, dict[str, Any]]:
    """Return what all networks and the actors of both kinds are built with; nothing where a user's are built."""
    p = cfg.policy
    if not isinstance(p, collect.NetworkOptions):
        return {"network": {}, "gradient_actor": {}, "greedy_actor": {}}
    layer = None
    if isinstance(p, collect.RecurrentOptions) and p.kind in RECURRENT:
        how = {"recurrent_backend": p.recurrent_backend, "recurrent_recompute": cfg.memory.recurrent_recompute}
        layer = recurrent.Recurrence(p.kind, p.recurrent_size, p.recurrent_layers, how)
    return {
        "network": {
            "net": "auto" if layer else p.kind, "hidden": p.hidden, "orthogonal": p.orthogonal, "generator": cfg.seed,
            "activation": None if p.activation == "auto" else p.activation,
        },
        "gradient_actor": {
            "shared": p.shared, "distribution": p.distribution, "init_std": p.init_std,
            "state_dependent_std": p.state_dependent_std, "recurrence": layer,
        },
        "greedy_actor": {
            "dueling": p.dueling, "eps_init": p.eps_init, "eps_end": p.eps_end, "eps_frames": p.eps_frames,
            "recurrence": layer,
        },
    }  # fmt: skip


def users_policy(cfg: CollectConfig, env: EnvBase) -> ActorCritic:
    """Return what the builder of a registered policy makes."""
    p = cfg.policy
    assert isinstance(p, collect.UsersPolicyOptions)
    uses = [key.partition(".")[2] for key in registry.uses("policy", p.kind) if key.startswith("policy.")]
    options = {name: getattr(p, name) for name in uses} | p.kwargs
    made = registry.build("policy", p.kind, object, env.observation_spec, env.action_spec, **options)
    pair = tuple(made) if isinstance(made, tuple | ActorCritic) else (made, None)
    if len(pair) != 2 or not isinstance(pair[0], torch.nn.Module) or not isinstance(pair[1], torch.nn.Module | None):
        kinds = " and ".join(type(part).__name__ for part in pair if part is not None) or "None"
        raise ConfigError(
            f"policy={p.kind} is no module",
            why=f"its builder gave {'a pair of ' if len(pair) == 2 and pair[1] else ''}{kinds}",
            fix="Return an nn.Module that acts, or a pair (actor, critic).",
        )
    if any(isinstance(m, torch.jit.ScriptModule) for part in pair if part is not None for m in part.modules()):
        raise ConfigError(f"policy={p.kind} holds TorchScript", fix="Give the modules that it was compiled from.")
    mask = find_action_mask(p.action_mask_key, env.observation_spec, env.action_spec)
    read = getattr(pair[0], "in_keys", ())
    if mask is not None and mask_key_of(pair[0]) is None and mask not in map(unravel, read):
        pair = (with_action_mask(pair[0], mask, env.action_spec), pair[1])
    policy = ActorCritic(*pair)
    lazy = [name for name, x in (*policy.named_parameters(), *policy.named_buffers()) if is_lazy(x)]
    if lazy:
        raise ConfigError(
            f"policy={p.kind} has parameters without a shape",
            why=f"{', '.join(lazy)}: a lazy layer was not called yet",
            fix="Call each network once in the builder, on observation_spec.zero(), or give its layers their sizes.",
        )
    try:
        policy.state_dict()
    except Exception as error:  # whatever a module of the user's does
        raise ConfigError(
            f"policy={p.kind} cannot be saved", where="state_dict()", why=in_words(error),
            fix="Leave state_dict to nn.Module, or have it return a dict of tensors.",
        ) from error  # fmt: skip
    return policy


def choose_threads(cfg: CollectConfig, policy: ActorCritic | None) -> int:
    """Return the threads of torch: as asked, or one for small nets and spare cores for large ones; workers have one."""
    if isinstance(cfg.threads, int):
        return cfg.threads
    if policy is None:
        return 1
    rows = next((rows for device, rows in _work(cfg) if not is_elsewhere(device)), 0)
    largest = max((p.numel() for p in policy.parameters() if p.ndim > 1), default=0)
    spared = rows and (_convolves(policy) or largest * rows > WORTH_A_THREAD)
    return cores_to_spare(cfg, cores()) if spared else 1


def _work(cfg: CollectConfig) -> list[tuple[torch.device, int]]:
    """Return where this process learns and acts, and of how many rows at a time."""
    places, cpu = devices(cfg), torch.device("cpu")
    learns = [(places["train_device"] or cpu, cfg.sampler.batch_size)] if isinstance(cfg, Config) else []
    return [*learns, *[(places["policy_device"] or cpu, cfg.env.num)] * (cfg.collector.kind == "sync")]


def _convolves(policy: ActorCritic) -> bool:
    return any(isinstance(m, torch.nn.Conv2d) for m in policy.modules())


def load_libraries(cfg: CollectConfig, policy: ActorCritic | None) -> None:
    """Load what a GPU's first product, and convolution, take of libraries, so that plans and timings hold it."""
    if policy is None:
        return
    for device, _ in _work(cfg):
        if is_elsewhere(device):
            x = torch.ones(1, 1, 1, 1, device=device)
            torch.mm(x[0, 0], x[0, 0])
            if _convolves(policy):
                torch.conv2d(x, x)


def cores_to_spare(cfg: CollectConfig, there: int) -> int:
    """Cores for who learns: of those of each rank, what workers leave which collect meanwhile, and one at least."""
    return max(1, there // ranks_of(cfg) - len(shares_meanwhile(cfg)))


def optimizer_options(o: learn.OptimizerOptions) -> dict[str, Any]:
    """Return what the chosen optimizer is made with, beside its learning rate."""
    options = {name: value for name, value in vars(o).items() if name not in vars(learn.OptimizerOptions())}
    options |= {"betas": tuple(o.betas)} if isinstance(o, learn.AdamOptions) else {}
    return {"weight_decay": o.weight_decay, **options}
