"""Whole versions in memory that processes share: one writes, any number read, nobody waits for anybody.

```
newest  the slot that the newest version lies in, and the slot's turn (see `Newest`)
slot    | turn | version | sum |   bytes of all tensors   |     2 of them, more when readers act on them
          odd while it is written
```
The writer takes a slot that is not the newest and that no reader has locked.

A reader of a large model locks the newest slot, and acts on those very bytes: its model lies in a window that shows
them. Stopped for however long, it costs the writer that slot. A reader of a small one copies, which is cheaper there,
and without a lock: it looks for the newest again if the slot's turn moved meanwhile. What it adopts has to sum to what
the writer summed, version included, before anybody sees it; so whatever order a processor keeps its loads and stores
in, and whatever became of the memory, what is adopted is whole. A writer that is stopped in the middle leaves the
newest version as it is.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch
from torch import Tensor

from rlcli.errors import DamagedDataError
from rlcli.processes.region import Region
from rlcli.processes.slots import Slots
from rlcli.processes.window import Window
from rlcli.weight_update.layout import WeightLayout, checksum, copy_summed, summed
from rlcli.weight_update.newest import Newest, Overtaken
from rlcli.weight_update.transport import TransportBackend

_TRIES = 3  # copies of a slot that nobody wrote to meanwhile, and that do not sum up
_MOST = 1024  # slots: a reader has two at most, and that only while it goes from one to the other
_LARGE = 2**20  # bytes of a model that are not copied: to show other pages takes 10 us, as long as to copy 300 KB


class SharedVersions(TransportBackend):
    """The newest versions of one model's weights.

    Parameters
    ----------
    layout : WeightLayout
        Of the model's tensors.
    fd : int, optional
        Of those that another process made, to read them; it stays the caller's to close. Without it this is the writer.

    Attributes
    ----------
    fd : int or None
        The writer's, for `Channel.send_fd`. The memory has no name, and is gone with the last process that has it.

    Raises
    ------
    ResourceError
        There is not enough shared memory.
    """

    def __init__(self, layout: WeightLayout, fd: int | None = None) -> None:
        self.layout = layout
        word, words = np.dtype(np.int64), (_MOST,)
        self._region = Region(
            {
                **Newest.fields(1), "locks": ((1,), word), "turn": (words, word), "version": (words, word),
                "sum": (words, np.dtype(np.uint64)),
            },
            fd,
        )  # fmt: skip
        count, newest, *numbers = self._region.arrays.values()
        self._locks, self._turn, self._version, self._sum = (each.data for each in numbers)  # Python's own numbers
        self._newest, self._model, self._alone = Newest(count, newest), 0, True
        self._slots = Slots(self._region.fd, sum(x.nbytes for x in self._region.arrays.values()) + 512, layout.nbytes)
        self._read = 0  # the publication that this end knows
        self._word, self._adopted = 0, 0  # of this model, and the version
        self._window: Window | None = None
        self._views: list[list[Tensor]] = []
        self._staged: tuple[Tensor, list[Tensor]] | None = None
        if fd is None:
            self.fd = self._region.fd
            self._let_go = weakref.finalize(self, self._region.forget_fd)
            self._locks[0] = self._slots.locks and layout.nbytes >= _LARGE
            self._add()
            self._add()
        self._locked = bool(self._locks[0]) and self._slots.locks  # whether readers may act on a slot

    def join(self, newest: Newest, model: int) -> None:
        self._newest, self._model, self._alone = newest, model, False

    @property
    def nbytes(self) -> int:
        return len(self._slots) * self.layout.nbytes

    # ---- the writer --------------------------------------------------------------------------------------------
    def publish(self, version: int, tensors: list[Tensor]) -> None:
        """Make a whole version the newest.

        Parameters
        ----------
        tensors : list of Tensor
            In the order and of the shapes of the layout, on any device; other dtypes are converted.

        Raises
        ------
        ResourceError
            Readers have all slots, and there is not enough shared memory for one more; nothing was published.
        """
        at = self._free(self._newest.word(self._model) % _MOST)
        try:
            self._turn[at] |= 1
            self._copy_in(tensors, at)
            self._version[at] = version
            self._sum[at] = checksum(summed(self._slots.memory(at)), version)
            self._turn[at] += 1
        finally:
            if self._locked:
                self._slots.unlock(at)
        self._newest.stage(self._model, self._turn[at] * _MOST + at)
        if self._alone:
            self._newest.publish()

    send_weights = publish

    def _free(self, newest: int) -> int:
        """Lock and return the first slot that nobody reads: it is likely in the processor's cache."""
        if not self._locked:
            return 1 - newest
        for at in range(len(self._slots)):
            if at != newest and self._slots.lock(at, write=True):
                return at
        at = self._add()
        self._slots.lock(at, write=True)
        return at

    def _add(self) -> int:
        at = len(self._slots)
        self._slots.add()
        self._views.append(list(self.layout.views(self._slots.memory(at)).values()))
        return at

    def _copy_in(self, tensors: list[Tensor], at: int) -> None:
        devices = {tensor.device for tensor in tensors}
        with torch.no_grad():
            if len(devices) == 1 and (device := devices.pop()).type != "cpu":  # gathered there, to cross at once
                if self._staged is None or self._staged[0].device != device:
                    gathered = torch.zeros(self.layout.nbytes, dtype=torch.uint8, device=device)
                    self._staged = gathered, list(self.layout.views(gathered).values())
                gathered, views = self._staged
                torch._foreach_copy_(views, tensors)
                torch.from_numpy(self._slots.memory(at)).copy_(gathered)
            elif tensors:
                torch._foreach_copy_(self._views[at], tensors)

    # ---- readers -----------------------------------------------------------------------------------------------
    @property
    def waiting(self) -> bool:
        return self._newest.count != self._read

    def memory(self, nbytes: int) -> np.ndarray:
        if self._locked:
            try:
                self._window = Window(self._slots)
            except OSError:  # not on this system: versions are copied
                return super().memory(nbytes)
            return self._window.memory
        return super().memory(nbytes)

    def receive_weights(self, memory: np.ndarray) -> int:
        """Copy the newest version or show it in the window; Overtaken if this model is published with others."""
        while True:
            if self._alone:
                self._newest.look()
            try:
                return self._receive(memory)
            except Overtaken:
                if not self._alone:
                    raise

    def _receive(self, memory: np.ndarray) -> int:
        word = self._newest.seen[self._model]
        if word != self._word:
            turn, at = divmod(word, _MOST)
            if self._window is not None and memory is self._window.memory:
                self._adopted = self._show(self._window, at, turn)
            else:
                self._adopted = self._copy(memory, at, turn)
        self._word, self._read = word, self._newest.seen_count
        return self._adopted

    def _copy(self, memory: np.ndarray, at: int, turn: int) -> int:
        for _ in range(_TRIES):
            version, total = self._version[at], self._sum[at]
            arrived = checksum(copy_summed(memory, self._slots.memory(at)), version)
            if self._turn[at] != turn:
                raise Overtaken
            if arrived == total:
                return version
        raise _damaged(version)

    def _show(self, window: Window, at: int, turn: int) -> int:
        before = window.shown
        if not self._slots.lock(at):
            raise Overtaken
        try:
            if self._turn[at] != turn:  # the writer has come round to it before
                raise Overtaken
            version = self._version[at]
            self._check(window, at, version)
            window.show(at)
        except BaseException:
            self._slots.unlock(at)
            raise
        if before is not None:
            self._slots.unlock(before)
        return version

    def _check(self, window: Window, at: int, version: int) -> None:
        total = self._sum[at]
        if checksum(summed(window.at_home(at)), version) == total:
            return
        window.forget(at)  # pages that this process wrote to, when the slot was shown before
        if checksum(summed(window.at_home(at)), version) != total:
            raise _damaged(version)

    def close(self) -> None:
        """Close the descriptor; whoever has the memory keeps it."""
        if self.fd is not None:
            self._let_go()
            self.fd = None


def _damaged(version: int) -> DamagedDataError:
    return DamagedDataError(
        "weights in shared memory are not what was published", where=f"version {version}",
        why="they do not sum to the writer's checksum",
    )  # fmt: skip
