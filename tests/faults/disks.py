"""Disks that fail on purpose, and batches to put on them."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import sys
from pathlib import Path

import numpy as np
import torch
from face import Disk
from tensordict import TensorDict

from rlcli.data.next_obs import build_exact, build_full


class CountingDisk(Disk):
    """Notes every call; writes in small pieces, so that a file can be left half written."""

    piece = 200

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def at(self, call: str, path: Path) -> None:
        self.calls.append((call, path.name))


def places(calls: list, every: bool = False) -> list[int]:
    """Numbers of the calls, from 1; where a file is written in many pieces only those of the first two, or of `every`.

    Before the second piece a file is torn, and so it is before each that follows.
    """
    numbers, repeated = [], 0
    for n, call in enumerate(calls, 1):
        repeated = repeated + 1 if calls[n - 2 : n - 1] == [call] else 0
        numbers += [n] if every or repeated < 2 else []
    return numbers


class DyingDisk(CountingDisk):
    """The process is gone, without a word to anybody, before call number `n`."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n

    def at(self, call: str, path: Path) -> None:
        super().at(call, path)
        if len(self.calls) == self.n:
            os._exit(77)


class StepsDisk(CountingDisk):
    """Counts the pieces of one file as one step, since how many there are hangs on the digits of a time.

    With `n`, the process is gone before step `n` if that is odd, and in it, after its first call, if that is even.
    """

    def __init__(self, n: int = 0) -> None:
        super().__init__()
        self.n, self.steps = n, 0

    def at(self, call: str, path: Path) -> None:
        super().at(call, path)
        begun = self.calls[-2:-1] != self.calls[-1:]
        if self.steps == self.n and self.n % 2 == 0 and self.n:
            os._exit(77)
        self.steps += begun
        if self.steps == self.n and self.n % 2:
            os._exit(77)


class RefusingDisk(CountingDisk):
    """Call number `n` (of the kind `call`, if given) fails with an error number; later ones succeed."""

    def __init__(self, n: int, error: int = errno.ENOSPC, call: str | None = None) -> None:
        super().__init__()
        self.n, self.error, self.call = n, error, call

    def at(self, call: str, path: Path) -> None:
        super().at(call, path)
        seen = sum(self.call in (None, name) for name, _ in self.calls)
        if seen == self.n and self.call in (None, call):
            raise OSError(self.error, os.strerror(self.error))


def interrupted_at(number: int, work, folders=("files", "storages", "collected")) -> int:
    """Run `work()` with a Ctrl-C before line `number`, counted from 1, of what is run of these folders of `rlcli.data`.

    How many lines that came to; less than `number` where the work was done before.
    """
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        if not any(f"/rlcli/data/{name}/" in frame.f_code.co_filename for name in folders):
            return None
        count += event == "line"
        if event == "line" and count == number:
            signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return count


class PowerCut(BaseException):
    """Raised by `LosingDisk`: nothing may catch it."""


class LosingDisk(CountingDisk):
    """The power goes before call number `n`: what was not synced may be lost, in whole, in part, or not.

    Files are followed by inode: a synced file keeps its bytes, a name counts only after its folder was synced.
    """

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n
        self.bytes: dict[int, bytes] = {}
        self.names: dict[int, dict[str, int]] = {}
        self.replaced: dict[int, bytes] = {}  # what a file held whose name another file took

    def at(self, call: str, path: Path) -> None:
        super().at(call, path)
        if len(self.calls) >= self.n:  # and it stays away
            raise PowerCut
        if call == "rename" and path.is_file():
            self.replaced[path.stat().st_ino] = path.read_bytes()
            self.bytes.pop(path.stat().st_ino, None)  # its inode may be given to another file
        if call == "sync":
            self.bytes[path.stat().st_ino] = path.read_bytes()
        elif call == "sync_folder":
            self.names[path.stat().st_ino] = {p.name: p.stat().st_ino for p in path.iterdir()}

    def after_the_cut(self, folder: Path, out: Path, rng: np.random.Generator) -> None:
        """What the disk could hold when the power is back."""
        out.mkdir()
        durable = self.names.get(folder.stat().st_ino, {})
        for path in folder.iterdir():
            inode = path.stat().st_ino
            if durable.get(path.name) != inode and rng.random() < 0.5:
                if durable.get(path.name) in self.replaced:  # it is still the other file's
                    (out / path.name).write_bytes(self.replaced[durable[path.name]])
                continue  # the name was never made durable
            if path.is_dir():
                self.after_the_cut(path, out / path.name, rng)
                continue
            now, safe = path.read_bytes(), self.bytes.get(inode, b"")
            if now != safe:  # the end is somewhere between what was synced and what was written; blocks may be empty
                assert now.startswith(safe) or not safe
                end = int(rng.integers(len(safe), len(now) + 1))
                tail = now[len(safe) : end]
                now = safe + (tail if rng.random() < 0.7 else bytes(len(tail)))
            (out / path.name).write_bytes(now)


def run_and_die(work) -> tuple[int, list]:
    """Fork, run `work(report)`, and return (exit code, everything it reported before it ended)."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        code = 1
        try:
            work(lambda value: os.write(writer, pickle.dumps(value)))
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    reported = []
    with os.fdopen(reader, "rb") as pipe:
        while True:
            try:
                reported.append(pickle.load(pipe))
            except EOFError:
                break
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), reported


def batch(seed: int, steps: int = 3) -> tuple[TensorDict, TensorDict]:
    """(exact, full) of 2 lanes: an image, a vector, a reward, ends everywhere."""
    rng = np.random.default_rng(seed)
    now = {"pixels": rng.integers(0, 255, (2, steps, 4)).astype(np.uint8)}
    after = {"pixels": rng.integers(0, 255, (2, 4)).astype(np.uint8)}
    places = [(t, int(rng.integers(2))) for t in range(steps) if rng.random() < 0.5]
    last = {"pixels": rng.integers(0, 255, (len(places), 4)).astype(np.uint8)} if places else {}
    out = []
    for build in (build_exact, build_full):
        obs = torch.from_numpy(now["pixels"].copy())
        nexts = {**build({"pixels": obs}, after, places, last), "reward": torch.full((2, steps, 1), float(seed))}
        out.append(TensorDict({"pixels": obs, "next": nexts}, [2, steps], names=[None, "time"]))
    return out[0], out[1]


def equal(a: TensorDict, b: TensorDict) -> bool:
    """Same keys, same bits."""
    names = set(b.keys(True, True))
    return set(a.keys(True, True)) == names and all(torch.equal(plain(a.get(k)), plain(b.get(k))) for k in names)


def plain(x: torch.Tensor) -> torch.Tensor:
    return x.full() if hasattr(x, "full") else x
