"""What no user means and some type: files that cannot be read, streams that are closed or full, odd terminals."""

import os
import re
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import pytest
from face import open_run


@pytest.mark.parametrize("name", ["binary", "folder", "pipe", "gone"])
def test_a_recipe_that_cannot_be_read_hides_no_other(rlcli, tmp_path, started, name):
    (tmp_path / "recipes").mkdir()
    path = tmp_path / "recipes" / f"{name}.yaml"
    if name == "binary":
        path.write_bytes(b"\xff\xfe\x00")
    elif name == "folder":
        path.mkdir()
    elif name == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("nowhere")
    code, out, _ = rlcli("ls recipes")
    assert code == 0 and "ppo_exact" in out and f"  {name} " in out
    assert f"recipes/{name}.yaml" in out
    for line in (f"cp {name} copy.yaml", f"train recipe={name}"):
        code, _, err = rlcli(line)
        assert code == 2 and f"recipes/{name}.yaml" in err and err.count("\n") == 1
    assert not (tmp_path / "copy.yaml").exists() and started == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("line", ["--help", "ls envs", "train --help", "train --cfg job", "bench workers --help"])
def test_output_that_cannot_be_written_is_a_sentence(process, line):
    done = process("sh", "-c", f"rlcli {line} > /dev/full")
    assert done.returncode == 5 and "cannot write the output: No space left" in done.stderr
    assert done.stderr.count("\n") == 1 and re.match(r"rlcli( \w+)?: ", done.stderr)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error(process, closed):
    assert process("sh", "-c", f"rlcli ls recipes {closed}").returncode == 0
    assert process("sh", "-c", f"rlcli train env.nm=3 {closed}").returncode == 2


@pytest.mark.parametrize(
    "line", ["train --help", "show train --why", "ls envs", "train --cfg job", "bench workers --help"]
)
def test_a_reader_that_leaves_early_hears_nothing(process, line):
    done = process("bash", "-c", f"rlcli {line} | head -n 1; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_that_cannot_spell_a_name_gets_it_spelled_out(process, tmp_path):
    recipes = tmp_path / "work" / "recipes"
    recipes.mkdir()
    (recipes / "own.yaml").write_text("# \xdcn\xefcode\nseed: 3\n", encoding="utf-8")
    done = process("rlcli", "ls", "recipes", PYTHONIOENCODING="ascii:strict")
    assert done.returncode == 0 and r"\xdcn\xefcode" in done.stdout


@pytest.mark.parametrize("columns", ["0", "1", "20", "wide", "100000"])
def test_help_is_a_page_at_any_width(process, columns):
    done = process("rlcli", "bench", "train", "--help", COLUMNS=columns, TERM="")
    assert done.returncode == 0 and 10 < done.stdout.count("\n") < 60


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train --cfg job -m seed=1,2", "Leave out one of them"),
        ("train env.id=${nope}", "env.id has no value"),
        ("doctor nope", "doctor takes no words"),
        ("trian", "'trian' is not a verb; did you mean train? (rlcli --help lists them)"),
        ("train env.id=PongNoFrameskip-v4", "unknown env id 'PongNoFrameskip-v4'; write env=atari env.id=ALE/Pong-v5"),
        ("learn", "'learn' is not a verb; write rlcli train (rlcli --help lists them)"),
        ("enjoy RUN", "'enjoy' is not a verb; write rlcli eval"),
        ("-m train seed=1,2", "'-m' is not a verb. Flags follow the verb: rlcli train -m seed=1,2."),
        ("--force resume RUN", "Flags follow the verb: rlcli resume --force RUN."),
        ("--seed=3", "Flags follow the verb: rlcli VERB --seed=3."),
        ("sac", "'sac' is not a verb; write rlcli train recipe=sac_pendulum (rlcli --help lists them)"),
        ("envs", "'envs' is not a verb; write rlcli ls envs"),
        ("train --force", "no flag --force; runs never overwrite each other; leave it out, and write another run.dir"),
        ("train -help", "there is no flag -help; did you mean --help?"),
        ("eval -help", "there is no flag -help (did you mean --help?). See rlcli eval --help."),
        (
            "train recipe=dqn",
            "did you mean dqn_async or dqn_atari or dqn_cartpole or dqn_exact or dqn_pong or dqn_recurrent?",
        ),
        ("train --recipe-dir", "--recipe-dir FOLDER"),
        ("help memory nonsense", "help shows one topic: got memory nonsense. Write rlcli help memory."),
        ("completion bash zsh", "completion is for one shell: got bash zsh"),
        ("bench workers ruonds=9", "did you mean rounds?"),
    ],
)
def test_a_mistake_is_one_sentence(rlcli, started, line, words, monkeypatch):
    monkeypatch.delitem(gym.registry, "PongNoFrameskip-v4", raising=False)  # ale-py's, where a test has loaded it
    code, out, err = rlcli(line)
    assert (code, out, started) == (2, "", []) and words in err and err.count("\n") == 1


NOISY = """
import warnings
import gymnasium as gym
from rlcli.config.registry import register_env

class Noisy(gym.Wrapper):
    def reset(self, **options):
        print("a new episode", flush=True)
        warnings.warn(f"an episode after {self.steps} steps")
        return super().reset(**options)

    steps = 0

    def step(self, action):
        self.steps += 1
        return super().step(action)

@register_env("noisy")
def noisy():
    return Noisy(gym.make("CartPole-v1"))
"""


# two runs, each with a terminal of its own, forked from a process that has had a run and so has loaded all for both
TWO_TERMINALS = """
import gc, os, signal, sys
import rlcli.build, rlcli.report.live
from rlcli.cli.main import main
signal.signal(signal.SIGHUP, signal.SIG_IGN)
brief = ["total_frames=64", "collector.frames_per_batch=64", "optim.epochs=1", "run.eval_episodes=0"]
main(["train", *brief, "console=off", "run.dir=before"])
gc.freeze()  # else an end of Python looks through all of it
for console, terminal in zip(("live", "plain"), map(int, sys.argv[1:])):
    if os.fork() == 0:
        os.setsid()
        for stream in range(3):
            os.dup2(terminal, stream)
        os.closerange(3, 256)
        sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
        words = ["train", "--import", "noisy_env", "env.id=noisy", "total_frames=2048", "run.eval_episodes=2"]
        sys.exit(main([*words, f"console={console}", f"run.dir={console}", "env.num=2", "optim.epochs=2"]))
for terminal in map(int, sys.argv[1:]):
    os.close(terminal)
os._exit(max(os.waitstatus_to_exitcode(os.wait()[1]) != 0 for _ in range(2)))
"""


@pytest.fixture(scope="module")
def left_terminals(tmp_path_factory):
    """The folder of two runs whose terminals went away when they had begun, and how they ended."""
    folder = tmp_path_factory.mktemp("left_terminals")
    (folder / "noisy_env.py").write_text(NOISY)
    pairs = [os.openpty() for _ in range(2)]
    slaves = [slave for _, slave in pairs]
    started = subprocess.Popen(
        [sys.executable, "-c", TWO_TERMINALS, *map(str, slaves)],
        cwd=folder, pass_fds=slaves,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TERM": "xterm"},
    )  # fmt: skip
    for (master, slave), console in zip(pairs, ("live", "plain"), strict=True):
        os.close(slave)
        seen = b""
        while f"run {console}".encode() not in seen:
            seen += os.read(master, 4096)
        os.close(master)
    assert started.wait(120) == 0
    return folder


@pytest.mark.parametrize("console", ["live", "plain"])
def test_a_terminal_that_goes_away_without_a_signal_ends_no_run(left_terminals, console):
    """A job that was disowned: whatever is printed from then on, the views' lines, warnings or an env's own words."""
    assert open_run(left_terminals / console).summary["status"] == "done"
