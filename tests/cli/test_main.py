"""Verbs, flags, exit codes and what is printed when something is wrong."""

import re
import signal
import sys

import gymnasium
import pytest
from face import from_dict

from rlcli import errors
from rlcli.cli import main as main_module

HEAVY = ("torch", "tensordict", "hydra", "omegaconf", "rich", "numpy", "numba", "gymnasium")


def modules_after(process, *words: str) -> set[str]:
    """Top packages that a command imported, by the interpreter's own account."""
    done = process("rlcli", *words, PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode in (0, 2), done.stderr
    return {line.split("|")[-1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}


def test_help_imports_nothing_heavy(process):
    assert not modules_after(process, "--help") & set(HEAVY)


def test_the_help_of_a_verb_and_completion_import_nothing_heavy(process):
    assert not modules_after(process, "train", "--help") & {"torch", "hydra", "omegaconf", "rich"}
    assert not modules_after(process, "__complete", "rlcli train env.") & {
        "torch",
        "hydra",
        "omegaconf",
        "rich",
    }


def test_a_mistyped_override_is_answered_before_torch(process):
    imported = modules_after(process, "train", "collector.frames_per_bacth=3")
    assert "hydra" in imported and not imported & {"torch", "tensordict"}


def test_importing_the_package_imports_nothing_heavy(process):
    program = f"import rlcli, sys; rlcli.train; assert not set(sys.modules) & {set(HEAVY)!r}"
    assert process(sys.executable, "-c", program).returncode == 0


def test_help_lists_every_verb(rlcli):
    code, out, _ = rlcli("--help")
    assert code == 0
    for verb in ["train", "collect", "resume", "eval", "ls", "cp", "show", "doctor", "bench", "completion"]:
        assert f"\n  {verb} " in out


@pytest.mark.parametrize("verb", ["train", "collect"])
def test_help_of_a_verb_shows_every_key_with_its_meaning(rlcli, verb):
    from rlcli.config.option import leaves
    from rlcli.config.schemas import VERBS, read_with

    code, out, _ = rlcli(f"{verb} --help")
    squeezed = " ".join(out.split())
    assert code == 0
    for leaf in leaves(VERBS[verb]).values():
        when = read_with(VERBS[verb], leaf)
        if leaf.key != "recipe" and not leaf.key.endswith(".kind"):
            assert (f"  {leaf.key}=" in out) == (when is not None)
            assert when is None or leaf.option.help in squeezed
            assert not when or f"({when})" in squeezed
    assert "memory full | compact | exact" in squeezed


def test_help_says_with_which_choices_an_option_is_read_and_leaves_out_what_a_verb_never_reads(rlcli):
    squeezed = " ".join(rlcli("train --help")[1].split())
    assert "loss.kl_target=0.01 target KL divergence per batch [> 0] (with loss=ppo_kl)" in squeezed
    assert "environments stepped together (sub-environments) [>= 1 and <= 1000000]; 1 with loss=dqn" in squeezed
    assert "otherwise 0.01 [auto | >= 0] (not with loss=dqn | sac)" in squeezed
    assert "memory.fill_value" not in squeezed
    page = rlcli("collect --help")[1]
    assert "run.keep" not in page and "policy.dueling" not in page and "memory.fill_value" in page


@pytest.mark.parametrize(
    "verb",
    [
        "plan",
        "resume",
        "eval",
        "inspect",
        "verify",
        "prune",
        "ls",
        "cp",
        "show",
        "doctor",
        "bench",
        "help",
        "completion",
    ],
)
def test_the_other_verbs_have_help(rlcli, verb):
    code, out, _ = rlcli(f"{verb} --help")
    assert code == 0 and out.startswith(f"usage: rlcli {'VERB' if verb == 'help' else verb}")
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("trian", "did you mean train?"),
        ("env.num=3", "rlcli train env.num=3"),
        ("train --mutlirun", "--mutlirun"),
        ("train --mutlirun", "did you mean --multirun?"),
        ("train --seed 3", "there is no flag --seed; write seed=3"),
        ("train -s 3 --env-id CartPole-v1", "no flag --env-id; write env.id=CartPole-v1"),
        ("plan train --total-timesteps=1e6", "no flag --total-timesteps; write total_frames=1e6"),
        ("show train --n-steps 16 --n-envs 4", "write collector.frames_per_batch=64"),
        ("train --seed", "no flag --seed; write seed=..."),
        ("train --import", "--import needs a value"),
        ("train --import not_there_at_all", "no package 'not_there_at_all'"),
        ("train --import ../x", "'../x' is not the name of a package (--import). Give its name"),
        ("train --recipe-dir nowhere", "no folder nowhere"),
        ("train --resolve", "--cfg job --resolve"),
        ("train -p env", "--cfg job --package KEY"),
        ("train -m --package=env seed=1,2", "--package goes with --cfg"),
        ("show train --why --components", "Leave out one of them"),
        ("plan train -m seed=1,2", "rlcli plan has no flag -m; rlcli train and collect have. Give each key one value"),
        ("show --cfg job", "rlcli show has no flag --cfg"),
        ("plan train seed=1,2", "is a sweep over several values; give one value"),
        ("train seed=1,2", "add -m to run them all"),
        ("train -m seed=3,0,1,0", "names 0 twice"),
        ("train -m seed=1,1.0", "names 1 twice"),
        ("train -m seed=1,01", "names 1 twice"),
        ("train -m seed=2,'2'", "names 2 twice"),
        ("train -m env.normalize_reward=yes,on", "names true twice"),
        ("train -m policy.hidden=[64],['64']", "names [64] twice"),
        ("train env=[gym]", "env=[gym]: env is chosen by one name; did you mean gym? (choices: gym | "),
        ("train env=null", "env=null: env is chosen by one name (choices: gym | "),
        ("train recipe=[ppo_exact]", "recipe=[ppo_exact]: recipe is chosen by one name; did you mean ppo_exact?"),
        ("train ppo_exact", "did you mean recipe=ppo_exact?"),
        ("resume", "needs a run folder"),
        ("resume runs/nothing", "no run folder 'runs/nothing'"),
        ("eval", "needs a run folder"),
        ("eval . --episodes 0", ">= 1"),
        ("eval . --episodes many", "--episodes"),
        ("eval . --max-steps 0", "--max-steps is 0. Allowed: >= 1."),
        ("eval .", "this is not a run folder"),
        ("resume .", "this is not a run folder"),
        ("inspect .", "there is nothing to inspect here"),
        ("verify .", "there is nothing with checksums here"),
        ("cp", "a recipe and a file"),
        ("verify --forse RUN", "there is no flag --forse"),
        ("ls --hepl", "there is no flag --hepl (did you mean --help?)"),
        ("cp ppo_exat x.yaml", "did you mean ppo_exact?"),
        ("ls recipies", "did you mean recipes?"),
        ("completion tcsh", "bash, zsh, fish"),
    ],
)
def test_a_wrong_command_is_one_sentence_and_exit_code_2(rlcli, line, words):
    code, out, err = rlcli(line)
    assert (code, out) == (2, "")
    assert words in err and "Traceback" not in err


@pytest.mark.parametrize("verb", ["train", "collect", "plan", "show", "resume"])
def test_a_flag_that_is_suggested_is_one_that_the_verb_has(rlcli, verb, monkeypatch):
    """Of every flag that any verb has, mistyped: what is suggested is in the verb's own help or said to be a key."""
    has = set(re.findall(r"--[a-z][a-z-]+", rlcli(f"{verb} --help")[1])) | {"--help", "--debug", "--import"}
    has |= {"--recipe-dir"}
    for flag in ("--multirun", "--resolve", "--package", "--force", "--why", "--components", "--json", "--debug"):
        if verb == "resume":
            with pytest.raises(errors.ConfigError) as refused:
                from_dict("train", {}, [f"{flag}e"])
            err = str(refused.value)
        else:
            code, _, err = rlcli(f"{verb} {flag}e")
            assert code == 2
        suggested = re.findall(r"did you mean (.*?)\?", err)
        assert {word for word in " ".join(suggested).split() if word.startswith("--")} <= has, err
        if flag in has:
            assert flag in " ".join(suggested).split(), err


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.ConfigError, 2),
        (errors.EnvError, 3),
        (errors.DamagedDataError, 4),
        (errors.ResourceError, 5),
        (errors.NumericsError, 6),
        (errors.StoppedSafely, 75),
    ],
)
def test_an_error_becomes_its_exit_code_and_a_sentence(rlcli, started, monkeypatch, kind, code):
    def fail(cfg, overrides):
        raise kind("it went wrong", where="here", fix="Do that.")

    monkeypatch.setattr(sys.modules["rlcli.build"], "train", fail)
    got, _, err = rlcli("train")
    assert got == code
    assert "it went wrong (here). Do that." in err and "Traceback" not in err


def test_debug_shows_the_traceback(rlcli, started, monkeypatch):
    def fail(cfg, overrides):
        raise errors.EnvError("it went wrong")

    monkeypatch.setattr(sys.modules["rlcli.build"], "train", fail)
    with pytest.raises(errors.EnvError):
        rlcli("train --debug")


def test_an_unforeseen_error_is_named_and_ends_with_1(rlcli, started, monkeypatch):
    def fail(cfg, overrides):
        raise ZeroDivisionError("of something")

    monkeypatch.setattr(sys.modules["rlcli.build"], "train", fail)
    code, _, err = rlcli("train")
    assert code == 1 and "--debug" in err
    assert re.search(
        r'ZeroDivisionError: of something \(\S*test_main\.py:\d+: raise ZeroDivisionError\("of something"\)\)', err
    )


def test_an_interrupt_that_nobody_handles_ends_with_130(rlcli, monkeypatch):
    def interrupted(words, recipe_dirs):
        signal.raise_signal(signal.SIGINT)

    from rlcli.cli import doctor

    monkeypatch.setattr(doctor, "run", interrupted)
    assert rlcli("doctor")[0] == 130


def test_a_reader_that_goes_away_is_no_error(process):
    done = process("bash", "-c", "rlcli train --help | head -1; exit ${PIPESTATUS[0]}")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_table_of_verbs_names_functions_that_exist():
    for verb in main_module.VERBS:
        assert callable(main_module.runner(verb))


def test_a_warning_takes_one_line_without_gymnasiums_colours_and_comes_once(rlcli, monkeypatch):
    def warns(words, recipe_dirs):
        gymnasium.logger.warn("Box high's\nprecision")
        gymnasium.logger.warn("Box high's\nprecision")
        return 0

    monkeypatch.setattr("rlcli.cli.main.runner", lambda verb: warns)
    assert rlcli("ls") == (0, "", "warning: Box high's precision\n")
