"""Films of evaluations, and envs that fail when all is done: the result is returned, and what failed is named."""

from __future__ import annotations

import gc
import os
import sys

import numpy as np
import pytest
from face import main

import rlcli
from rlcli.build import evaluate
from rlcli.errors import EnvError

BRIEF = ["total_frames=512", "collector.frames_per_batch=256", "run.eval_episodes=4", "console=off", "logger=none"]
CARTPOLE = "gymnasium.envs.classic_control.cartpole.CartPoleEnv"


def _picture(env):
    """A picture of the state that needs no package that draws."""
    return np.resize(np.ascontiguousarray(env.state, np.float64).view(np.uint8), (32, 32, 3))


def test_a_result_is_shown_and_kept_where_its_film_fails_and_the_film_opens_no_window(run, monkeypatch):
    pytest.importorskip("imageio")
    monkeypatch.delenv("SDL_VIDEODRIVER", raising=False)
    drivers, shown = [], []

    def breaks(env):
        drivers.append(os.environ.get("SDL_VIDEODRIVER"))
        raise RuntimeError("no display")

    monkeypatch.setattr(f"{CARTPOLE}.render", breaks)
    run("run.dir=r", *BRIEF)
    found = evaluate("r", episodes=3, video="film.gif", show=shown.append)
    assert len(found.returns) == 3 and [len(each.returns) for each in shown] == [3]
    assert isinstance(found.film_error, EnvError) and "no display" in str(found.film_error)
    assert drivers == ["dummy"] and "SDL_VIDEODRIVER" not in os.environ
    with pytest.warns(UserWarning, match=r"no video: .*cannot be rendered.*no display"):
        assert rlcli.evaluate("r", 3, video="film.gif").returns.tolist() == found.returns.tolist()
    assert main(["eval", "r", "--video", "film.gif", "console=off"]) == EnvError.exit_code


def test_a_film_that_finds_the_disk_full_is_named_and_nothing_is_printed_of_it(run, monkeypatch):
    pytest.importorskip("imageio")
    monkeypatch.setattr(f"{CARTPOLE}.render", _picture)
    run("run.dir=r", *BRIEF)
    os.symlink("/dev/full", "film.gif")
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", lambda seen: unraisable.append(str(seen.exc_value)))
    found = evaluate("r", episodes=1, video="film.gif")
    assert "cannot write film.gif" in str(found.film_error) and "No space left" in str(found.film_error)
    del found
    gc.collect()
    assert not unraisable


def test_envs_that_cannot_be_closed_lose_no_result(run, monkeypatch):
    def breaks(env):
        raise OSError("the film of this wrapper cannot be written")

    monkeypatch.setattr(f"{CARTPOLE}.close", breaks)
    done = run("run.dir=r", "env.mode=serial", *BRIEF)
    assert len(done.summary["evaluation"]["returns"]) == 4
    assert "OSError: the film of this wrapper" in str(done.summary["warnings"])
    with pytest.warns(UserWarning, match="closing the envs failed"):
        assert len(evaluate("r", episodes=2).returns) == 2
