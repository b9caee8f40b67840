"""A run that compiles nothing has no compiler in it; once something compiles, torch and tensordict are as written."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = ("torch._dynamo", "torch._inductor", "sympy", "triton", "torch.distributed.tensor")
PROGRAM = """
import inspect, json, sys
from rlcli.cli.main import main

codes, loaded = [], []
for words in json.loads(sys.argv[1]):
    codes.append(main(["train", "total_frames=256", "run.eval_episodes=1", *words]))
    loaded.append([name for name in json.loads(sys.argv[2]) if name in sys.modules])

import torch
from tensordict import TensorDict, base, utils
from rlcli import imports

excluded = inspect.unwrap(torch.optim.Optimizer.zero_grad)
called = []
imports.when_compiler_is_loaded(lambda: called.append("once"))
imports.forget(forgotten := lambda: called.append("never"))
imports.when_compiler_is_loaded(forgotten), imports.forget(forgotten)
before = vars(excluded).get("__dynamo_disable") is excluded

@torch.compile(backend="eager", fullgraph=True)
def update(td):
    return td.apply(lambda x: x + 1).set("b", td["a"] * 2)

compiled = update(TensorDict({"a": torch.ones(3)}, [3]))["b"].tolist()
rules = torch._dynamo.trace_rules
facts = {
    "codes": codes, "loaded": loaded, "compiled": compiled, "called": called,
    "excluded": [before, "__dynamo_disable" in vars(excluded)],
    "allowed": id(base._foreach_copy_) in rules._allowed_callable_ids.function_ids,
    "constant": utils._lock_warn._dynamo_marked_constant, "waiting": len(imports._waiting),
    "restored": torch.compiler.allow_in_graph.__module__,
}
print("FACTS" + json.dumps(facts))
"""


def test_runs_load_no_compiler_and_the_first_who_compiles_finds_all_marks_made(tmp_path):
    on_policy = ["env.id=Pendulum-v1", f"run.dir={tmp_path / 'on'}"]
    off_policy = ["recipe=dqn_cartpole", "collector.init_random_frames=64", f"run.dir={tmp_path / 'off'}"]
    program = [sys.executable, "-c", PROGRAM, json.dumps([on_policy, off_policy]), json.dumps(HEAVY)]
    ran = subprocess.run(program, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    facts = json.loads(ran.stdout.rpartition("FACTS")[2])
    assert facts["codes"] == [0, 0] and facts["loaded"] == [[], []]
    assert facts["compiled"] == [2, 2, 2] and facts["called"] == ["once"]
    assert facts["excluded"] == [True, False] and facts["waiting"] == 0
    assert facts["allowed"] and facts["constant"] and facts["restored"] == "torch.compiler"
