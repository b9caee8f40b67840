"""Nothing in a file runs: every known way to have YAML, OmegaConf or Hydra run something is refused."""

import sys
from pathlib import Path

import pytest
import yaml
from face import from_dict, refused

from rlcli.config import compose, guard
from rlcli.errors import ConfigError

# name -> a recipe that would run code, read the machine or eat it, if it were not refused.
# `MODULE` is a module in the working folder that leaves a mark when it is imported.
PAYLOADS = {
    "target at the root": "_target_: MODULE.run",
    "target in a group": "env: {_target_: MODULE.run}",
    "target in kwargs": "env: {kwargs: {x: {_target_: MODULE.run}}}",
    "target in a wrapper": "env: {wrappers: [{ClipAction: {_target_: MODULE.run}}]}",
    "target as a text": "env: {id: '_target_: MODULE.run'}",
    "partial": "policy: {kwargs: {_partial_: true}}",
    "args": "policy: {kwargs: {_args_: [1]}}",
    "hydra callback": "hydra: {callbacks: {x: {_target_: MODULE.Run}}}",
    "hydra callback without target": "hydra: {callbacks: {x: {y: 1}}}",
    "hydra callback, dotted": "hydra.callbacks.x: {y: 1}",
    "job logging formatter": "hydra: {job_logging: {formatters: {f: {(): MODULE.run}}}}",
    "job logging class": "hydra: {job_logging: {handlers: {h: {class: MODULE.Run}}}}",
    "hydra logging": "hydra: {hydra_logging: {version: 1, root: {level: DEBUG}}}",
    "launcher target": "hydra: {launcher: {_target_: MODULE.Run}}",
    "sweeper target": "hydra: {sweeper: {_target_: MODULE.Run}}",
    "sweeper class field": "hydra: {sweeper: {max_batch_size: 1}}",
    "sweep over a hydra key": "hydra: {sweeper: {params: {hydra.callbacks.x._target_: MODULE.Run}}}",
    "sweep over an added key": "hydra: {sweeper: {params: {+hydra.callbacks.x: '{a: 1}'}}}",
    "sweep over a launcher": "hydra: {sweeper: {params: {hydra/launcher: MODULE}}}",
    "sweep over a colon id": "hydra: {sweeper: {params: {env.id: 'MODULE:X-v0,CartPole-v1'}}}",
    "search path": "hydra: {searchpath: ['pkg://MODULE']}",
    "environment of the job": "hydra: {job: {env_set: {PYTHONPATH: /tmp}}}",
    "copy of the environment": "hydra: {job: {env_copy: [HOME]}}",
    "change of folder": "hydra: {job: {chdir: true}}",
    "output folder of hydra": "hydra: {output_subdir: .hydra}",
    "mode": "hydra: {mode: MULTIRUN}",
    "environment variable": "run: {dir: '${oc.env:HOME}'}",
    "environment variable, nested": "run: {dir: 'a/${oc.env:${env.id}}'}",
    "decoder": "env: {kwargs: {x: '${oc.decode:\"1\"}'}}",
    "creator": "env: {kwargs: {x: '${oc.create:\"a: 1\"}'}}",
    "unknown resolver": "env: {id: '${MODULE:x}'}",
    "resolver by reference": "env: {id: '${${env.mode}:x}'}",
    "resolver in a list": "policy: {hidden: ['${oc.env:HOME}']}",
    "resolver in a key": "env: {kwargs: {'${oc.env:HOME}': 1}}",
    "python object": "env: !!python/object/apply:MODULE.run []",
    "python name": "seed: !!python/name:MODULE.run ''",
    "python module": "seed: !!python/module:MODULE ''",
    "python tuple": "policy: {hidden: !!python/tuple [1, 2]}",
    "a plain tag": "seed: !!int 1",
    "an own tag": "seed: !run 1",
    "call in a sweep": "hydra: {sweeper: {params: {seed: 'MODULE.run(1)'}}}",
    "call beside a quoted text": "hydra: {sweeper: {params: {env.id: \"'a (b)',MODULE.run(1)\"}}}",
    "colon in the env id": "env: {id: 'MODULE:X-v0'}",
    "colon in a dotted key": "env.id: 'MODULE:X-v0'",
    "alias": "env: &a {num: 1}\npolicy: *a",
    "anchor alone": "env: &a {num: 1}",
    "merge key": "env: {<<: {num: 1}}",
    "bomb": "a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]",
    "deep nesting": "env: {kwargs: " + "{a: " * 50 + "1" + "}" * 51,
    "deep lists": "seed: " + "[" * 5000 + "]" * 5000,
    "too long": "# " + "x" * guard.MAX_BYTES,
    "two documents": "seed: 1\n---\nseed: 2",
    "key given twice": "seed: 1\nseed: 2",
    "a list": "- seed: 1",
    "a text": "seed",
    "a huge number": "seed: " + "9" * 6000,
    "a control character": "seed: '\x07'",
    "defaults of hydra": "defaults: [{override /hydra/launcher: joblib}]",
    "defaults that add a group": "defaults: [{/hydra/callbacks: x}]",
    "defaults from a package": "defaults: ['pkg://MODULE/x']",
    "defaults from a path": "defaults: ['../../../etc/passwd']",
    "defaults from a root path": "defaults: [{override /env: ../../etc/passwd}]",
    "defaults moved": "defaults: [{override /env@hydra.callbacks: gym}]",
    "defaults as a text": "defaults: x",
    "a key that moves": "env@hydra: {num: 1}",
    "a number as key": "1: 2",
}


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A module that shows that it was imported, in a working folder that is on the path."""
    (tmp_path / "trapped.py").write_text("from pathlib import Path\nPath('mark').touch()\ndef run(*a): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    ran = "trapped" in sys.modules
    sys.modules.pop("trapped", None)
    assert not ran and not (tmp_path / "mark").exists(), "the payload ran"


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_a_recipe_that_could_run_something_is_refused(payload, trap):
    recipes = trap / "recipes"
    recipes.mkdir()
    (recipes / "bad.yaml").write_text(payload.replace("MODULE", "trapped"))
    with pytest.raises(ConfigError) as refusal:
        compose.plan("train", ["recipe=bad"], multirun="sweep" in payload)
    assert "bad.yaml" in str(refusal.value)


def test_the_same_recipe_without_the_payload_is_accepted(trap):
    (trap / "recipes").mkdir()
    (trap / "recipes" / "good.yaml").write_text(
        "defaults: [{override /memory: full}]\nenv: {num: 2, kwargs: {x: 1}}\nrun: {dir: 'runs/a/${seed}'}\n"
        "hydra: {sweep: {dir: 'runs/x/${now:%H-%M}'}, sweeper: {params: {seed: 'range(0,3)', optim.lr: '1,2'}}}"
    )
    assert compose.configure("train", ["recipe=good"]).run.dir == "runs/a/0"
    compose.plan("train", ["recipe=good", "run.dir=null"], multirun=True)


OUTSIDE = (
    "run: {dir: ../x}", "run: {dir: /tmp/x}", "run: {dir: '~/x'}", "run: {dir: runs/../../x}", "run: {dir: x}",
    "hydra: {run: {dir: ../x}}", "hydra: {sweep: {dir: x}}", "hydra: {sweep: {subdir: ../../x}}",
    "hydra: {sweep: {subdir: '${hydra:job.override_dirname}'}}",
    "storage: {kind: memmap, scratch_dir: /tmp}", "storage: {scratch_dir: '${run.dir}/../../x'}",
    "env: {wrappers: [{RecordVideo: {video_folder: ../outside}}]}",
    "env: {wrappers: [{RecordVideo: {video_folder: videos}}]}",
    "env: {wrappers: [{RecordVideo: {video_folder: '${env.kwargs.x}'}}]}",
    "env: {wrappers: [{RecordVideo: {video_folder: runs/v, name_prefix: ../../x}}]}",
    "env: {kwargs: {log_dir: /tmp/x}}",
    "hydra: {sweeper: {params: {run.dir: '../x,../y'}}}",
    "hydra: {sweeper: {params: {storage.scratch_dir: /tmp}}}",
    "hydra: {sweeper: {params: {env.wrappers: '[{RecordVideo:{video_folder:../x}}]'}}}",
)  # fmt: skip


@pytest.mark.parametrize("text", OUTSIDE)
def test_a_recipe_cannot_have_anything_written_outside_runs(text, trap):
    (trap / "recipes").mkdir()
    (trap / "recipes" / "bad.yaml").write_text(text)
    refused(ConfigError, "./runs", lambda: compose.plan("train", ["recipe=bad"], multirun="sweep" in text))


def test_the_command_line_may_write_anywhere(trap):
    wrapped = "env.wrappers=[{RecordVideo:{video_folder:../outside}}]"
    cfg = compose.configure("train", ["run.dir=../x", "storage=memmap", "storage.scratch_dir=/tmp", wrapped, "loss=dqn",
                                      "sampler=random"])  # fmt: skip
    assert (cfg.run.dir, cfg.storage.scratch_dir) == ("../x", "/tmp")


@pytest.mark.parametrize(
    "override",
    [
        "hydra.callbacks.x._target_=trapped.Run",
        "+hydra.callbacks.x={_target_:trapped.Run}",
        "hydra.job_logging.formatters.f.class=trapped.Run",
        "hydra.searchpath=[pkg://trapped]",
        "hydra.job.chdir=true",
        "+hydra.job.env_set.A=1",
        "hydra/job_logging=disabled",
        "hydra.sweeper.params={hydra.callbacks.x: 1}",
        "env.kwargs={_target_:trapped.run}",
        "run.dir=${oc.env:HOME}",
        "+new.key=${oc.decode:1}",
        "env@hydra:x=gym",
        "+env@hydra.callbacks=gym",
        "policy.kwargs={a:{b:{_target_:trapped.run}}}",
        "+_target_=trapped.run",
        "+a._target_=trapped.run",
        "env.id='trapped.run()'",
    ],
)
def test_an_override_that_could_run_something_is_refused(override, trap):
    with pytest.raises(ConfigError):
        compose.plan("train", [override])


def test_a_text_with_parentheses_is_a_text(trap):
    """What is quoted, and what a file says, is not read for calls."""
    assert compose.configure("train", ["env.kwargs.x='trapped.run(1)'"]).env.kwargs == {"x": "trapped.run(1)"}
    (trap / "recipes").mkdir()
    (trap / "recipes" / "copy.yaml").write_text(
        "run: {dir: 'runs/a (copy)'}\nenv: {kwargs: {x: trapped.run(1)}}\n"
        "hydra: {sweeper: {params: {env.kwargs.y: \"'a (b)','c)'\"}}}\n"
    )
    cfg = compose.configure("train", ["recipe=copy"])
    assert (cfg.run.dir, cfg.env.kwargs) == ("runs/a (copy)", {"x": "trapped.run(1)"})
    swept = compose.plan("train", ["recipe=copy", "run.dir=null"], multirun=True).sweep
    assert [item.values for item in swept if item.key == "env.kwargs.y"] == [("a (b)", "c)")]
    assert from_dict("train", {"run": {"dir": "a (copy)"}}).run.dir == "a (copy)"
    assert (
        from_dict("train", {"storage": {"kind": "memmap"}}, ['storage.scratch_dir="a (copy)"']).storage.scratch_dir
        == "a (copy)"
    )


@pytest.mark.parametrize(
    "overrides",
    [
        ["env.id=trapped:X-v0"],
        ["env.id='trapped:X-v0'"],
        ["env.kwargs.env_id=trapped:X-v0"],
        ["env.kwargs={env_id: 'trapped:X-v0'}"],
        ["env.kwargs.env_ids=['CartPole-v1','trapped:X-v0']"],
        ["policy.kwargs.x=trapped:X-v0", "env.id=${policy.kwargs.x}", "policy=random"],
        ["-m", "env.id=CartPole-v1,trapped:X-v0"],
    ],
)
def test_an_env_id_that_names_a_module_is_refused_with_what_to_type(overrides, trap):
    with refused(ConfigError, "X-v0"):
        compose.plan("collect", [word for word in overrides if word != "-m"], multirun="-m" in overrides)


def test_an_env_id_that_names_a_module_is_refused_from_python(trap):
    import rlcli

    refused(ConfigError, "trapped", lambda: rlcli.train(env={"id": "trapped:X-v0"}))


@pytest.mark.parametrize("name", ["wrappers", "transforms"])
def test_a_part_is_never_found_by_an_import_path(name, trap):
    refused(ConfigError, "env.", lambda: compose.plan("train", [f"env.{name}=['trapped:X']"]))


@pytest.mark.parametrize(
    "data",
    [
        {"env": {"id": "trapped:X-v0"}},
        {"env": {"id": "${policy.path}"}, "policy": {"path": "trapped:X-v0"}},
        {"env": {"kwargs": {"_target_": "trapped.run"}}},
        {"run": {"dir": "${oc.env:HOME}"}},
        {"hydra": {"callbacks": {"x": {"_target_": "trapped.Run"}}}},
    ],
)
def test_a_saved_configuration_is_guarded_like_a_recipe(data, trap):
    with pytest.raises(ConfigError):
        from_dict("train", data)


def test_a_saved_env_id_that_names_a_module_is_refused_though_it_is_typed_again(trap):
    with refused(ConfigError, "trapped"):
        from_dict("train", {"env": {"id": "trapped:X-v0"}}, ["env.id=trapped:X-v0"])


def test_a_file_that_is_not_text_is_refused(tmp_path):
    path = Path(tmp_path / "x.yaml")
    path.write_bytes(b"\xff\xfe\x00")
    refused(ConfigError, "UTF-8", lambda: guard.read_yaml(path))


SPELLINGS = """
_target_: trapped.run|{_target_: trapped.run}|trapped.run()|trapped:run|trapped.run|${oc.env:HOME}|${trapped:x}
${oc.create:trapped}|!!python/object/apply:trapped.run []|!!python/name:trapped.run|pkg://trapped|file:///trapped.py
__import__('trapped')|$(python -m trapped)|`python -m trapped`|; python -m trapped|{{trapped.run}}|%(trapped)s
"""
PLACES = """
seed env.id env.kwargs.x env.wrappers env.transforms policy policy.kwargs.x policy.path memory.keep storage.init_from
run.dir loss recipe hydra.run.dir
"""
EVERYWHERE = [(place, text) for place in PLACES.split() for text in SPELLINGS.strip().replace("\n", "|").split("|")]


def say_it_everywhere(place: str, text: str, folder: Path) -> None:
    """In an override, in one of a resume, in a recipe, in a saved configuration, in the sweep of a recipe."""
    (folder / "recipes").mkdir(exist_ok=True)
    tree: object = text
    for part in reversed(place.split(".")):
        tree = {part: tree}
    sweep = {"hydra": {"sweeper": {"params": {place: text}}}}
    for name, content in (("said", tree), ("swept", sweep)):
        (folder / "recipes" / f"{name}.yaml").write_text(yaml.safe_dump(content))
    for ask in (
        lambda: compose.plan("train", [f"{place}={text}"]),
        lambda: compose.plan("train", [f"{place}='{text}'"]),
        lambda: compose.plan("train", ["recipe=said"]),
        lambda: compose.plan("train", ["recipe=swept"], multirun=True),
        lambda: from_dict("train", {}, [f"{place}={text}"]),
        lambda: from_dict("train", tree),
    ):
        try:
            ask()
        except ConfigError as error:
            assert str(error)
        assert "trapped" not in sys.modules and not (folder / "mark").exists(), (place, text)


def test_nothing_that_is_said_anywhere_runs(trap):
    for place, text in EVERYWHERE[::21]:
        say_it_everywhere(place, text, trap)


@pytest.mark.slow
def test_nothing_of_all_that_is_said_everywhere_runs(trap):
    for place, text in EVERYWHERE:
        say_it_everywhere(place, text, trap)


def test_each_reader_of_a_text_has_a_mapping_of_its_own():
    guard.parse_yaml("env: {num: 2}", "x.yaml")["env"]["num"] = 3
    assert guard.parse_yaml("env: {num: 2}", "x.yaml") == {"env": {"num": 2}}
