"""An env of a few choices of which its mask allows some: any other raises."""

import gymnasium as gym
import numpy as np

SPACES = {
    "discrete": (gym.spaces.Discrete(5), (5,)),
    "multi": (gym.spaces.MultiDiscrete([3, 4]), (3, 4)),
    "bits": (gym.spaces.MultiBinary(3), (2, 2, 2)),
}


class Choices(gym.Env):
    """Pays 1 for the last option of the first choice, where it is allowed.

    Parameters
    ----------
    kind : {"discrete", "multi", "bits"}
    shows : {"observation", "info", "method"}
        Where the mask is.
    empty_at : int, optional
        The step of an episode at which nothing is allowed.
    """

    def __init__(self, kind="discrete", shows="observation", empty_at=None):
        self.action_space, self.sizes = SPACES[kind]
        self.kind, self.shows, self.empty_at = kind, shows, empty_at
        self.edges = np.cumsum((0, *self.sizes))
        vector = gym.spaces.Box(-1, 1, (4,), np.float32)
        mask = gym.spaces.MultiBinary(sum(self.sizes))
        both = gym.spaces.Dict(vector=vector, action_mask=mask)
        self.observation_space = both if shows == "observation" else vector

    def _show(self):
        mask = self.np_random.random(self.edges[-1]) < 0.3
        mask[[self.np_random.integers(*each) for each in zip(self.edges, self.edges[1:])]] = True  # noqa: B905
        if self.t in (self.empty_at, 7):  # at its end an episode allows nothing
            mask[:] = False
        self.mask, vector = mask, self.np_random.uniform(-1, 1, 4).astype(np.float32)
        if self.shows == "observation":
            return {"vector": vector, "action_mask": mask.astype(np.int8)}, {}
        return vector, {"legal": mask} if self.shows == "info" else {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._show()

    def step(self, action):
        places = self.edges[:-1] + np.reshape(action, -1)
        if not self.mask[places].all():
            raise RuntimeError(f"{action} is not allowed")
        self.t += 1
        observation, info = self._show()
        return observation, float(places[0] == self.sizes[0] - 1), self.t == 7, False, info


class WithMethod(Choices):
    """The mask is what `action_masks()` says, as sb3-contrib has it."""

    def __init__(self):
        super().__init__(shows="method")

    def action_masks(self):
        return self.mask
