"""`train`, `collect` and their siblings hand over exactly what was asked for; sweeps run every job."""

import re

import pytest
import torch  # noqa: F401  # a command says that it loads it

import rlcli as package
from rlcli.errors import ConfigError, EnvError, StoppedSafely


def test_train_hands_over_a_typed_configuration_and_the_overrides(rlcli, started):
    assert rlcli("train recipe=ppo_exact env.num=2 optim.lr=1e-3 threads=1")[0] == 0
    ((what, (cfg, overrides), _),) = started
    assert what == "train" and overrides == ["recipe=ppo_exact", "env.num=2", "optim.lr=1e-3", "threads=1"]
    assert (type(cfg).__name__, cfg.recipe, cfg.env.num, cfg.optim.lr, cfg.threads) == (
        ("Config", "ppo_exact", 2, 1e-3, 1)
    )
    assert cfg.run.dir is None and isinstance(cfg.policy.hidden, list)


def test_train_alone_is_cartpole_with_exact_memory(rlcli, started):
    assert rlcli("train")[0] == 0
    cfg = started[0][1][0]
    assert (cfg.env.id, cfg.memory.next_obs, cfg.recipe) == ("CartPole-v1", "exact", None)


def test_collect_has_no_learning_in_it(rlcli, started):
    assert rlcli("collect recipe=collect_random")[0] == 0
    cfg = started[0][1][0]
    assert cfg.policy.kind == "random" and not hasattr(cfg, "loss")


def test_resume_and_eval_hand_over_the_folder(rlcli, started, tmp_path):
    assert rlcli(f"resume {tmp_path} total_frames=10")[0] == 0
    assert rlcli(f"eval {tmp_path} --episodes 3 --stochastic --video v.mp4")[0] == 0
    assert started[0] == ("resume", (str(tmp_path), ["total_frames=10"]), {"force": False})
    assert all(callable(started[1][2].pop(name)) for name in ("say", "show"))
    assert started[1][2] == {"episodes": 3, "deterministic": False, "seed": None, "max_steps": None, "video": "v.mp4"}


def test_eval_says_nothing_with_the_console_off_and_reads_no_other_setting(rlcli, started, tmp_path, capsys):
    for options in ("", "console=plain --episodes 3", "console=off"):
        assert rlcli(f"eval {tmp_path} {options}") == (0, "", "")
        started[-1][2]["say"]("playing ...")
        assert capsys.readouterr().err == ("" if options == "console=off" else "playing ...\n")
    code, _, err = rlcli(f"eval {tmp_path} console=of")
    assert code == 2 and "unknown console 'of'; did you mean off?" in err
    code, _, err = rlcli(f"eval {tmp_path} env.num=3")
    assert code == 2 and "rlcli eval does not take 'env.num=3'" in err and len(started) == 3


def test_nothing_stray_is_written(rlcli, started, tmp_path):
    rlcli("train seed=1")
    rlcli("train --cfg job")
    rlcli("show train --why")
    assert list(tmp_path.iterdir()) == []


def test_python_callers_use_the_same_words(started):
    package.train(overrides=["recipe=ppo_full", "seed=3"])
    package.collect(["policy=random"])
    assert [(what, args[0].seed) for what, args, _ in started] == [("train", 3), ("collect", 0)]
    with pytest.raises(ConfigError, match=r"did you mean env\.num"):
        package.train(overrides=["env.nm=3"])


def test_a_run_folder_given_as_hydras_is_the_runs(rlcli, started):
    assert rlcli("train hydra.run.dir=some/where")[0] == 0
    assert started[0][1][0].run.dir == "some/where"


def test_a_sweep_runs_every_job_in_a_folder_of_its_own(rlcli, started, tmp_path):
    code, out, err = rlcli("train -m recipe=ppo_full,ppo_exact seed=range(0,2) hydra.sweep.dir=sweep")
    assert (code, err) == (0, "")
    jobs = [(cfg.recipe, cfg.seed, cfg.run.dir) for _, (cfg, _), _ in started]
    assert jobs == [
        (recipe, seed, str(tmp_path / "sweep" / str(number)))
        for number, (recipe, seed) in enumerate([("ppo_full", 0), ("ppo_full", 1), ("ppo_exact", 0), ("ppo_exact", 1)])
    ]
    assert re.search(r"^job 3, 4 of 4 \(about [\d:]+ left\): recipe=ppo_exact seed=1$", out, re.M)
    assert not [path.name for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("verb", ["train", "collect"])
def test_sweeps_of_one_second_have_folders_of_their_own(rlcli, started, monkeypatch, tmp_path, verb):
    monkeypatch.setattr("rlcli.runs.folder._stamp", lambda: "2031-05-06_14-03-59")
    kept = tmp_path / "runs" / verb / "sweep_2031-05-06_14-03-59"
    kept.mkdir(parents=True)
    (kept / "0").mkdir()
    assert rlcli(f"{verb} -m seed=1,2")[0] == 0
    assert [args[0].run.dir for _, args, _ in started] == [f"{kept}_2/{job}" for job in (0, 1)]


def test_a_sweep_can_stand_in_a_recipe(rlcli, started, tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "three.yaml").write_text("hydra: {sweeper: {params: {seed: '1,2,3'}}}")
    assert rlcli("train -m recipe=three")[0] == 0
    assert [cfg.seed for _, (cfg, _), _ in started] == [1, 2, 3]


def test_a_sweep_with_one_bad_value_runs_nothing(rlcli, started):
    code, _, err = rlcli("train -m env.num=1,0 value.gamma=0.9,1.5")
    assert code == 2 and started == []
    assert "env.num is 0" in err and "value.gamma is 1.5" in err


def test_a_glob_sweeps_over_recipes(rlcli, started):
    assert rlcli("train -m recipe=glob(ppo_m*,exclude=[ppo_mini*])")[0] == 0
    assert [cfg.recipe for _, (cfg, _), _ in started] == ["ppo_mujoco", "ppo_multi"]


def fail_on(monkeypatch, seed, error):
    import sys

    ran = []

    def train(cfg, overrides):
        ran.append(cfg.seed)
        if cfg.seed == seed:
            raise error

    monkeypatch.setattr(sys.modules["rlcli.build"], "train", train)
    return ran


def test_a_job_that_fails_does_not_stop_the_sweep_but_its_code_is_kept(rlcli, started, monkeypatch):
    ran = fail_on(monkeypatch, 1, EnvError("it broke"))
    code, _, err = rlcli("train -m seed=1,2,3")
    assert (code, ran) == (3, [1, 2, 3])
    assert "job 0 failed: it broke" in err and "Traceback" not in err


def test_a_safe_stop_ends_the_sweep(rlcli, started, monkeypatch):
    ran = fail_on(monkeypatch, 1, StoppedSafely("stopped; rlcli resume x"))
    with pytest.raises(SystemExit) as stop:
        rlcli("train -m seed=1,2,3")
    assert (stop.value.code, ran) == (75, [1])


def test_a_package_given_on_the_command_line_adds_names(rlcli, started, tmp_path, monkeypatch):
    from rlcli.config import registry

    monkeypatch.setattr(registry, "_users", {kind: {} for kind in registry.KINDS})
    monkeypatch.setattr(registry, "imported", [])  # workers of later tests would look for it
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    (tmp_path / "my_names_here.py").write_text(
        "import rlcli\n"
        "rlcli.register_env('my_env')(lambda **k: None)\n"
        "rlcli.register_policy('my_net')(lambda o, a: None)\n"
        "rlcli.register_wrapper('MyWrapper')(lambda env: env)\n"
    )
    line = "train --import my_names_here env.id=my_env policy=my_net env.wrappers=[MyWrapper]"
    code, out, err = rlcli(line)  # torch comes before a package of the user's
    assert (code, out) == (0, "") and set(err.splitlines()) <= {"loading torch ..."}
    assert started[0][1][0].policy.kind == "my_net"
    monkeypatch.setattr(registry, "_users", {kind: {} for kind in registry.KINDS})
    code, _, err = rlcli(line.replace("--import my_names_here ", ""))
    unknown = ("unknown env id 'my_env'", "unknown policy 'my_net'", "unknown wrapper 'MyWrapper'")
    assert code == 2 and all(words in err for words in unknown)


def test_it_works_inside_another_hydra_application(started, tmp_path):
    from hydra import compose, initialize_config_dir

    (tmp_path / "theirs.yaml").write_text("a: 1")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        package.train(overrides=["seed=5"])
        assert compose("theirs").a == 1
    assert started[0][1][0].seed == 5
