"""Small networks and batches for the tests of objectives, of their oracles and of the update."""

import torch
from face import Rows
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential

from rlcli.modules import (
    MLP,
    Categorical,
    IndependentNormal,
    OneHotCategorical,
    ProbabilisticActor,
    StateIndependentScale,
    TanhNormal,
    ValueOperator,
)

DISTRIBUTIONS = {
    "categorical": Categorical,
    "one_hot": OneHotCategorical,
    "normal": IndependentNormal,
    "tanh_normal": TanhNormal,
}
OBS, ACTIONS = 4, 3


def make_actor(kind="categorical", seed=0, activation="tanh"):
    torch.manual_seed(seed)
    discrete = kind in ("categorical", "one_hot")
    net = TensorDictModule(MLP(OBS, ACTIONS, (16, 16), activation), ["observation"], ["logits" if discrete else "loc"])
    if not discrete:
        scale = TensorDictModule(StateIndependentScale(ACTIONS, 0.7), ["loc"], ["scale"])
        net = TensorDictSequential(net, scale)
    keys = ["logits"] if discrete else ["loc", "scale"]
    return ProbabilisticActor(net, keys, distribution_class=DISTRIBUTIONS[kind], return_log_prob=True)


def make_critic(seed=1, activation="tanh"):
    torch.manual_seed(seed)
    return ValueOperator(MLP(OBS, 1, (16, 16), activation))


def rollout(actor, shape=(3, 20), seed=0, end_rate=0.15, next_obs=True):
    """A batch `[*B, T]` of random observations with the actor's actions; ends of both kinds, mixed.

    The next observation is the one of the next row, except after an end and at the batch's last step.
    """
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    obs = torch.randn(*shape, OBS, generator=g)
    td = TensorDict({"observation": obs}, batch_size=shape)
    with torch.no_grad():
        td = actor.get_dist(td.clone()), td
        action = td[0].sample()
        log_prob = td[0].log_prob(action) + 0.3 * torch.randn(shape, generator=g)  # as if the policy had moved
        td = td[1]
    td["action"], td["sample_log_prob"] = action, log_prob
    kind = torch.rand(*shape, 1, generator=g)
    terminated, truncated = kind < end_rate / 2, (kind > end_rate / 4) & (kind < end_rate)
    td["next"] = TensorDict(
        {
            "reward": torch.randn(*shape, 1, generator=g),
            "terminated": terminated,
            "truncated": truncated,
            "done": terminated | truncated,
        },
        batch_size=shape,
    )
    if next_obs:
        real = torch.randn(*shape, OBS, generator=g)
        inside = ~td["next", "done"]
        inside[..., -1, :] = False
        td["next", "observation"] = torch.where(inside, obs.roll(-1, -2), real)
    return td


def as_exact(td):
    """The same batch with lazy next observations."""
    obs, following = td["observation"], td["next", "observation"]
    flat, true = obs.reshape(-1, OBS), following.reshape(-1, OBS)
    below = torch.cat([flat[1:], torch.full((1, OBS), float("nan"))])
    ends = (below != true).any(-1).nonzero().squeeze(-1)
    out = td.copy()
    out["next", "observation"] = Rows.from_ends(obs, ends.int(), true[ends])
    return out
