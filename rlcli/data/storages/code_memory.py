"""Memory for codes of any length, taken in pieces and used again once nothing in a piece is needed any more.

```
piece 0 | code code code code ~ |    piece 1 | code code ... used -> |      ~ too little room for the next code
```
What is written over leaves a hole; a piece whose codes are all given up is written anew from its beginning.
"""

from __future__ import annotations

import numpy as np

_LEAST, _MOST = 1 << 16, 1 << 20  # bytes of a piece


class CodeMemory:
    """Allocate the memory of coded frames: see the module."""

    def __init__(self, width: int, capacity: int) -> None:
        wanted = 1 << max(capacity * width // 1024, 1).bit_length()
        self.size = max(4 * width, min(max(wanted, _LEAST), _MOST))
        self._pieces: list[np.ndarray] = []
        self._live: list[int] = []  # codes that are needed in each piece
        self._free: list[int] = []
        self._spare: list[np.ndarray] = []  # pieces that a write may need
        self.addresses = np.zeros(0, np.int64)  # of the pieces, `size` bytes each
        self.piece, self.used = -1, self.size  # being written (-1: none yet), and its bytes in use

    @property
    def address(self) -> int:
        """Return the address of the piece that is written now; 0 while there is none."""
        return int(self.addresses[self.piece]) if self.piece >= 0 else 0

    @property
    def nbytes(self) -> int:
        """Return the bytes of all pieces, used or not."""
        return sum(piece.nbytes for piece in self._pieces)

    def reserve(self, codes: int, longest: int) -> None:
        """Reserve memory for more codes of so many bytes, until `settle`; a MemoryError changes nothing."""
        here = (self.size - self.used) // longest
        missing = codes - here - len(self._free) * (self.size // longest)
        while missing > len(self._spare) * (self.size // longest):
            self._spare.append(np.empty(self.size, np.uint8))

    def settle(self) -> None:
        """Give back what was reserved and not needed."""
        self._spare.clear()

    def put(self, code: bytes | np.ndarray) -> tuple[int, int]:
        """Keep a code; its piece, and the place in it."""
        if self.piece < 0 or self.used + len(code) > self.size:
            self.next_piece()
        place = self.used
        if len(code):
            self._pieces[self.piece][place : place + len(code)] = np.frombuffer(code, np.uint8)
        self.took(1, place + len(code))
        return self.piece, place

    def took(self, codes: int, used: int) -> None:
        """Note that so many codes were written into the piece, which is in use up to `used`."""
        self.used = used
        if codes:
            self._live[self.piece] += codes

    def give_up(self, pieces: np.ndarray) -> None:
        """Release the codes int ``[N]`` that lie in these pieces."""
        for piece, count in zip(*np.unique(pieces, return_counts=True), strict=True):
            self._live[piece] -= int(count)
            if not self._live[piece] and piece != self.piece:
                self._free.append(int(piece))

    def next_piece(self) -> None:
        """Go on in an empty piece."""
        full = self.piece
        if self._free:
            self.piece = self._free.pop()
        else:
            self._take(self._spare.pop() if self._spare else np.empty(self.size, np.uint8))
        if full >= 0 and not self._live[full]:
            self._free.append(full)
        self.used = 0

    def _take(self, memory: np.ndarray) -> None:
        self._pieces.append(memory)
        self._live.append(0)
        self.addresses = np.append(self.addresses, memory.ctypes.data)
        self.piece = len(self._pieces) - 1

    def code(self, piece: int, place: int, length: int) -> np.ndarray:
        """Return a code that was put; not a copy."""
        return self._pieces[piece][place : place + length]

    @classmethod
    def of(cls, codes: np.ndarray) -> CodeMemory:
        """View codes that lie in one piece of memory, uint8 ``[N]``: to be read."""
        memory = cls(1, 1)
        memory._take(codes)
        return memory
