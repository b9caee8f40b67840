"""Looking at a configuration and at what there is to choose from, without running anything."""

import json
import re
import shlex
import sys
import tomllib
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from face import Config, algorithm_of, build_env, configure, find_recipes, main

from rlcli.cli import ls
from rlcli.cli.completion import candidates
from rlcli.config.option import held
from rlcli.config.registry import choices
from rlcli.config.words import spell


def test_cfg_job_resolve_prints_the_configuration_as_yaml(rlcli):
    code, out, _ = rlcli("train recipe=ppo_full run.dir=a/${env.id} --cfg job --resolve")
    data = yaml.safe_load(out)
    assert code == 0 and list(data)[:4] == ["seed", "total_frames", "threads", "recipe"]
    assert data["run"]["dir"] == "a/CartPole-v1" and data["memory"]["next_obs"] == "full" and "hydra" not in data


@pytest.mark.parametrize("name", ["runs/mine", "."])
def test_the_folder_that_hydra_was_asked_for_is_shown_as_it_will_be(rlcli, started, tmp_path, name):
    assert f"  dir: {name}\n" in rlcli(f"show hydra.run.dir={name}")[1]
    why = rlcli(f"show hydra.run.dir={name} --why")[1]
    assert re.search(rf"^run.dir={re.escape(spell(name))} +# command line$", why, re.M)
    assert rlcli(f"train hydra.run.dir={name}")[0] == 0 and started[0][1][0].run.dir == name
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "placed.yaml").write_text("hydra: {run: {dir: runs/theirs}}")
    assert re.search("^run.dir=runs/theirs +# recipe placed$", rlcli("show recipe=placed --why")[1], re.M)


def test_every_value_of_why_can_be_typed(tmp_path, capsys):
    assert main(["show", "--why", "env.kwargs={a:'b, c',d:'1'}", "run.dir='a #b'", "policy.hidden=[8,8]"]) == 0
    texts = [
        line.rpartition(" # ")[0].strip() for line in capsys.readouterr().out.splitlines() if "not read" not in line
    ]
    words = [text for text in texts if ".kind=" not in text and not text.startswith("recipe=")]
    cfg = configure("train", words)
    assert (cfg.env.kwargs, cfg.run.dir, cfg.policy.hidden) == ({"a": "b, c", "d": "1"}, "a #b", [8, 8])


def test_cfg_of_one_package(rlcli):
    assert yaml.safe_load(rlcli("train --cfg job -p optim")[1])["lr"] == 3e-4
    assert rlcli("train --cfg job -p optim.lr")[1].strip() == "0.0003"
    assert rlcli("train --cfg job -p optin")[0] == 2


def test_cfg_hydra_shows_that_it_writes_nothing(rlcli):
    data = yaml.safe_load(rlcli("train --cfg hydra")[1])["hydra"]
    assert data["output_subdir"] is None and data["job"]["chdir"] is False


def test_show_prints_the_same_as_cfg_job_resolve(rlcli):
    assert rlcli("show train recipe=ppo_pong")[1] == rlcli("train recipe=ppo_pong --cfg job --resolve")[1]
    assert rlcli("show recipe=ppo_pong")[1] == rlcli("show train recipe=ppo_pong")[1]


def test_why_names_the_place_that_each_value_comes_from(rlcli):
    _, out, _ = rlcli("show train recipe=ppo_exact optim.lr=1e-4 optim=sgd env.kwargs.a=1 --why")
    why = {line.split("=")[0]: line.split("# ")[1] for line in out.splitlines()}
    made = configure("train", ["recipe=ppo_exact", "optim=sgd"])
    assert set(why) == {key for key in held(made) if not key.startswith("sweep.")} and "optim.betas" not in why
    assert "collector.kind=sync " in rlcli("show collect --why")[1]  # which has no loss that sets anything
    assert why["seed"] == "default"
    assert why["optim.lr"] == why["env.kwargs"] == "command line"
    assert why["optim.momentum"] == "optim=sgd"
    assert why["optim.epochs"] == "recipe ppo_compact"
    assert why["memory.next_obs"] == "memory=exact"


def test_ls_lists_recipes_with_their_verb_and_first_line(rlcli):
    _, out, _ = rlcli("ls")
    assert "ppo_exact" in out and "collect_random     collect" in out and "none under runs/ yet" in out


@pytest.mark.parametrize("kind, group", ls.CHOSEN.items())
def test_ls_lists_what_a_group_can_choose(rlcli, kind, group):
    code, out, _ = rlcli(f"ls {kind}")
    assert code == 0 and tuple(out.split()) == choices(Config, group)


def test_ls_ends_a_line_that_is_too_long_with_dots_and_a_whole_word(rlcli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    lines = rlcli("ls recipes")[1].splitlines()
    assert all(len(line) <= 70 for line in lines[1:])
    abouts = {line.split()[0]: line[30:].removesuffix(" ...") for line in lines[1:]}
    for name, recipe in find_recipes().items():
        assert f"{recipe.header[0]} ".startswith(f"{abouts[name]} ")


def test_ls_lists_runs_in_columns(rlcli, tmp_path):
    ended = {
        "status": "done", "frames": 1000, "throughput": {"seconds": 75.2},
        "learning": {"return": 1.25}, "evaluation": {"mean_return": 500.0},
    }  # fmt: skip
    info = {"recipe": "ppo_exact", "env": "CartPole-v1", "seed": 3, "overrides": ["recipe=ppo_exact", "optim.lr=1"]}
    for name, summary in [("a", ended), ("b", None), ("c", []), ("d", {"status": "failed", "frames": 3})]:
        folder = tmp_path / "runs" / "train" / name
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps(info if name == "a" else {}))
        if summary is not None:
            (folder / "summary.json").write_text(json.dumps(summary))
    _, out, _ = rlcli("ls runs")
    rows = {line.split()[0]: line for line in out.splitlines()[1:]}
    assert rows["run"].split() == ["run", "recipe", "env", "seed", "status", "frames", "result", "time", "overrides"]
    assert rows["runs/train/a"].split()[1:] == [
        "ppo_exact",
        "CartPole-v1",
        "3",
        "done",
        "1,000",
        "500",
        "eval",
        "0:01:15",
        "optim.lr=1",
    ]
    assert rows["runs/train/a"].index("CartPole-v1") == rows["run"].index("env ")
    assert rows["runs/train/b"].split()[-1] == "interrupted"
    assert rows["runs/train/d"].split()[-2:] == ["failed", "3"]
    assert "summary cannot be read" in rows["runs/train/c"]


@pytest.fixture
def several(tmp_path):
    """Runs in two folders: name -> created, env, status, evaluation or training return."""
    made = {
        "runs/a": ("2031-05-01T10:00:00+00:00", "Hopper-v5", "done", {"evaluation": {"mean_return": 5.0}}),
        "runs/b": ("2031-05-02T10:00:00+00:00", "CartPole-v1", "stopped", {"learning": {"return": 500.0}}),
        "cmp/c": ("2031-05-03T10:00:00+00:00", "Hopper-v5", "done", {"evaluation": {"mean_return": 50.0}}),
    }
    for name, (created, env, status, found) in made.items():
        (tmp_path / name).mkdir(parents=True)
        info = {"verb": "train", "env": env, "created": created, "recipe": "ppo_" + name[-1], "seed": 1}
        (tmp_path / name / "run.json").write_text(json.dumps(info))
        (tmp_path / name / "summary.json").write_text(json.dumps({"status": status, "frames": 7} | found))


@pytest.mark.parametrize(
    ("words", "listed"),
    [
        ("runs", "runs/b runs/a"),
        ("runs cmp", "cmp/c"),
        ("cmp", "cmp/c"),
        ("runs cmp runs", "cmp/c runs/b runs/a"),
        ("runs cmp runs --env Hopper*", "cmp/c runs/a"),
        ("runs --status stopped", "runs/b"),
        ("runs --recipe=ppo_a", "runs/a"),
        ("--since 2031-05-02 cmp runs", "cmp/c runs/b"),
        ("runs --since 3d", "runs/b runs/a"),  # both are yet to come
        ("runs cmp runs --sort result", "runs/b cmp/c runs/a"),
        ("runs cmp runs --sort env", "runs/b cmp/c runs/a"),
        ("runs cmp runs --limit 1", "cmp/c and"),
    ],
)
def test_ls_runs_takes_folders_filters_an_order_and_a_limit(rlcli, several, words, listed):
    code, out, _ = rlcli(f"ls {words}")
    assert code == 0 and [line.split()[0] for line in out.splitlines()[2:]] == listed.split()


def test_ls_runs_says_what_a_result_is_of_and_gives_all_as_json(rlcli, several):
    rows = {line.split()[0]: line for line in rlcli("ls runs")[1].splitlines()}
    assert " 5 eval" in rows["runs/a"] and " 500 train" in rows["runs/b"]
    found = json.loads(rlcli("ls runs cmp --json")[1])
    assert [(one["run"], one["result"], one["result_of"], one["seed"]) for one in found] == [("cmp/c", 50.0, "eval", 1)]
    assert json.loads(rlcli("ls runs --env nothing --json")[1]) == []
    assert "none under runs/ match; --env: " in rlcli("ls runs --env nothing")[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [("rnus", "did you mean runs?"), ("runs --since yesterday", "date"), ("envs --status done", "for rlcli ls runs")],
)
def test_ls_refuses_what_it_cannot_list(rlcli, several, words, said):
    code, _, err = rlcli(f"ls {words}")
    assert code == 2 and said in err


def test_ls_shows_a_resumed_run_as_running(rlcli, tmp_path):
    from rlcli.runs.folder import locked

    folder = tmp_path / "runs" / "train" / "a"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    (folder / "summary.json").write_text('{"status": "stopped", "frames": 10}')
    (folder / "metrics.jsonl").write_text('{"frames": 10}\n{"frames": 2000}\n')
    assert " stopped " in rlcli("ls runs")[1]
    with locked(folder):
        out = rlcli("ls runs")[1]
    assert " running " in out and " 2,000" in out and "stopped" not in out


def test_ls_lists_envs_wrappers_and_policies(rlcli):
    listed = rlcli("ls envs")[1].split()
    assert any(line.startswith("ALE/...: ") and " games" in line for line in rlcli("ls envs")[1].splitlines())
    assert "CartPole-v1" in listed and "HalfCheetah-v2" not in listed and "GymV26Environment-v0" not in listed
    assert "ClipAction" in rlcli("ls wrappers")[1].split()
    assert "mlp" in rlcli("ls policies")[1].split()


def test_cp_copies_a_recipe_that_then_runs_and_never_overwrites(rlcli, tmp_path, started):
    assert rlcli("cp ppo_exact recipes/mine")[0] == 0
    assert rlcli("train recipe=mine")[0] == 0
    assert started[0][1][0].recipe == "mine"
    code, _, err = rlcli("cp ppo_full recipes/mine.yaml")
    assert code == 2 and "exists" in err


@pytest.mark.parametrize("name", sorted(find_recipes()))
@pytest.mark.every(3)
def test_a_copy_says_where_it_is_from_and_claims_no_figures(rlcli, tmp_path, started, name):
    code, out, _ = rlcli(f"cp {name} own/mine.yml")
    text = (tmp_path / "own" / "mine.yaml").read_text()
    original = find_recipes()[name].path.read_text()
    header, body = re.fullmatch(r"((?:#[^\n]*\n)*)(.*)", text, re.S).groups()
    assert code == 0 and header.startswith(f"# Copied from {name}: ") and original.endswith(body)
    assert "frames/s" not in header and "bytes a frame" not in header.replace("next observations", "")
    assert ("Needs: pip" in original) == ("Needs: pip" in header)
    (command,) = re.findall("^# command: (.*)$", header, re.M)
    assert f"run it with: {command}\n" in out
    assert header.count("command:") == 1 and header.endswith("# figures: not measured\n")
    assert "recipe=mine" in command and "--recipe-dir own" in command and command.split()[1] in original
    words = command.removeprefix("rlcli ").replace("runs/train/ppo_exact/...", "run")
    (tmp_path / "run").mkdir()
    assert rlcli(f"{words} --cfg job")[0] == 0
    assert f"recipes/{name}" not in rlcli("ls recipes --recipe-dir own")[1]


@pytest.mark.parametrize("packages", [[], ["one", "two"]])
def test_a_copy_of_a_copy_and_of_a_recipe_without_a_header(rlcli, tmp_path, started, monkeypatch, packages):
    monkeypatch.setattr("rlcli.config.registry.imported", packages)
    flags = "".join(f" --import {name}" for name in packages)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "bare.yaml").write_text("seed: 3")
    assert rlcli("cp ppo_full recipes/first")[0] == rlcli("cp first recipes/second")[0] == 0
    assert rlcli("cp bare recipes/third")[0] == 0
    first, second, third = (
        (tmp_path / "recipes" / f"{name}.yaml").read_text() for name in ("first", "second", "third")
    )
    assert second == first.replace("Copied from ppo_full", "Copied from first").replace("recipe=first", "recipe=second")
    command = f"rlcli train recipe=third{flags}"
    assert third == f"# Copied from bare.\n#\n# command: {command}\n# figures: not measured\nseed: 3\n"
    monkeypatch.setattr("rlcli.config.registry.imported", [])
    assert rlcli("train recipe=third")[0] == 0 and started[0][1][0].seed == 3


@pytest.mark.parametrize("target", ["recipes/base.yaml", "own/other"])
def test_the_command_of_a_copy_finds_what_the_original_builds_on(rlcli, tmp_path, started, target):
    (tmp_path / "their own").mkdir()
    (tmp_path / "their own" / "base.yaml").write_text("defaults: [first]\nseed: 3")
    (tmp_path / "their own" / "first.yaml").write_text("total_frames: 7")
    assert main(["cp", "base", target, "--recipe-dir", "their own"]) == 0
    (copy,) = tmp_path.glob(f"{target}*")
    copy.write_text(copy.read_text().replace("seed: 3", "seed: 4"))
    command = re.findall("^# command: rlcli (.*)$", copy.read_text(), re.M)[0]
    assert main(shlex.split(command)) == 0
    assert (started[0][1][0].seed, started[0][1][0].total_frames) == (4, 7)


@pytest.mark.parametrize("name", ["a b", "1", "a=b", "über,c", "-x", ".yaml", "x.v2", "null", "True"])
def test_a_copy_whose_name_could_not_be_typed_is_refused(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    assert main(["cp", "ppo_full", f"./{name}"]) == 2
    assert "letters, digits" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("rlcli tr", ["train"]),
        ("rlcli train rec", ["recipe="]),
        ("rlcli train recipe=ppo_e", ["recipe=ppo_exact"]),
        ("rlcli train memory=", ["memory=compact", "memory=exact"]),
        ("rlcli train env.nu", ["env.num="]),
        ("rlcli train policy.shared=", ["policy.shared=true", "policy.shared=false"]),
        ("rlcli train env.id=CartPole-v", ["env.id=CartPole-v1"]),
        ("rlcli train --mul", ["--multirun"]),
        ("rlcli ls runs --", ["--since", "--env", "--recipe", "--status", "--limit", "--json", "--sort", "--import"]),
        ("rlcli eval runs/x --e", ["--episodes"]),
        ("rlcli plan train --", ["--limit", "--json"]),
        ("rlcli show train opt", ["optim.", "optim="]),
        ("rlcli cp ppo_f", ["ppo_full"]),
        ("rlcli completion b", ["bash"]),
        ("rlcli ls lo", ["losses", "loggers"]),
        ("rlcli help ", ["memory", "train"]),
    ],
)
def test_a_tab_offers_what_fits(line, some):
    offered = candidates(line)
    assert set(some) <= set(offered)
    assert all(word.startswith(line.split(" ")[-1]) for word in offered)


def test_a_tab_never_offers_what_would_be_refused():
    assert not [word for word in candidates("rlcli train env.") if word.startswith("env.kind")]
    assert not [word for word in candidates("rlcli collect lo") if word.startswith("loss")]
    assert "--multirun" not in candidates("rlcli plan train --")


def test_what_only_some_collectors_read_is_completed_and_meant(rlcli):
    assert "weights.swap=" in candidates("rlcli train collector=async weights.")
    assert "weights.swap=" in candidates("rlcli show train recipe=sac_async weights.")
    assert candidates("rlcli train weights.") == []  # with the defaults nothing reads them
    assert "loss.double=" in candidates("rlcli train loss=dqn loss.") and not candidates("rlcli train loss.dou")
    assert "storage.max_size=" in candidates("rlcli train loss=dqn storage.")  # which that chooses
    assert "did you mean weights.swap?" in rlcli("train weights.swa=step")[2]


def test_the_bash_script_completes_in_a_real_bash(process):
    script = (
        'eval "$(rlcli completion bash)"; COMP_LINE="rlcli train memory=ex"; COMP_POINT=${#COMP_LINE}; '
        '_rlcli 2>/dev/null; echo "${COMPREPLY[@]}"'
    )
    assert process("bash", "-c", script).stdout.strip() == "exact"


def test_doctor_knows_every_extra_that_a_user_can_install():
    from rlcli.config.installed import EXTRAS

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(EXTRAS) == set(project["project"]["optional-dependencies"]) - {"test"}


def test_doctor_names_versions_and_what_to_install(rlcli):
    code, out, _ = rlcli("doctor")
    assert code == 0
    for word in ("torch", "gymnasium", "cores", "cuda", "tensorboard"):
        assert word in out


def test_doctor_names_the_gpu_and_tries_a_graph_there(rlcli, monkeypatch):
    import torch

    from rlcli.graphs import graph

    def out_of_order(call):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    class Graph:
        def __init__(self, call):
            self.replay = call

    here = {"is_available": lambda: True, "device_count": lambda: 1, "get_device_name": lambda device: "NVIDIA H100"}
    for name, answer in (here | {"mem_get_info": lambda device: (3 << 30, 79 << 30)}).items():
        monkeypatch.setattr(torch.cuda, name, answer)
    zeros, device = torch.zeros, torch.device("cpu")
    monkeypatch.setattr(torch, "zeros", lambda *shape, **_: zeros(*shape, device=device))
    records = {
        Graph: "graphs are recorded and replayed",
        out_of_order: "no graphs: OutOfMemoryError: CUDA out of memory.",
        lambda call: Graph(lambda: None): "no graphs: one of 0 + 1 gave 0",
    }
    for record, said in records.items():
        monkeypatch.setattr(graph, "recorder_of", lambda device, record=record: record)
        _, out, _ = rlcli("doctor")
        (line,) = (line for line in out.splitlines() if "cuda:0" in line)
        assert line.split(maxsplit=1)[1] == f"NVIDIA H100, 3.0 GiB free of 79 GiB; {said}"
        assert all(word in out for word in ("CUDA ", "cuDNN ", "Triton "))


def test_an_older_gymnasium_is_one_sentence_with_who_asked_for_it_and_what_to_type(rlcli, monkeypatch):
    from importlib import metadata
    from types import SimpleNamespace

    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.29.1" if name == "gymnasium" else real(name))
    pins = {"memory-gym": ["gymnasium==0.29.1"], "rlcli": ["gymnasium<2,>=1.1"], "other": ["gymnasium-robotics==1.0"]}
    monkeypatch.setattr(
        metadata, "distributions", lambda: [SimpleNamespace(name=n, requires=r) for n, r in pins.items()]
    )
    said = (
        "gymnasium 0.29.1 is installed, and rlcli needs 1.1 or newer (memory-gym asked for an older one); "
        'pip install "gymnasium>=1.1"'
    )
    code, _, err = rlcli("train total_frames=64")
    assert code == 2 and said in err and "forecast" not in err
    assert said in rlcli("doctor")[1]
    assert rlcli("show train")[0] == 0


def test_a_configuration_can_be_looked_at_without_the_packages_it_needs(rlcli, monkeypatch):
    from rlcli.config import installed

    monkeypatch.setattr(installed, "has", lambda package: False)
    for line in (
        "show recipe=ppo_pong",
        "train recipe=ppo_pong --cfg job",
        "show collect recipe=collect_policy",
    ):
        assert rlcli(line)[0] == 0
    code, _, err = rlcli("train recipe=ppo_pong")
    assert code == 2 and 'pip install "rlcli[atari]"' in err


def test_faces_name_what_runs_through_tensordicts_and_why(rlcli, tmp_path, monkeypatch):
    from rlcli.config import registry

    monkeypatch.setattr(registry, "_users", {kind: {} for kind in registry.KINDS})
    monkeypatch.setattr("sys.path", list(sys.path))
    (tmp_path / "my_faces_here.py").write_text(
        "import rlcli\n"
        "from rlcli.transforms import Transform\n"
        "@rlcli.register_transform('Halved')\n"
        "class Halved(Transform):\n"
        "    def _step(self, tensordict, next_tensordict):\n"
        "        return next_tensordict.set('reward', next_tensordict['reward'] / 2)\n"
    )
    words = "show train recipe=ppo_exact env.normalize_observation=true --components"
    code, out, err = rlcli(f"{words} --import my_faces_here env.transforms=[Halved]")
    rows = [re.split(r"  +", line) for line in out.splitlines()]
    assert code == 0, err
    assert [row[:2] for row in rows] == [
        ["env", "CartPole-v1"],
        ["transform", "RunningNorm"],
        ["transform", "Halved"],
        ["policy", "ProbabilisticActor"],
        ["noise", "the policy and the env"],
    ]
    assert all("TensorDicts" in row[2] for row in rows[:4]) and "torch stream" in rows[4][2]
    assert "Halved" in rows[0][3] and "_step" in rows[2][3]
    ours = rlcli(words)[1]
    assert "TensorDicts" not in ours and "observation -> logits" in ours and "torch" not in ours


def test_why_says_what_a_loss_chooses_and_what_follows_from_the_actions(rlcli):
    why = {line.split("=")[0]: line.split("# ")[1] for line in rlcli("show loss=sac --why")[1].splitlines()}
    assert why["storage.kind"] == "storage=tensor, with loss=sac" and why["sampler.batch_size"] == "loss=sac"
    for env, said in (("Pendulum-v1", "default; 0: Box actions"), ("CartPole-v1", "default; 0.01: Discrete actions")):
        why = {line.split("=")[0]: line.split("# ")[1] for line in rlcli(f"show env.id={env} --why")[1].splitlines()}
        assert why["loss.entropy_coeff"] == said
        cfg = configure("train", [f"env.id={env}", "env.num=1"])
        with closing(build_env(cfg.env)) as made:
            algorithm = algorithm_of(cfg)
            loss = algorithm.loss(algorithm.networks(made), made)
            assert f"{loss.entropy_coeff:g}" == said.split()[1].rstrip(":")


def test_components_say_how_the_update_runs_on_a_device(rlcli, monkeypatch):
    from rlcli.graphs import graph, host

    assert "update " not in rlcli("show train recipe=a2c_cartpole --components")[1]
    monkeypatch.setattr(host, "may_ask", lambda x: False)
    monkeypatch.setattr(graph, "recorder_of", lambda device: lambda call: None)
    for words, runs in (("", "one graph a minibatch "), ("optim.compile=true", "torch compiles its loss")):
        _, out, _ = rlcli(f"show train recipe=a2c_cartpole --components {words}")
        (line,) = [line for line in out.splitlines() if line.startswith("update ")]
        assert "A2CLoss" in line and runs in line
