"""The benches that develop rlcli, `python -m tests.bench NAME`: what they measure, and what each can be told."""

from __future__ import annotations

from rlcli.bench import Benches
from rlcli.bench.settings import ENV, HIDDEN, ROUNDS, TIMED, Setting, Settings
from rlcli.modules import ACTIVATIONS

ABOUT = {
    "update": "one PPO update against plain torch written by hand",
    "gae": "advantages of batches of many shapes against another framework's functions",
    "value": "the value stage by net size: two calls, one pass, shifted, chunks; time and peak memory",
    "rnn": "GRU and LSTM with resets inside the sequence against torch.nn without any",
    "extend": "writing rows to a buffer against other buffers and a bare copy",
    "sample": "drawing slices and images from a buffer against other buffers, by its size",
    "sweep": "jobs of a sweep side by side against several shells that run a part of them each",
    "ranks": "a PPO run of one process against the same run divided among the ranks of a learner",
    "cluster": "collecting by workers on Ray, gloo and RPC, beside local ones and peers; their bytes, their weights",
    "gaps": "what env processes lose where their next order comes late",
    "gpu": "what a GPU is given, part by part, beside hand-written graphs, SB3, bare envs and our own CPU runs",
    "actors": "collecting by recurrent and other actors, with bookkeeping, dict observations, on envpool",
    "memory": "bytes of a stored step in every storage, and a run's memory against what plan said",
    "weights": "new weights to two workers: published to adopted, against plain copies and peers",
}
SETTINGS: dict[str, Settings] = {
    "actors": {
        "env.id": ENV._replace(meaning=f"{ENV.meaning}: vectors observed, discrete actions"),
        "envpool": Setting("CartPole-v1", "one of envpool's, stepped 8, 64 and 512 at a time; envpool= leaves it out"),
        "frames_per_batch": Setting(2048, "frames that a side collects in a round, over all envs", 64, 10**8),
        **TIMED,
        "peers": Setting(True, "measure torchrl too, where it is installed"),
    },
    "memory": {
        "games": Setting("Pong,Breakout,MsPacman,SpaceInvaders", "Atari games, random play; games= leaves them out"),
        "frames": Setting(4000, "frames of each game", 1000, 10**7),
        "trained": Setting(True, "train a CartPole policy and store its play as RGB pictures"),
        "batch_size": Setting(256, "rows of a sample whose time is compared", 1, 10**5),
        "recipes": Setting("ppo_exact", "recipes that are run to compare with their plan; recipes= leaves them out"),
        "calls": Setting(5, "samples that a side draws in a round", 1, 10**6),
        **TIMED,
        "peers": Setting(True, "measure torchrl too, where it is installed"),
    },
    "update": {
        "sampler.batch_size": Setting(256, "rows of a minibatch", 1, 10**8),
        "collector.frames_per_batch": Setting(2048, "rows of the batch", 2, 10**8),
        "policy.hidden": HIDDEN,
        "policy.activation": Setting("tanh", "between the layers", choices=tuple(ACTIVATIONS)),
        "optim.epochs": Setting(2, "passes over the batch in a round", 1),
        "observation": Setting(4, "features of an observation", 1, 10**6),
        "action": Setting("discrete", "kind of the action", choices=("discrete", "box")),
        "actions": Setting(2, "choices of a discrete action, or dimensions of a box", 1, 10**6),
        **TIMED,
        "peers": Setting(True, "measure torchrl too, where it is installed"),
    },
    "gae": {
        "end_rate": Setting(0.02, "chance that a trajectory ends at a step; every other end is a truncation", 0, 1),
        "scale": Setting(1, "divide the steps of every shape by this", 1, 10**4),
        **TIMED,
        "peers": Setting(True, "measure torchrl too, where it is installed"),
    },
    "value": {
        "envs": Setting(16, "rows of the batch", 1, 10**5),
        "steps": Setting(256, "steps of a row", 2, 10**6),
        "observation": Setting(64, "numbers of an observation", 1, 10**6),
        "widths": Setting(
            [64, 256, 1024], "sizes of both hidden layers of the value net, one net after the other", 1, 10**5
        ),
        "num_chunks": Setting(4, "parts of the chunked sides", 2, 10**4),
        "end_rate": Setting(0.002, "chance that a trajectory is cut at a step", 0, 1),
        **TIMED,
    },
    "extend": {
        "rows": Setting(1000, "rows of a small batch", 1, 10**6),
        "capacity": Setting(100_000, "rows of the buffers", 1000, 10**8),
        "images": Setting(256, "rows of a big batch: two stacks of four 84x84 frames each", 1, 10**4),
        "calls": Setting(20, "small batches that a side writes in a round", 1, 10**6),
        "memmap": Setting(True, "measure storages on disk too"),
        **TIMED,
        "peers": Setting(True, "measure torchrl and cpprb too, where they are installed"),
    },
    "sample": {
        "rows": Setting(1_000_000, "rows of the buffer that slices are drawn from", 10_000, 10**8),
        "large": Setting(10_000_000, "rows of the buffer that a small one is compared with", 100_000, 10**9),
        "small": Setting(100_000, "rows of that small one", 10_000, 10**8),
        "extend": Setting(100, "rows that are written before each sample", 1, 10**5),
        "num_slices": Setting(8, "slices of a sample", 1, 10**5),
        "slice_len": Setting(32, "rows of a slice", 1, 10**4),
        "images": Setting(4096, "stacks of four 84x84 frames that image samples are drawn from", 256, 10**6),
        "batch_size": Setting(256, "image stacks of a sample", 1, 10**5),
        "calls": Setting(20, "samples that a side draws in a round", 1, 10**6),
        **TIMED,
        "peers": Setting(True, "measure torchrl too, where it is installed"),
    },
    "weights": {
        "kilobytes": Setting([338, 16_400], "sizes of the policy, one after the other", 4, 10**7),
        "calls": Setting(20, "publications of a side in a round", 1, 10**6),
        "stress": Setting(2.0, "seconds of publishing at full speed while adopted versions are looked through", 0.1),
        **TIMED,
        "peers": Setting(True, "measure torchrl's schemes too, where it is installed"),
    },
    "ranks": {
        "ranks": Setting(2, "processes that learn together", 2, 64),
        "frames": Setting(8_192, "frames of a run after its first batch", 1024),
        "wait": Setting(0.001, "seconds that a step of the slow envs takes", 0.0, 10.0),
        "rounds": Setting(3, "rounds, the sides in turns", 3, 100),
    },
    "cluster": {
        "part": Setting("all", "what is measured", choices=("all", "slow", "cartpole", "bytes", "weights")),
        "cost": Setting(100, "microseconds of a step of the slow envs", 1, 10**6),
        "frames": Setting([8192, 1024], "frames of a batch, one size after the other", 16, 10**7),
        "round": Setting(8192, "frames that a side collects in a round", 16, 10**8),
        "calls": Setting(3, "times that a transfer is timed in a round; the fastest counts", 1, 1000),
        "rounds": ROUNDS,
        "peers": Setting(True, "measure torchrl's collectors too, where it is installed"),
        "rllib": Setting("", "Python of an environment that has ray[rllib]: measure RLlib's env runners, too"),
    },
    "sweep": {
        "jobs": Setting(8, "jobs of the sweep", 2, 10**4),
        "processes": Setting(2, "processes that run them, and shells beside them", 2, 1000),
        "total_frames": Setting(131_072, "frames of a job", 1),
        "rounds": Setting(3, "rounds, the sides in turns", 3, 100),
    },
    "gaps": {
        "env.num": Setting(8, "envs that are stepped together", 2, 10**4),
        "cost": Setting(0, "microseconds that a step of an env computes; 0 for Pong", 0, 10**6),
        "workers": Setting(0, "processes beside the caller; 0 for as many as a run has", 0, 1000),
        "gaps": Setting([0, 100, 500, 2500], "microseconds between a step and the next order", 0, 10**6),
        "steps": Setting(64, "steps in one call of a side", 1, 10**6),
        "seconds": Setting(0.3, "about how long a side steps in a round", 0.001, 60),
        **TIMED,
    },
    "gpu": {
        "parts": Setting("trace,act,update,values,train,workers,rnn,eval,start,replay,env", "what, in this order"),
        "device": Setting("cuda", "where; cpu walks the same way with tiny sizes", choices=("cuda", "cpu")),
        "seconds": Setting(285.0, "about how long all parts take; each has a share", 1, 10**5),
        "recipes": Setting("ppo_pong,sac_pendulum,ppo_exact,dqn_cartpole", "what the part train trains"),
        "folder": Setting("runs/bench/gpu", "where each part's rounds are written as it ends"),
        "strict": Setting(False, "stop where a part fails, in place of telling it and going on"),
        **TIMED,
        "peers": Setting(True, "measure torchrl and SB3 too, where they are installed"),
    },
    "rnn": {
        "cell": Setting("both", "which cell", choices=("both", "gru", "lstm")),
        "sequences": Setting([32, 128], "sequences of a batch, one size after the other", 1, 10**6),
        "steps": Setting([128, 64], "steps of a sequence, by size; one number serves all sizes", 1, 10**6),
        "units": Setting([128, 256], "units of the layer, by size; one number serves all sizes", 1, 10**5),
        "inputs": Setting(0, "numbers of an input; 0 for as many as units", 0, 10**6),
        "resets": Setting([1, 3, 10], "percent of the steps at which a trajectory begins, one after the other", 0, 100),
        "backends": Setting("reference,pad,scan,cpu,triton", "what is measured beside auto; backends= leaves all out"),
        "device": Setting("cpu", "where; cuda has sizes of its own", choices=("cpu", "cuda")),
        "seconds": Setting(0.05, "about how long a side computes in a round", 0.001, 60),
        **TIMED,
        "peers": Setting(True, "measure torchrl too, where it is installed"),
    },
}
_TINY = {"recipes": "ppo_exact", "rounds": 7}
_ON_A_GPU = {"sequences": [128], "steps": [128], "units": [256], "resets": [3]}

BENCHES = Benches(
    "python -m tests.bench",
    "tests.bench",
    ABOUT,
    SETTINGS,
    own={"rnn": ("device", {"cuda": _ON_A_GPU}), "gpu": ("device", {"cpu": _TINY})},
    elsewhere="benches of a machine: rlcli bench NAME",
)
