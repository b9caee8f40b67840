"""Small keys of a row, stored in as few bytes as they need and read back bit for bit."""

from rlcli.data.codes.code import Code
from rlcli.data.codes.packing import Packing, codes_of

__all__ = ["Code", "Packing", "codes_of"]
