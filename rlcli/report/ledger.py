"""The memory ledger: lines of all components, with the most each has held and what the modes save against `full`.

It only keeps them: `counted.py` reads a batch and a learner, `process.py` asks the operating system.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

ROLLOUT = "rollout"
LEARNER = "params+optim"


@dataclass(frozen=True)
class Entry:
    """One line of the ledger.

    Attributes
    ----------
    component : str
        Whose memory it is: "rollout", "params+optim", "buffer".
    key : str
    bytes : int
        Held now, counted nowhere else in the ledger.
    shape, dtype, device : as they read in print; empty where the key is not stored
    peak : int
        The most this line has held in the run.
    per_frame : float
        Bytes a frame; 0 where the notion does not apply.
    saved : int
        What `full` would have stored for this key, less what is held.
    note : str
        "exact", "not stored", "same memory as done".
    """

    component: str
    key: str
    bytes: int
    shape: tuple[int, ...] = ()
    dtype: str = ""
    device: str = ""
    peak: int = 0
    per_frame: float = 0.0
    saved: int = 0
    note: str = ""

    def as_dict(self) -> dict:
        return asdict(self) | {"shape": list(self.shape)}


class Ledger:
    """Entries of all components, with the most each has held.

    Examples
    --------
    >>> ledger = Ledger()
    >>> ledger.read(counted(batch, ["observation"], modules={"actor": actor}, optimizer=optimizer))
    >>> ledger.component("rollout").saved
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._peaks: dict[tuple[str, str], int] = {}

    def read(self, entries: Iterable[Entry]) -> None:
        """Take the present state, every component's lines."""
        entries = list(entries)
        for entry in entries:
            name = (entry.component, entry.key)
            self._peaks[name] = max(self._peaks.get(name, 0), entry.bytes, entry.peak)
        self.entries = [replace(entry, peak=self._peaks[entry.component, entry.key]) for entry in entries]

    def components(self) -> list[str]:
        """Names in order of first appearance."""
        return list(dict.fromkeys(entry.component for entry in self.entries))

    def component(self, name: str) -> Entry:
        """The sum over one component, as an entry with an empty key; peaks are summed too."""
        lines = [entry for entry in self.entries if entry.component == name]
        return Entry(
            name,
            "",
            sum(entry.bytes for entry in lines),
            peak=sum(entry.peak for entry in lines),
            per_frame=sum(entry.per_frame for entry in lines),
            saved=sum(entry.saved for entry in lines),
        )

    @property
    def saved(self) -> int:
        """Bytes that `full` would hold on top of what is held."""
        return sum(entry.saved for entry in self.entries)
