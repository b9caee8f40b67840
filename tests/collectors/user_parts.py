"""Envs, transforms and policies such as users write, drawn by hypothesis; a `Recipe` builds the same parts each time.

Every part overrides something: methods of the classes it derives from, dtypes, shapes, flags, tensors that it reuses.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import gymnasium as gym
import numpy as np
import torch
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Normal

from rlcli.envs import EnvBase, GymEnv, SerialEnv, TransformedEnv
from rlcli.modules import Categorical, OneHotCategorical, ProbabilisticActor, TanhNormal
from rlcli.specs import Bounded, Composite, OneHot, Unbounded
from rlcli.transforms import (
    CatFrames,
    InitTracker,
    RewardClipping,
    RewardScaling,
    RewardSum,
    StepCounter,
    TensorDictPrimer,
    ToFloat,
    Transform,
)

# ---- envs ------------------------------------------------------------------------------------------------------------


class Drift(gym.Env):
    """Walks as it is told to; an episode is as long as its first number says, and ends as `ends` says."""

    def __init__(self, keys, dtype, reuses, actions, ends) -> None:
        box = gym.spaces.Box(-100, 100, (2,), dtype)
        more = {
            "bonus": gym.spaces.Box(0, 9, (1,), np.float32),
            "eye": gym.spaces.Dict({"image": gym.spaces.Box(0, 255, (2, 2), np.uint8)}),
        }
        self.observation_space = box if keys == "one" else gym.spaces.Dict({"observation": box, **more})
        self.action_space = gym.spaces.Box(-1, 1, (2,), np.float32) if actions == "box" else gym.spaces.Discrete(3)
        self.keys, self.dtype, self.reuses, self.ends, self.kept = keys, dtype, reuses, ends, None

    def see(self):
        at = self.at.astype(self.dtype)
        if self.reuses:
            if self.kept is None:
                self.kept = at
            self.kept[:] = at
            at = self.kept
        image = np.full((2, 2), self.t % 7, np.uint8)
        return at if self.keys == "one" else {
            "observation": at, "bonus": np.full(1, self.t % 5, np.float32), "eye": {"image": image}
        }  # fmt: skip

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.left = 0, int(self.np_random.integers(1, 7))
        self.at = self.np_random.normal(size=2)
        return self.see(), {}

    def step(self, action):
        self.t += 1
        self.at = self.at + np.asarray(action, np.float64).sum() / 4 - 0.25
        over = self.t >= self.left
        terminated = over and self.ends != "truncates"
        truncated = over and (self.ends == "truncates" or (self.ends == "both" and self.left % 2 == 0))
        return self.see(), float(self.at[0]) + self.t, terminated, truncated, {}


class Threefold(gym.Wrapper):
    def step(self, action):
        seen, reward, *rest = self.env.step(action)
        return seen, reward * 3, *rest


WRAPPERS = {
    "": lambda env: env,
    "threefold": Threefold,
    "time limit": lambda env: gym.wrappers.TimeLimit(env, 3),
    "rewards": lambda env: gym.wrappers.TransformReward(env, lambda reward: reward - 0.5),
}


class OwnStep(GymEnv):
    def _step(self, td):
        out = super()._step(td)
        return out.set("reward", out["reward"] * 10 + one_number(td))


class OwnReset(GymEnv):
    def _reset(self, td):
        out = super()._reset(td)
        return out.set("observation", out["observation"] + 1)


class OwnTransformed(TransformedEnv):
    def _step(self, td):
        out = super()._step(td)
        return out.set("reward", out["reward"] * 10)


class ByHand(EnvBase):
    """Written on tensordicts: counts, gives the same tensors again, and only says `done`, or only what it must.

    One that `reuses` gives its flags as the same tensors too; a reset shows something else of the lanes that go on.
    """

    def __init__(self, lanes, actions, flags, reuses=False) -> None:
        super().__init__(batch_size=lanes)
        size = self.batch_size
        self.observation_spec = Composite({"observation": Unbounded((*size, 2))}, shape=size)
        self.action_spec = Bounded(-1, 1, (*size, 2)) if actions == "box" else OneHot(3, shape=(*size, 3))
        self.flags, self.seen, self.calls, self.reuses = flags, torch.zeros(*size, 2), 0, reuses
        self.over = {name: torch.zeros(*size, 1).bool() for name in ("done", "terminated", "truncated")}
        self.generator = torch.Generator()
        self.left = torch.ones(*size, 1)

    def _set_seed(self, seed):
        self.generator.manual_seed(seed)

    def _reset(self, td):
        mask = td["_reset"] if td is not None and "_reset" in td else torch.ones(*self.batch_size, 1).bool()
        length = torch.randint(1, 7, self.left.shape, generator=self.generator).float()
        self.left = torch.where(mask, length, self.left)
        start = torch.randn(self.seen.shape, generator=self.generator)
        self.seen.copy_(torch.where(mask, start, self.seen))
        if not self.reuses:
            return TensorDict({"observation": self.seen}, self.batch_size)
        for flag in self.over.values():
            flag.logical_and_(~mask)
        return TensorDict({"observation": torch.where(mask, self.seen, 7.0), **self.over}, self.batch_size)

    def _step(self, td):
        self.calls += 1
        self.left = self.left - 1
        self.seen.add_(td["action"].float().sum(-1, keepdim=True) * 0.1 + td["action"][..., :1].float() * 0.3)
        over = self.left <= 0
        out = {"observation": self.seen, "reward": self.seen[..., :1] + self.calls}
        if self.flags == "done":
            out["done"] = over
        else:
            out |= {"terminated": over & (self.seen[..., :1] > 0), "truncated": over & (self.seen[..., :1] <= 0)}
        if self.reuses:
            out |= {name: self.over[name].copy_(out[name]) for name in self.over if name in out}
        return TensorDict(out, self.batch_size)


@dataclass(frozen=True)
class World:
    lanes: int
    face: str
    keys: str = "one"
    dtype: str = "float32"
    actions: str = "one-hot"
    ends: str = "terminates"
    reuses: bool = False
    wrapper: str = ""

    def __post_init__(self) -> None:
        if self.face.startswith("by hand") and self.actions == "index":
            object.__setattr__(self, "actions", "one-hot")

    def make(self) -> EnvBase:
        if self.face == "by hand, batched" and self.lanes:
            return ByHand((self.lanes,), self.actions, self.ends.replace("terminates", "done"), self.reuses)
        return SerialEnv(self.lanes, self.single) if self.lanes else self.single()

    def single(self) -> EnvBase:
        if self.face.startswith("by hand"):
            return ByHand((), self.actions, self.ends.replace("terminates", "done"), self.reuses)
        world = Drift(self.keys, np.dtype(self.dtype), self.reuses, self.actions, self.ends)
        kind = {"own step": OwnStep, "own reset": OwnReset}.get(self.face, GymEnv)
        env = kind(WRAPPERS[self.wrapper](world), categorical_action_encoding=self.actions == "index")
        if self.face == "own object":
            below = env._step
            env._step = lambda td: below(td).update({"reward": one_number(td)})
        if self.face == "transformed inside":
            env = OwnTransformed(env, RewardScaling(0.0, 1.5))
        return env


worlds = st.builds(
    World,
    lanes=st.sampled_from([0, 3]),
    face=st.sampled_from(
        ["gym", "gym", "own step", "own reset", "own object", "by hand", "by hand, batched", "transformed inside"]
    ),
    keys=st.sampled_from(["one", "several"]),
    dtype=st.sampled_from(["float32", "float32", "float64"]),
    actions=st.sampled_from(["one-hot", "one-hot", "index", "box"]),
    ends=st.sampled_from(["terminates", "truncates", "both"]),
    reuses=st.booleans(),
    wrapper=st.sampled_from(list(WRAPPERS)),
)


plain_worlds = st.builds(
    World,
    lanes=st.sampled_from([0, 3]),
    face=st.just("gym"),
    keys=st.sampled_from(["one", "several"]),
    actions=st.sampled_from(["one-hot", "index", "box"]),
    ends=st.sampled_from(["terminates", "truncates", "both"]),
    reuses=st.booleans(),
)


# ---- transforms ------------------------------------------------------------------------------------------------------
def main_key(td):
    """The observation, under whichever name it has come to."""
    return next(key for key in ("observation", "seen") if key in td)


def one_number(td):
    """The observation of each lane, summed: `[*batch, 1]` float32."""
    return td[main_key(td)].float().reshape(*td.batch_size, -1).sum(-1, keepdim=True)


def mask_of(td):
    return None if td is None else td.get("_reset", None)


class Part:
    """One thing that a transform of the user's does; its state is that of the transform."""

    def step(self, td, nxt):
        return nxt

    def reset(self, td, out):
        return out

    def inv(self, td):
        return td

    def spec(self, spec):
        return spec


class Shows(Part):
    """Makes something else of the observation, in one of the ways in which tensors are written."""

    def __init__(self, what, how, told) -> None:
        self.what, self.how, self.told, self.kept = what, how.removesuffix(", told"), told or "told" in how, None

    def made(self, x):
        if self.what == "double":
            return x.double() / 3
        if self.what == "half":
            return x.half()
        if self.what == "wider":
            return torch.cat([x, x], -1)
        if self.what == "taller":
            return torch.stack([x, x], -2)  # memory of its own, which a part further out may write to
        return x * 2

    def step(self, td, nxt):
        key = main_key(nxt)
        x = self.made(nxt[key])
        if self.how == "in place" and self.what == "twice":
            nxt[key].mul_(2)
        elif self.how == "reused":
            if self.kept is None:
                self.kept = torch.zeros_like(x)
            self.kept.copy_(x)
            nxt.set(key, self.kept)
        elif self.how == "new tensordict":
            return TensorDict({**dict(nxt.items()), key: x}, nxt.batch_size)
        elif self.how == "renamed":
            return nxt.exclude(key).set("seen", x)
        else:
            nxt.set(key, x)
        return nxt

    def reset(self, td, out):
        return self.step(td, out)

    def spec(self, spec):
        if self.told:
            key = main_key(spec)
            like = self.made(torch.zeros(spec[key].shape, dtype=spec[key].dtype))
            if self.how == "renamed":
                del spec[key]
                key = "seen"
            spec[key] = Unbounded(like.shape, dtype=like.dtype)
        return spec


DTYPES = {
    "float32": torch.float32, "float64": torch.float64, "bool": torch.bool, "int8": torch.int8, "uint8": torch.uint8,
    "int64": torch.int64, "bfloat16": torch.bfloat16, "complex64": torch.complex64, "float16": torch.float16,
}  # fmt: skip


WHOLE = ["float32", "float64", "bool", "int8", "uint8", "int64", "complex64", "float16"]


class Adds(Part):
    """Writes a key of its own: at steps, at resets or at both, in any shape and dtype, told to the specs or not."""

    def __init__(self, key, when, shape, dtype, told, counts) -> None:
        own = f" {when} {dtype} {shape}"  # two such parts write no key in two ways
        self.key = (key[0], key[1] + own) if isinstance(key, tuple) else key + own
        self.when, self.shape, self.dtype = when, shape, DTYPES[dtype]
        self.told, self.counts, self.n = told and when == "both", counts, 0

    def value(self, td):
        self.n += 1
        if self.shape == (7,):
            return torch.full((*td.batch_size, 7), torch.nan)
        x = torch.full((*td.batch_size, 1), float(self.n)) if self.counts else one_number(td)
        x = x.reshape((*td.batch_size, *[1] * len(self.shape)))
        return x.expand((*td.batch_size, *self.shape)).to(self.dtype)

    def step(self, td, nxt):
        return nxt if self.when == "resets" else nxt.set(self.key, self.value(nxt))

    def reset(self, td, out):
        return out if self.when == "steps" else out.set(self.key, self.value(out))

    def spec(self, spec):
        if self.told:
            spec[self.key] = Unbounded((*spec.shape, *self.shape), dtype=self.dtype)
        return spec


class Rewards(Part):
    """Writes rewards from what a step is made of."""

    def __init__(self, source, how, dtype) -> None:
        self.source, self.how, self.dtype = source, how, DTYPES[dtype]

    def step(self, td, nxt):
        if self.source == "two":
            return nxt.set("reward", torch.cat([nxt["reward"], nxt["reward"]], -1))
        size = nxt.batch_size
        before, after = one_number(td), one_number(nxt)
        if self.source == "action":
            action = td["action"].float().reshape(*size, -1)
            more = action.argmax(-1, keepdim=True) + action[..., :1]
        elif self.source == "moved":
            more = after - before
        elif self.source == "flags":
            more = nxt["terminated"].float() + 2 * nxt["truncated"].float() + 4 * td["done"].float()
        elif self.source == "policy":
            more = td["extra"].float().reshape(*size, -1).sum(-1, keepdim=True) if "extra" in td else before
        elif self.source == "names":
            more = torch.full((*size, 1), float(len(list(td.keys(True, True))) + 100 * len(list(nxt.keys(True, True)))))
        else:
            more = torch.rand(*size, 1)
        if self.how == "in place" and nxt["reward"].is_floating_point():
            nxt["reward"].add_(more)
            return nxt
        return nxt.set("reward", (nxt["reward"] + more).to(self.dtype))


class Ends(Part):
    """Writes end flags."""

    def __init__(self, how) -> None:
        self.how = how

    def step(self, td, nxt):
        high = one_number(nxt) > 1
        if self.how == "undone":
            return nxt.update({name: nxt[name] & ~high for name in ("done", "terminated", "truncated")})
        if self.how == "at resets":
            return nxt
        return nxt.set(self.how, nxt[self.how] | high)

    def reset(self, td, out):
        if self.how != "at resets":
            return out
        return out.set("done", one_number(out) > 1.2)


class Remembers(Part):
    """Sums in an attribute, which resets clear where the mask says so, or in the tensordict; or counts its calls."""

    def __init__(self, where) -> None:
        self.where, self.kept, self.n = where, None, 0
        self.key = "memory of " + where

    def step(self, td, nxt):
        self.n += 1
        if self.where == "calls":
            return nxt.set(self.key, torch.full((*nxt.batch_size, 1), float(self.n)))
        if self.where == "tensordict":
            return nxt.set(self.key, td[self.key] + nxt["reward"].float())
        if self.where == "reset":
            return nxt.set(self.key, td[self.key] * 0)
        self.kept = self.kept + nxt["reward"].float()
        return nxt.set(self.key, self.kept)

    def reset(self, td, out):
        self.n += 100
        mask, zero = mask_of(td), torch.zeros(*out.batch_size, 1)
        if self.where == "calls":
            return out.set(self.key, zero + self.n)
        if self.where == "tensordict":
            before = None if td is None else td.get(self.key, None)
            return out.set(self.key, zero if before is None else before + 1)
        if self.where == "reset":
            return out.set(self.key, zero - 1 if mask is None else zero + mask.sum())
        self.kept = zero if mask is None or self.kept is None else torch.where(mask, zero, self.kept)
        return out.set(self.key, self.kept)

    def spec(self, spec):
        spec[self.key] = Unbounded((*spec.shape, 1))
        return spec


class Touches(Part):
    """Does to what it is given as it likes: the root, the action; draws from torch's stream."""

    def __init__(self, what) -> None:
        self.what = what

    def step(self, td, nxt):
        if self.what == "root in place":
            td[main_key(td)].add_(1000)
        elif self.what == "root set":
            td.set(main_key(td), td[main_key(td)] + 1000).set("action", td["action"] * 0)
        elif self.what == "draws":
            key = main_key(nxt)
            nxt.set(key, nxt[key] + torch.rand(nxt[key].shape).to(nxt[key].dtype))
        elif self.what == "previous action":
            nxt.set("previous", td["action"].float().reshape(*nxt.batch_size, -1).sum(-1, keepdim=True))
        return nxt

    def reset(self, td, out):
        if self.what == "draws":
            return self.step(td, out)
        return out.set("previous", torch.zeros(*out.batch_size, 1)) if self.what == "previous action" else out

    def inv(self, td):
        if not self.what.startswith("inverts"):
            return td
        action = td["action"]
        choices = action.ndim > len(td.shape) and bool(((action == 0) | (action == 1)).all())  # one-hot, of any dtype
        if action.is_floating_point() and not choices:
            other = -action
        else:
            other = action.flip(-1) if action.ndim > len(td.shape) else 2 - action
        if self.what == "inverts by observation":
            other = torch.where(
                (one_number(td) > 0).reshape((*td.shape, *[1] * (action.ndim - len(td.shape)))), other, action
            )
        return td.set("action", other)


class Own(Transform):
    """A transform of the user's, put together from parts."""

    def __init__(self, parts) -> None:
        super().__init__()
        self.parts = [kind(*arguments) for kind, arguments in parts]

    def _step(self, tensordict, next_tensordict):
        for part in self.parts:
            next_tensordict = part.step(tensordict, next_tensordict)
        return next_tensordict

    def _reset(self, tensordict, reset_tensordict):
        for part in self.parts:
            reset_tensordict = part.reset(tensordict, reset_tensordict)
        return reset_tensordict

    def inv(self, tensordict):
        for part in self.parts:
            tensordict = part.inv(tensordict)
        return tensordict

    def transform_observation_spec(self, spec):
        for part in self.parts:
            spec = part.spec(spec)
        return spec


class OwnScaling(RewardScaling):
    def _step(self, tensordict, next_tensordict):
        out = super()._step(tensordict, next_tensordict)
        return out.set("reward", out["reward"] + 0.5)


class OwnTensor(RewardScaling):
    def on_tensor(self, reward):
        return reward * reward


class OwnCounter(StepCounter):
    def _reset(self, tensordict, reset_tensordict):
        out = super()._reset(tensordict, reset_tensordict)
        return out.set("step_count", out["step_count"] + 1)


def own_object():
    transform = RewardScaling(0.0, 2.0)
    transform._step = lambda td, nxt: nxt.set("reward", nxt["reward"] - 7)
    return transform


def hooked():
    class Projects(Transform):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(1, 1)
            nn.init.ones_(self.net.weight)
            nn.init.zeros_(self.net.bias)
            self.net.register_forward_hook(lambda module, given, out: out + 1)

        def _step(self, td, nxt):
            return nxt.set("reward", self.net(nxt["reward"].float()).detach())

    return Projects()


OURS = {
    "StepCounter": lambda: StepCounter(),
    "StepCounter(3)": lambda: StepCounter(3),
    "RewardSum": lambda: RewardSum(),
    "InitTracker": lambda: InitTracker(),
    "CatFrames": lambda: CatFrames(2, -1, in_keys=["observation"]),
    "CatFrames to cat": lambda: CatFrames(3, -1, in_keys=["observation"], out_keys=["cat"]),
    "RewardScaling": lambda: RewardScaling(1.0, 0.5),
    "RewardClipping": lambda: RewardClipping(-1.0, 1.0),
    "ToFloat": lambda: ToFloat(in_keys=["observation"], out_keys=["floats"]),
    "own scaling": lambda: OwnScaling(0.0, 2.0),
    "own tensor": lambda: OwnTensor(0.0, 2.0),
    "own counter": lambda: OwnCounter(),
    "own object": own_object,
    "hooked": hooked,
}
ALONE = {"StepCounter": "count", "StepCounter(3)": "count", "own counter": "count", "RewardSum": "sum"}
ALONE |= {"InitTracker": "init", "CatFrames": "cat", "CatFrames to cat": "cat", "ToFloat": "floats"}

parts = st.one_of(
    st.tuples(st.just(Shows), st.tuples(
        st.sampled_from(["twice", "twice", "double", "half", "wider", "taller"]),
        st.sampled_from(["in place", "new", "reused", "new tensordict", "renamed, told"]), st.booleans(),
    )),
    st.tuples(st.just(Adds), st.tuples(
        st.sampled_from(["added", ("nest", "added"), "plain"]), st.sampled_from(["both", "both", "steps", "resets"]),
        st.sampled_from([(1,), (), (2, 2), (0,)]), st.sampled_from([*DTYPES, *WHOLE, *WHOLE]), st.booleans(),
        st.booleans(),
    )),
    st.tuples(st.just(Rewards), st.tuples(
        st.sampled_from(["action", "moved", "flags", "policy", "names", "draw"]), st.sampled_from(["in place", "new"]),
        st.sampled_from(["float32", "float32", "float64", "float16", "int64"]),
    )),
    st.tuples(st.just(Ends), st.tuples(st.sampled_from(["done", "terminated", "truncated", "undone", "at resets"]))),
    st.tuples(st.just(Remembers), st.tuples(st.sampled_from(["attribute", "calls", "tensordict", "reset"]))),
    st.tuples(st.just(Touches), st.tuples(st.sampled_from(
        ["root in place", "root set", "draws", "previous action", "inverts", "inverts by observation"]
    ))),
)  # fmt: skip


# ---- policies --------------------------------------------------------------------------------------------------------
def numbers(td, key, n):
    """One number a lane, of what is seen and of how often that was done."""
    x = td[key].detach().double()
    return x.reshape(*td.batch_size, -1).sum(-1) + n * 0.37


def action_of(x, actions, dtype=None):
    """`[*batch]` numbers as actions."""
    if actions == "box":
        return torch.stack([torch.tanh(x), torch.sin(3 * x)], -1).float()
    index = (x.abs() * 5).long() % 3
    out = index if actions == "index" else nn.functional.one_hot(index, 3)
    return out if dtype is None else out.to(dtype)


@dataclass(frozen=True)
class Policy:
    """What a policy does on tensordicts; `make` gives it one of the forms in which it can be handed over."""

    form: str
    counts: bool = False
    draws: bool = False
    outputs: tuple = ()  # of (key, shape, dtype, source)
    input: str = "left alone"
    action_dtype: str | None = None
    memory: str = ""

    def make(self, world, shown):
        key = main_key(shown)
        if self.form in ACTORS and shown[key].ndim == len(shown.batch_size) + 1:
            return actor(self.form, world, shown, key)
        if self.memory.startswith("primed"):
            return Recurrent(world, key, "h" if self.memory == "primed, overwritten" else ("next", "h"))
        dims = len(shown.batch_size)
        core = Core(self, world.actions, key, dims)
        if self.form == "function":
            return lambda td: core(td)
        if self.form == "object":
            return core
        if self.form == "TensorDictModule":
            keys = [out[0] for out in self.outputs]
            return TensorDictModule(core.on_tensors, in_keys=[key], out_keys=["action", *keys])
        if self.form == "buffer":
            return Buffered(world.actions, dims) if key == "observation" else core
        return Module(core)


class Core:
    def __init__(self, policy, actions, key, dims) -> None:
        self.policy, self.actions, self.key, self.dims, self.n = policy, actions, key, dims, 0

    def number(self, td):
        self.n += self.policy.counts
        x = numbers(td, self.key, self.n)
        return x + torch.rand(td.batch_size).double() if self.policy.draws else x

    def written(self, x, seen):
        size = x.shape
        for key, shape, dtype, source in self.policy.outputs:
            value = x.reshape((*size, *[1] * len(shape))).expand((*size, *shape))
            if source == "alias":
                value = seen
            yield key, value if source == "alias" else value.to(DTYPES[dtype])

    def __call__(self, td):
        policy = self.policy
        x = self.number(td)
        if policy.input == "in place":
            td[self.key].mul_(3)
        elif policy.input == "overwritten":
            td[self.key] = td[self.key] * 3
        elif policy.input == "deleted":
            td = td.exclude(self.key)
        elif policy.input == "fresh":
            td = TensorDict({}, td.batch_size)
        seen = td.get(self.key, None)
        dtype = policy.action_dtype and DTYPES[policy.action_dtype]
        td["action"] = action_of(x, self.actions, dtype if self.actions == "one-hot" else None)
        for key, value in self.written(x, x[..., None] if seen is None else seen):
            td[key] = value
        if policy.memory == "nowhere":
            td["next", "unknown"] = x[..., None]
        elif policy.memory == "the env's":
            td["next", self.key] = torch.zeros_like(td[self.key])
        elif policy.memory == "words":
            td.set_non_tensor("words", "some")
        elif policy.memory == "root":
            before = td.get("mine", None)
            td["mine"] = torch.zeros(*td.batch_size, 1) if before is None else before + 1
        return None if policy.input == "nothing returned" else td

    def on_tensors(self, seen):
        self.n += self.policy.counts
        x = seen.double().reshape(*seen.shape[: self.dims], -1).sum(-1) + self.n * 0.37
        return action_of(x, self.actions), *(value for _, value in self.written(x, seen))


class Module(nn.Module):
    def __init__(self, core) -> None:
        super().__init__()
        self.core = core

    def forward(self, td):
        return self.core(td)


class Buffered(nn.Module):
    """On observations, with a buffer that it counts in."""

    def __init__(self, actions, dims) -> None:
        super().__init__()
        self.actions, self.dims = actions, dims
        self.register_buffer("n", torch.zeros((), dtype=torch.int64))

    def forward(self, observation):
        self.n += 1
        x = observation.double().reshape(*observation.shape[: self.dims], -1).sum(-1)
        return action_of(x + self.n * 0.37, self.actions)


class Recurrent(nn.Module):
    """Reads `h` and writes the next one."""

    def __init__(self, world, key, target) -> None:
        super().__init__()
        self.key, self.actions, self.target = key, world.actions, target

    def forward(self, td):
        h = td["h"] * 0.5 + numbers(td, self.key, 0)[..., None].float()
        return td.set("action", action_of(h[..., 0].double(), self.actions)).set(self.target, h)


ACTORS = ("actor", "hooked actor", "masked actor", "swapped actor", "pre-hooked actor", "subclassed layer")


class OwnLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def actor(form, world, shown, key):
    """A ProbabilisticActor, with something of the user's in it."""
    torch.default_generator.manual_seed(0)
    x = shown[key]
    width = 4 if world.actions == "box" else 3
    first = OwnLinear if form == "subclassed layer" else nn.Linear
    net = nn.Sequential(first(x.shape[-1], 8), nn.Tanh(), nn.Linear(8, width)).to(x.dtype)
    if form == "hooked actor":
        net[2].register_forward_hook(lambda module, given, out: out.flip(-1))
    if form == "pre-hooked actor":
        net[0].register_forward_pre_hook(lambda module, given: (given[0] * 2,))
    if form == "swapped actor":
        net[0] = nn.Sequential(nn.Linear(x.shape[-1], 8), nn.ReLU()).to(x.dtype)
    if world.actions == "box":
        split = TensorDictModule(lambda out: (out[..., :2], out[..., 2:].exp()), [("net", "out")], ["loc", "scale"])
        stages, keys, kind = [TensorDictModule(net, [key], [("net", "out")]), split], ["loc", "scale"], TanhNormal
        if form == "swapped actor":
            kind = Normal
    else:
        stages, keys, kind = (
            [TensorDictModule(net, [key], ["logits"])],
            ["logits"],
            Categorical if world.actions == "index" else OneHotCategorical,
        )
        if form == "masked actor":
            mask = torch.tensor([True, False, True])
            stages.append(TensorDictModule(lambda out: out.masked_fill(~mask, -torch.inf), ["logits"], ["logits"]))
    return ProbabilisticActor(
        TensorDictSequential(*stages), in_keys=keys, distribution_class=kind, return_log_prob=True
    )


outputs = st.lists(
    st.tuples(
        st.sampled_from(["extra", ("nest", "extra"), "more"]), st.sampled_from([(), (1,), (3,), (0,), (2, 3), (40,)]),
        st.sampled_from(list(DTYPES)), st.sampled_from(["number", "number", "alias"]),
    ),
    max_size=2, unique_by=lambda out: out[0],
).map(tuple)  # fmt: skip

actors = st.builds(Policy, form=st.sampled_from(ACTORS))
policies = st.one_of(
    st.builds(
        Policy,
        form=st.sampled_from(["function", "object", "module", "TensorDictModule", "buffer"]),
        counts=st.booleans(), draws=st.sampled_from([False, False, True]), outputs=outputs,
        input=st.sampled_from(["left alone", "in place", "overwritten", "deleted", "fresh", "nothing returned"]),
        action_dtype=st.sampled_from([None, None, "bool", "uint8", "float32", "bfloat16"]),
        memory=st.sampled_from(["", "", "", "root"]),
    ),
    actors,
    st.just(Policy(form="module", memory="primed")),
)  # fmt: skip


# ---- recipes ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Recipe:
    world: World
    transforms: tuple = ()
    policy: Policy = field(default_factory=lambda: Policy("function"))
    outside: str = ""

    def env(self):
        env = self.world.make()
        kind = OwnTransformed if self.outside == "own class" else TransformedEnv
        stack = [OURS[t]() if isinstance(t, str) else Own(t) for t in self.transforms]
        if self.policy.memory.startswith("primed"):
            stack.append(TensorDictPrimer({"h": Unbounded((1,))}))
        for transform in stack:
            env = kind(env, transform)
        return env


def _apart(stack) -> bool:
    """No two transforms write one key without reading it: that is refused when an env is made."""
    names = [ALONE.get(t, t) for t in stack if isinstance(t, str)]
    return len(names) == len(set(names))


columns = st.lists(st.sampled_from([name for name in OURS if not name.startswith(("own", "hooked"))]), max_size=3)
mixed = st.lists(st.one_of(st.sampled_from(list(OURS)), st.lists(parts, min_size=1, max_size=2).map(tuple)), max_size=3)
outside = st.sampled_from(["", "", "", "own class"])
recipes = st.one_of(
    st.builds(Recipe, worlds, mixed.filter(_apart).map(tuple), policies, outside),
    st.builds(Recipe, worlds, mixed.filter(_apart).map(tuple), policies, outside),
    st.builds(Recipe, plain_worlds, columns.filter(_apart).map(tuple), st.one_of(actors, policies)),
)
