"""Vector engines behind one face: step all lanes, reset chosen lanes at once, give lanes seeds.

Here are the face and those over gymnasium's vector envs.  Which engine gets which face, and which none, is in
`vector_backends.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils.seeding import np_random
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from rlcli.arguments import refuse
from rlcli.errors import EnvError
from rlcli.vec_envs.observations import BadValue, described

PROBE_STEPS = 1000  # random steps in which some episode has to end
TRACE_STEPS = 16  # steps that a finished lane's new episode is compared over

Seeds = Sequence[int | None]


class VectorBackend:
    """Step N envs by one call."""

    n: int
    name: str
    observation_space: gym.Space
    action_space: gym.Space
    # of the last step, arrays with the envs first; of ended ones as it was then
    info: Mapping[str, Any] = MappingProxyType({})
    seeds_episodes = False  # `reset` gives each env the very seed it is handed: episodes can be replayed
    seeds_every = False  # and needs one for every episode
    resets_running_lanes = True  # an env can be reset before its episode has ended
    limit: int | None = None  # steps after which whoever steps it truncates its episodes
    device: Any = None  # where observations lie that are tensors

    def step(self, actions: np.ndarray) -> tuple[Any, Any, Any, Any]:
        """Return observation (true final ones too), reward, terminated, truncated, with the envs first."""
        raise NotImplementedError

    def reset(self, lanes: Sequence[int], seeds: Seeds) -> Any:
        """Begin episodes in these lanes and in no other; their observations, in the order of `lanes`."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the engine."""


def check_outcome(lanes: int, reward: Any, terminated: Any, truncated: Any) -> None:
    """Raise BadValue at what is not one number and two flags a lane: numpy would broadcast or cast it."""
    shape = (lanes,)
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if flag.__class__ is not np.ndarray or flag.dtype.kind != "b" or flag.shape != shape:
            raise BadValue(f"a bool array {shape} as {name}", described(flag))
    if reward.__class__ is not np.ndarray or reward.dtype.kind not in "fiu" or reward.shape != shape:
        raise BadValue(f"an array {shape} of numbers as reward", described(reward))


# ---- gymnasium's vector envs -----------------------------------------------------------------------------------------
class VectorEngine(VectorBackend):
    """Base of the faces over gymnasium's vector envs."""

    def __init__(self, vector: VectorEnv) -> None:
        self.vector, self.n, self.name = vector, vector.num_envs, name_of(vector)
        self.observation_space, self.action_space = vector.single_observation_space, vector.single_action_space

    def step(self, actions):
        *given, self.info = self.vector.step(actions)
        return given

    def close(self) -> None:
        self.vector.close()


def name_of(vector: VectorEnv) -> str:
    """Return what error messages call a vector env."""
    return vector.spec.id if vector.spec is not None else type(vector.unwrapped).__name__


def take(observation: Any, lanes: Sequence[int]) -> Any:
    """Copy these envs of a (nested dict of) array with the envs first."""
    if isinstance(observation, dict):
        return {name: take(part, lanes) for name, part in observation.items()}
    return observation[list(lanes)]


def bytes_of(observation: Any, lanes: Sequence[int]) -> list[bytes]:
    """Return the bytes of these lanes."""
    if isinstance(observation, dict):
        return [part for name in sorted(observation) for part in bytes_of(observation[name], lanes)]
    return [np.ascontiguousarray(observation[list(lanes)]).tobytes()]


# ---- lanes are reset by a mask ---------------------------------------------------------------------------------------
class MaskedEngine(VectorEngine):
    """Step a vector env that resets the envs of a `reset_mask`, as a probe has shown."""

    def __init__(self, vector: VectorEnv) -> None:
        super().__init__(vector)
        vector.reset()  # partial resets are only allowed after a whole one

    def reset(self, lanes, seeds):
        seed = self._seed(lanes, seeds)
        observation = self.vector.reset(seed=seed)[0] if len(lanes) == self.n else self._masked(lanes, seed)
        return take(observation, lanes)

    def _masked(self, lanes: Sequence[int], seed: Any) -> Any:
        mask = np.zeros(self.n, np.bool_)
        mask[list(lanes)] = True
        return self.vector.reset(seed=seed, options={"reset_mask": mask})[0]

    def _seed(self, lanes: Sequence[int], seeds: Seeds) -> Any:
        """Return what the engine is given: one number, from which it seeds all of its lanes, or none."""
        return seeds[0] if len(lanes) == self.n else None

    # ---- probes --------------------------------------------------------------------------------------------------
    def spares_other_lanes(self) -> bool:
        """Say whether resetting lane 0 leaves what the other lanes show; costs two resets and a step."""
        if self.n == 1:
            return True
        others = range(1, self.n)
        self.vector.reset(seed=0)
        before = bytes_of(self.vector.step(self.vector.action_space.sample())[0], others)
        return before == bytes_of(self._masked([0], None), others)

    def replaces_next_reset(self) -> bool | None:
        """Say whether a masked reset takes the place of the next step's; None if a probe cannot tell."""
        self.vector.action_space.seed(0)
        self.vector.reset(seed=0)
        lane = next((int(over[0]) for over in self._ends(PROBE_STEPS) if len(over)), None)
        if lane is None:
            return None
        finished = self._trace(lane)
        # now a step without an end, after which no reset is due; a whole reset need not call one off
        if all(lane in over for over in self._ends(3)):
            return None
        running = self._trace(lane)
        return None if all(row == running[0] for row in running) else finished == running

    def _ends(self, steps: int) -> Iterator[np.ndarray]:
        """Give the envs that end at each of so many random steps."""
        for _ in range(steps):
            _, _, terminated, truncated, _ = self.vector.step(self.vector.action_space.sample())
            yield np.flatnonzero(terminated | truncated)

    def _trace(self, lane: int) -> list[tuple[list[bytes], bytes]]:
        """Return what a lane shows and pays from a masked, seeded reset on."""
        rows = [(bytes_of(self._masked([lane], 1), [lane]), np.float64(0).tobytes())]
        self.vector.action_space.seed(1)
        for _ in range(TRACE_STEPS):
            observation, reward, terminated, truncated, _ = self.vector.step(self.vector.action_space.sample())
            rows.append((bytes_of(observation, [lane]), np.float64(reward[lane]).tobytes()))
            if terminated[lane] or truncated[lane]:
                break
        return rows


class SeededEngine(MaskedEngine):
    """Step gymnasium's `SyncVectorEnv` or `AsyncVectorEnv`: one seed an env, whichever are reset."""

    seeds_episodes = True

    def _seed(self, lanes, seeds):
        given = dict(zip(lanes, seeds, strict=True))
        return [given.get(lane) for lane in range(self.n)]


class AtariEngine(MaskedEngine):
    """Step ale-py's threaded Atari engine, whose own preprocessing gives other pixels than gymnasium's."""

    seeds_episodes = True

    def __init__(self, vector: VectorEnv) -> None:
        super().__init__(vector)
        stacks: Any = vector.single_observation_space
        self._one = stacks.shape[0] == 1
        if self._one:
            self.observation_space = gym.spaces.Box(stacks.low[0], stacks.high[0], dtype=stacks.dtype)

    def step(self, actions):
        observation, *rest = super().step(actions)
        return observation[:, 0] if self._one else observation, *rest

    def reset(self, lanes, seeds):
        observation = super().reset(lanes, seeds)
        return observation[:, 0] if self._one else observation

    def _seed(self, lanes, seeds):
        if all(seed is None for seed in seeds):
            return None
        # the mask's order is that of the lanes' numbers; -1: go on with its own stream
        given = dict(zip(lanes, seeds, strict=True))
        return np.array([-1 if given[lane] is None else given[lane] for lane in sorted(given)], np.int64)


# ---- lanes reset themselves within the step --------------------------------------------------------------------------
class SameStepEngine(VectorEngine):
    """Step a gymnasium vector env with `AutoresetMode.SAME_STEP`; only first episodes can be seeded."""

    resets_running_lanes = False

    def __init__(self, vector: VectorEnv) -> None:
        super().__init__(vector)
        vector.reset()
        self._after: Any = None  # what the last step returned, with the first observations
        self._begun: set[int] = set()  # of these lanes

    def step(self, actions):
        observation, reward, terminated, truncated, info = self.vector.step(actions)
        check_outcome(self.n, reward, terminated, truncated)
        over = np.flatnonzero(terminated | truncated).tolist()
        self._after, self._begun = observation, set(over)
        self.info = info.get("final_info", {})
        if over:
            finals = info.get("final_obs")
            if finals is None:
                raise BadValue("info['final_obs'] from an engine that resets within the step", "no such key")
            if any(share_memory(finals[lane], self._after) for lane in over):
                raise BadValue(
                    "info['final_obs'] in memory of its own",
                    "a view of the observations that step returns, which the reset has written over",
                )
            observation = copy.deepcopy(observation)
            for lane in over:
                _put(observation, finals[lane], lane)
        return observation, reward, terminated, truncated

    def overwrites_finals(self) -> bool:
        """Say whether a reset writes into the last step's observation; costs a step and two resets."""
        vector: Any = self.vector.unwrapped
        if isinstance(vector, SyncVectorEnv):
            return _resets_in_place(vector.envs[0])
        if isinstance(vector, AsyncVectorEnv):
            env = vector.env_fns[0]()
            try:
                return _resets_in_place(env)
            finally:
                env.close()
        return False

    def reset(self, lanes, seeds):
        if self._begun.issuperset(lanes) and all(seed is None for seed in seeds):
            self._begun -= set(lanes)
            return take(self._after, lanes)
        refuse(
            len(lanes) < self.n and self._begun.issuperset(lanes), "this engine cannot seed a single env",
            where=self.name, why="it resets finished envs on its own", fix="Reset all envs after set_seed.",
            error=EnvError,
        )  # fmt: skip
        refuse(
            len(lanes) < self.n, "this engine cannot reset an env whose episode is still running", where=self.name,
            why="it resets finished envs on its own, and no others",
            fix="Use env.mode=serial; or leave out what cuts episodes, such as max_frames_per_traj.", error=EnvError,
        )  # fmt: skip
        self._begun = set()
        return take(self.vector.reset(seed=seeds[0])[0], lanes)


def _resets_in_place(env: gym.Env) -> bool:
    env.reset()
    last = env.step(env.action_space.sample())[0]
    return share_memory(last, env.reset()[0])


def share_memory(a: Any, b: Any) -> bool:
    """Say whether an array of one observation lies where one of the other does."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return any(share_memory(part, b[name]) for name, part in a.items() if name in b)
    return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.shares_memory(a, b)


def _put(observation: Any, final: Any, lane: int) -> None:
    """Write one lane's final observation over what the lane shows; a BadValue where the two do not fit."""
    if isinstance(observation, dict):
        if not isinstance(final, dict) or final.keys() != observation.keys():
            raise BadValue(f"a dict of {sorted(observation)} as final_obs", f"a {type(final).__name__}")
        for name, part in observation.items():
            _put(part, final[name], lane)
        return
    last = np.asarray(final)
    if last.shape != observation.shape[1:] or last.dtype != observation.dtype:
        expected = f"shape {observation.shape[1:]} {observation.dtype} as final_obs"
        raise BadValue(expected, f"shape {last.shape} {last.dtype}")
    observation[lane] = last


# ---- lanes are reset by writing their state --------------------------------------------------------------------------
class StateEngine(VectorEngine):
    """Step a vector env whose state lies in public arrays, and reset by writing an env's part of them."""

    seeds_episodes = True

    def __init__(self, vector: Any) -> None:
        super().__init__(vector)
        self._streams: list[np.random.Generator] = [np_random()[0] for _ in range(self.n)]
        vector.reset(seed=0)  # allocates the state that `reset` writes into

    def _seeded(self, lanes: Sequence[int], seeds: Seeds) -> list[np.random.Generator]:
        """Return the streams of these lanes, begun anew where there is a seed."""
        for lane, seed in zip(lanes, seeds, strict=True):
            if seed is not None:
                self._streams[lane] = np_random(seed)[0]
        return [self._streams[lane] for lane in lanes]


class CartPoleEngine(StateEngine):
    """Step the array CartPole; seeded alike, it gives the bits of N single ones."""

    def reset(self, lanes, seeds):
        vector: Any = self.vector
        lanes = list(lanes)
        for lane, stream in zip(lanes, self._seeded(lanes, seeds), strict=True):
            vector.state[:, lane] = stream.uniform(vector.low, vector.high, size=4)
        vector.steps[lanes] = 0
        vector.prev_done[lanes] = False  # or its next step would reset them a second time
        return vector.state.T[lanes].astype(np.float32)


class JaxEngine(StateEngine):
    """Step the functional engines of gymnasium's `phys2d`, which need jax."""

    def step(self, actions):
        observation, reward, terminated, truncated = super().step(actions)
        return np.asarray(observation), np.asarray(reward), np.asarray(terminated), np.asarray(truncated)

    def reset(self, lanes, seeds):
        import jax

        vector: Any = self.vector
        draws = [stream.integers(2**32, dtype=np.uint32) for stream in self._seeded(lanes, seeds)]
        keys = jax.numpy.stack([jax.random.PRNGKey(draw) for draw in draws])
        lanes = np.asarray(lanes)
        first = vector.func_env.initial(rng=keys)
        vector.state = vector.state.at[lanes].set(first)
        vector.steps = vector.steps.at[lanes].set(0)
        vector.prev_done = vector.prev_done.at[lanes].set(False)  # or its next step would reset them a second time
        return np.asarray(vector.func_env.observation(first, keys))
