"""Small keys of a row, stored in as few bytes as they need and read back bit for bit."""

from typing import TYPE_CHECKING

from rlcli.exports import lazily

if TYPE_CHECKING:
    from rlcli.data.codes.code import Code as Code
    from rlcli.data.codes.packing import Packing as Packing
    from rlcli.data.codes.packing import codes_of as codes_of

__getattr__, __dir__, __all__ = lazily(__name__)
