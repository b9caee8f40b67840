"""What benches can be told: every word is a value or a sentence, and help shows what there is."""

import subprocess
import sys

import gymnasium as gym
import pytest
from face import refusals, refused
from hypothesis import given
from hypothesis import strategies as st

from rlcli.bench import BENCHES
from rlcli.bench.settings import SETTINGS, Setting, read
from rlcli.bench.train import _configured
from rlcli.cli.bench import answer
from rlcli.cli.completion import candidates
from rlcli.cli.main import main
from rlcli.errors import ConfigError, RlcliError
from tests.bench import settings as developing

BOTH = pytest.mark.parametrize("benches", [BENCHES, developing.BENCHES], ids=["users", "developers"])


@BOTH
def test_every_bench_has_settings_whose_defaults_are_accepted(benches):
    assert set(benches.settings) == set(benches.about)
    for known in benches.settings.values():
        spelled = [f"{key}={setting.default}" for key, setting in known.items()]
        assert read(known, spelled) == read(known, []) == {key: setting.default for key, setting in known.items()}


def test_values_are_read_as_the_command_line_spells_them():
    known = developing.SETTINGS["update"] | {"lr": Setting(0.1, "rate")}
    words = ["lr=1", "policy.hidden=[8, 8]", "action=box", "peers=FALSE", "rounds=1e1"]
    assert (
        read(known, words).items()
        >= {
            "lr": 1.0,
            "policy.hidden": [8, 8],
            "action": "box",
            "peers": False,
            "rounds": 10,
        }.items()
    )


@pytest.mark.parametrize("name", ["collect", "train", "workers"])
def test_a_vector_engine_is_no_single_env(monkeypatch, name):
    spec = gym.envs.registration.EnvSpec("Poles-v0", vector_entry_point="poles:Poles")
    monkeypatch.setitem(gym.registry, "Poles-v0", spec)
    refused(
        ConfigError, "Poles-v0 vector engine single env.mode=native", lambda: read(SETTINGS[name], ["env.id=Poles-v0"])
    )


def test_every_mistake_is_named_at_once():
    words = ["ruonds=9", "peers=maybe", "policy.hidden=[8,a]", "policy.hidden=8", "rounds=3", "action=bx", "threads"]
    with pytest.raises(ConfigError) as error:
        read(developing.SETTINGS["update"], words)
    text = str(error.value)
    assert text.count("\n") == 7
    for part in (
        "no setting 'ruonds'; did you mean rounds?",
        "peers is true or false, not 'maybe'",
        "policy.hidden is a list of whole numbers, not '8'",
        "rounds is 3; allowed: >= 7",
        "action is bx; allowed: discrete | box",
        "cannot read 'threads'; write key=value",
    ):
        assert part in text


@pytest.mark.parametrize(
    "text", ["0", "-1", "nan", "inf", "1e999", "1e18", "[1]", "", "true", "'7'", "9" * 400, "[" * 999]
)
def test_absurd_numbers_are_sentences(text):
    with pytest.raises(ConfigError):
        read({"optim.lr": Setting(1e-3, "rate", 1e-9, 1)}, [f"optim.lr={text}"])


@given(st.sampled_from([(bench, key) for bench, known in SETTINGS.items() for key in known]), st.text(max_size=12))
def test_whatever_is_typed_is_a_value_or_a_sentence(setting, text):
    bench, key = setting
    try:
        value = read(SETTINGS[bench], [f"{key}={text}"])[key]
    except RlcliError as error:
        assert str(error)
    else:
        assert type(value) is type(SETTINGS[bench][key].default)


@BOTH
@pytest.mark.parametrize("words", ["{} --help", "--help {}", "{} -h rounds=9"])
def test_help_lists_every_setting(benches, words, capsys):
    for bench, known in benches.settings.items():
        assert answer(benches, words.format(bench).split()) == 0
        page = capsys.readouterr().out
        for key, setting in known.items():
            assert f"  {key}=" in page and setting.meaning.split()[0] in page
        assert f"usage: {benches.command} {bench} " in page and f"runs/bench/{bench}.json" in page


def test_a_bench_of_rlclis_parts_is_not_a_users_and_says_where_it_runs(capsys):
    for bench in developing.BENCHES.about:
        assert main(["bench", bench]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "run from a checkout: python -m tests.bench NAME" in said
        assert "did you mean" not in said


def test_the_help_of_benches_and_their_mistakes_load_nothing_heavy():
    program = """
import sys
from rlcli.cli.main import main
codes = [main(["bench", *words.split()]) for words in ("", "collect --help", "train env.id=CartPoel-v1 ruonds=1")]
assert codes == [0, 0, 2], codes
assert not {"torch", "tensordict", "numba"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "did you mean CartPole-v" in done.stderr and "did you mean rounds?" in done.stderr


def test_a_tab_offers_the_settings():
    assert "optim.epochs=" in candidates("rlcli bench train opt")
    assert set(candidates("rlcli bench ")) == set(BENCHES.about)
    assert candidates("rlcli bench nothing r") == []


test_an_env_that_the_loops_are_not_for_is_refused = refusals(
    (ConfigError, "Pendulum-v1", lambda: BENCHES.measure("collect", ["env.id=Pendulum-v1"])),
    (ConfigError, "CartPole-v1", lambda: BENCHES.measure("collect", ["continuous=CartPole-v1"])),
)  # fmt: skip


@pytest.mark.parametrize(("algo", "env"), [("ppo", "CartPole-v1"), ("dqn", "CartPole-v1"), ("sac", "Pendulum-v1")])
def test_whole_runs_have_the_defaults_of_their_algorithm_and_can_be_configured(algo, env, tmp_path):
    words = ["algo=dqn", f"algo={algo}", "total_frames=300"]  # the last word counts
    given = read(BENCHES.settings_of("train", words), words)
    assert given["env.id"] == env and given["total_frames"] == 300
    cfg, _ = _configured(given, tmp_path, 0)
    assert cfg.loss.kind.startswith(algo) and cfg.sampler.batch_size == given["sampler.batch_size"]
