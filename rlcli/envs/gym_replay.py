"""Single envs played again: the probe that finds out whether episodes repeat, and the replay of one open episode.

What is compared, saved and restored is in `replay.py`; engines that step all lanes at once are in `native_replay.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlcli.envs.contract import broken, env_raised
from rlcli.envs.observations import BadValue
from rlcli.envs.replay import fingerprint
from rlcli.errors import EnvError

if TYPE_CHECKING:
    from rlcli.envs.gym_lanes import GymLanes


def repeats(lanes: GymLanes) -> bool:
    """Whether a seeded episode of lane 0 can be repeated exactly; leaves the env in need of a reset.

    Raises
    ------
    EnvError
        The env raised, or showed what is not of its space.
    """
    drawn, send, env, seed = lanes.probe_actions(), lanes.actions.sender(), lanes.inner[0], lanes.seed_of(0, 0)

    def shown(observation: Any) -> str:
        return fingerprint(leaf.read(observation) for leaf in lanes.leaves)

    def trace() -> list[str]:
        sent, taken = None, 0
        try:
            seen = [shown(env.reset(seed=seed)[0])]
            for actions in drawn:
                sent, taken = send(actions)[0], taken + 1
                observation, reward, terminated, truncated, _ = env.step(sent)
                seen += [shown(observation), repr((reward, terminated, truncated))]
                if terminated or truncated:
                    break
        except (EnvError, KeyboardInterrupt):
            raise
        except BaseException as error:
            place = f"env {lanes.name}, lane 0, step {taken} of a first try, seed {seed}"
            raise _refused(lanes, error, "step" if taken else "reset", sent, place) from error
        return seen

    return trace() == trace()


def replay_lane(lanes: GymLanes, lane: int, steps: int) -> bool:
    """Bring one lane `steps` steps into its open episode; False if the episode ended on the way.

    Raises
    ------
    EnvError
        The env raised.
    """
    env, seed, taken = lanes.inner[lane], lanes.seed_of(lane, lanes.episodes[lane]), 0
    try:
        lanes.last[lane], _ = env.reset(seed=seed)
        for sent in lanes.history[len(lanes.history) - steps :]:
            taken += 1
            lanes.last[lane], _, terminated, truncated, _ = env.step(sent[lane])
            if terminated or truncated:
                return False
    except (EnvError, KeyboardInterrupt):
        raise
    except BaseException as error:
        place = f"env {lanes.name}, lane {lane}, step {taken} of a replay, seed {seed}"
        raise _refused(lanes, error, "step" if taken else "reset", None, place) from error
    return True


def _refused(lanes: GymLanes, error: BaseException, during: str, action: Any, place: str) -> EnvError:
    """The sentence for what an env did outside the loop."""
    if isinstance(error, BadValue):
        what = f"{during} returned a bad value"
        return broken(lanes, what, lane=0, expected=error.expected, got=error.got, action=action, place=place)
    return env_raised(lanes, error, 0, during, action, place)
