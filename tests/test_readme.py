"""The README and the help pages are true: snippets run, commands are accepted, tables agree with the code.

Snippets and commands run in processes of their own, because they register names.
"""

import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from forked_programs import Ran, run_forked
from test_layers import LAYERS, PACKAGE

from rlcli.runs.sweep import note_sweep

README = (PACKAGE.parent / "README.md").read_text(encoding="utf-8")
TOPICS = {page.stem: page.read_text(encoding="utf-8") for page in sorted((PACKAGE / "help").glob("*.md"))}
PAGES = "\n".join([README, *TOPICS.values()])
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGES, re.M | re.S)  # (language, text)

LOADED = """
from rlcli.collectors import *
from rlcli.config import compose
from rlcli.data import *
from rlcli.envs import *
from rlcli.build import resume, train
from rlcli.learning import gradient_ppo
from rlcli.modules import *
from rlcli.objectives import *
compose.plan("train", [])
"""


def files() -> dict[str, str]:
    """Blocks whose first line names a file, `# my_rl/__init__.py`, and recipes by the command that runs them."""
    named = {match[1]: text for _, text in BLOCKS if (match := re.match(r"# (\S+\.py)\n", text))}
    recipes = [
        (re.search(r"^# command: rlcli \w+ recipe=(\w+)$", text, re.M), text) for kind, text in BLOCKS if kind == "yaml"
    ]
    return named | {f"recipes/{match[1]}.yaml": text for match, text in recipes if match}


def snippets() -> str:
    """The other python blocks, in order, as one program, over fewer frames."""
    blocks = (text for language, text in BLOCKS if language == "python" and text not in files().values())
    return "\n".join(blocks).replace("total_frames=8192", "total_frames=2048")


def commands() -> list[str]:
    """Every `rlcli ...` line of a block without a language, and of inline code that is a whole command."""
    lines = [line for language, text in BLOCKS if not language for line in text.splitlines()]
    found = [match[1] for line in lines if (match := re.match(r"(rlcli \w+(?: .*?)?)\s*(?:#.*)?$", line))]
    found += re.findall(r'eval "\$\((rlcli [^)]*)\)"', PAGES)
    found += re.findall(r"`(rlcli (?:train|collect|resume|cp|bench|ls) [^`]*)`", PAGES)
    return list(dict.fromkeys(re.sub(r"^rlcli (bench) NAME$", r"rlcli \1 collect", line) for line in found))


def words_of(command: str) -> list[str]:
    """What is tried in place of a command: jobs are composed, not run, and what needs a run shows its help."""
    stands_for = {"RUN": "runs/example", "NAME": "ppo_exact", "FILE": "copy.yaml", "SWEEP": "runs/sweep", "N": "0"}
    verb, *rest = [stands_for.get(word, word) for word in command.split()[1:]]
    if verb in ("train", "collect") and not {"--help", "--cfg"} & set(rest):
        rest += ["--cfg", "job"]
    return [verb, *rest, "--help"] if verb in ("resume", "eval", "inspect", "verify", "prune") else [verb, *rest]


def bench_of(command: str) -> str | None:
    match = re.match(r"rlcli bench (\w+)$", command)
    return match[1] if match else None


def training_of_a_users_own_env() -> str:
    (command,) = [line for line in commands() if "--import my_rl" in line]
    words = [*command.split()[1:], "total_frames=2048", "console=off", "run.dir=run", "run.eval_episodes=2"]
    words = [word for word in words if word != "total_frames=30_000"]
    return f"import sys; from rlcli.cli.main import main; sys.exit(main({words}))"


def algorithm_from_its_page() -> str:
    """The commands of the page about algorithms, run in turn, over few frames."""
    (block,) = [text for language, text in BLOCKS if not language and "--import my_spo" in text]
    short = {"total_frames=20_000": "total_frames=1024", "total_frames=40_000": "total_frames=2048"}
    quiet = ["console=off", "logger=none", "run.eval_episodes=0"]
    lines = [[short.get(word, word) for word in line.split()[1:]] for line in block.splitlines()]
    once = [*quiet, "optim.epochs=1"]
    told = [[*line, *once, *(["total_frames=1024"] if "-m" in line else [])] for line in lines if line[0] == "train"]
    (again,) = [line for line in lines if line[0] == "resume"]
    assert all("--import" in line for line in lines)  # they are run in one process, which hides a missing one
    (soft,) = [line.split()[1:] for line in commands() if line.startswith("rlcli train --import my_soft")]
    told.append(
        [*soft, *quiet, "total_frames=1024", "collector.init_random_frames=512", "collector.frames_per_batch=256"]
    )
    wrong = [*told[0][:-1], "run.dir=runs/wrong", "loss.kwargs={width: 0.3, foo: 1}"]
    return f"""
from rlcli.cli.main import main
recipe = ["train", "--import", "my_spo", "recipe=spo", "--recipe-dir", "recipes", *{once}, "total_frames=1024"]
print([main(words) for words in [{told[0]}, {again}, *{told[1:]}, recipe, {wrong}]])
"""


def parts_of_a_users_own() -> str:
    """The commands with a part of every kind, over few frames."""
    lines = [line.split()[1:] for line in commands() if "--import my_parts" in line]
    short = ["total_frames=512", "collector.frames_per_batch=128", "sampler.batch_size=64", "console=off"]
    short += ["env.mode=serial", "run.eval_episodes=2"]
    told = [[*words, *short, f"run.dir=runs/{number}"] for number, words in enumerate(lines)]
    return f"from rlcli.cli.main import main\nprint([main(words) for words in {told}])"


def commands_tried() -> dict[str, list[str]]:
    return {line: words_of(line) for line in commands() if not bench_of(line) and " -m " not in line}


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> dict[str, tuple[Ran, Path]]:
    """What became of each program, and the folder that it ran in, which held the files that are shown."""
    trying = f"""
import contextlib, io, json
from rlcli.cli.main import main
found = {{}}
for command, words in {commands_tried()!r}.items():
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        found[command] = [main(words), err.getvalue()]
print(json.dumps(found))
"""
    programs = {
        "snippets": snippets(),
        "training": training_of_a_users_own_env(),
        "parts": parts_of_a_users_own(),
        "algorithm": algorithm_from_its_page(),
        "recipes": "from rlcli.cli.main import main; main(['ls', 'recipes'])",
        "commands": trying,
    }
    folders = {name: tmp_path_factory.mktemp(name) for name in programs}
    (folders["commands"] / "runs").mkdir()
    note_sweep(folders["commands"] / "runs" / "sweep", "train", [(["seed=0"], "0"), (["seed=1"], "1")], {})
    for folder in folders.values():
        for name, text in files().items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    done = run_forked(
        {name: (program, folders[name]) for name, program in programs.items()},
        tmp_path_factory.mktemp("ran"),
        first=LOADED,
    )
    return {name: (done[name], folders[name]) for name in programs}


def test_it_begins_with_the_two_commands():
    assert BLOCKS[0] == (
        "",
        'pip install -e . && rlcli train recipe=ppo_compact\npip install -e ".[test]" && pytest -n 2 --dist loadfile\n',
    )


def test_the_python_snippets_run(ran):
    assert len(snippets()) > 500
    done, _ = ran["snippets"]
    assert done.returncode == 0, done.stderr
    assert "torch.Size([8, 2048])" in done.stdout  # a segment that was read back


def test_a_users_own_env_and_policy_train(ran):
    done, folder = ran["training"]
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["env"] == "Thermostat" and summary["frames"] == 2048


def test_a_part_of_every_kind_is_written_as_its_page_says(ran):
    done, folder = ran["parts"]
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[0, 0]", done.stderr
    assert (folder / "runs" / "0" / "lines.txt").exists()
    for number in (0, 1):
        summary = json.loads((folder / "runs" / str(number) / "summary.json").read_text())
        assert max(summary["evaluation"]["returns"]) <= -8  # at least four steps, each of which costs 2


def test_the_algorithm_trains_resumes_and_is_swept_as_its_page_says(ran):
    done, folder = ran["algorithm"]
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[0, 0, 0, 0, 0, 2]", done.stderr
    assert "SPOLoss has no option called 'foo'" in done.stderr
    assert json.loads((folder / "runs" / "spo" / "summary.json").read_text())["frames"] == 2048


def test_the_recipe_shown_is_listed_by_its_title(ran):
    done, _ = ran["recipes"]
    assert re.search(r"^  acrobot +train +PPO on Acrobot\.$", done.stdout, re.M), done.stdout


def test_every_command_is_accepted(ran):
    assert len(commands_tried()) > 15
    done, _ = ran["commands"]
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == commands_tried().keys()
    refused = {command: text for command, (code, text) in found.items() if code != 0}
    assert not refused


def test_the_mistake_is_answered_as_shown(capsys):
    from rlcli.cli.main import main

    asked, answer = re.search(r"^\$ rlcli (.*)\n(.*)$", README, re.M).groups()
    assert main(asked.split()) == 2
    assert capsys.readouterr().err.strip() == answer


def test_sweeps_as_shown_are_several_jobs():
    from rlcli.config.compose import plan

    sweeps = [line for line in commands() if " -m " in line and "--import" not in line]  # those are run
    assert sweeps
    for line in sweeps:
        verb, *words = [word for word in shlex.split(line)[1:] if word != "-m"]
        assert plan(verb, words, multirun=True).job is None


def test_every_bench_named_exists():
    from rlcli.bench import BENCHES
    from tests.bench import settings as developing

    assert {name for command in commands() if (name := bench_of(command))} == set(BENCHES.about)
    assert {*re.findall(r"`python -m tests\.bench ([a-z]+)`", PAGES)} == set(developing.BENCHES.about)


def test_the_layer_table_is_that_of_the_layer_test():
    rows = re.findall(r"^\| (\d+) \| ((?:`[\w.]+` ?)+) \|", TOPICS["inside"], re.M)
    shown = {int(number): set(re.findall(r"`([\w.]+)`", parts)) for number, parts in rows}

    def exists(part: str) -> bool:
        place = PACKAGE.joinpath(*part.split("."))
        return place.is_dir() or place.with_suffix(".py").exists()

    assert shown == {number: {part for part in parts if exists(part)} for number, parts in enumerate(LAYERS)}


def test_every_path_named_exists():
    paths = re.findall(r"[`(]((?:rlcli|tests|recipes|conf)/[\w./]*)[`)]", PAGES)
    assert paths
    assert not [path for path in paths if not (PACKAGE.parent / path).exists()]


@pytest.mark.parametrize("mode", ["full", "delta", "exact", "compact"])
def test_the_bytes_a_frame_are_those_of_the_table(mode, tmp_path, monkeypatch):
    import rlcli

    monkeypatch.chdir(tmp_path)
    header, row = re.search(r"^\| recipe \|(.*)\n.*\n\| `ppo_exact` \(CartPole\) \|(.*)$", README, re.M).groups()
    cells = dict(zip(re.findall(r"`(\w+)`", header), row.split("|"), strict=False))
    kept, whole = (float(number) for number in cells[mode].split(" of "))
    words = ["recipe=ppo_exact", "memory=delta"] if mode == "delta" else [f"recipe=ppo_{mode}"]
    run = rlcli.train([*words, "total_frames=2048", "console=off", "logger=none", "run.eval_episodes=0"])
    memory = run.summary["memory"]
    stored = "next.delta.observation" if mode == "delta" else "next.observation"
    (successors,) = [e for e in memory["entries"] if e["key"] == stored] or [{"per_frame": 0.0}]
    # of a young policy, whose episodes end more often than those of a whole run
    assert successors["per_frame"] == pytest.approx(kept, abs=1)
    assert memory["components"]["rollout"]["per_frame"] == pytest.approx(whole, abs=1)


def test_every_python_block_parses():
    for language, text in BLOCKS:
        if language == "python":
            ast.parse(text)


def test_the_readme_is_short_and_leads_to_every_page():
    assert len(README.encode()) <= 12_000
    assert {topic for topic in TOPICS if f"[`rlcli help {topic}`](rlcli/help/{topic}.md)" in README} == set(TOPICS)


def test_the_page_of_keys_is_that_of_the_schema():
    written = subprocess.run(
        [sys.executable, "-m", "tests.keys_page"], cwd=PACKAGE.parent, capture_output=True, text=True, check=True
    ).stdout
    assert written == TOPICS["keys"], "write it anew: python -m tests.keys_page > rlcli/help/keys.md"


def test_every_name_of_a_module_that_a_page_names_is_there():
    named = set(re.findall(r"`(rlcli(?:\.[a-z_]+)+)\.([A-Z]\w+)`", PAGES))
    named |= {(module, name) for name, module in re.findall(r"`([A-Z]\w+)` of `(rlcli(?:\.[a-z_]+)+)`", PAGES)}
    assert len(named) > 4
    assert not [(module, name) for module, name in named if not hasattr(importlib.import_module(module), name)]
