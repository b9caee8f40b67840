"""Small keys of a row packed into a record of few bytes, and unpacked: `cpu` is the compiled pass.

What the table of codes says, one row a code: `table` [C, 6] int64: kind; byte (or, of bits, bit) of the record where it
begins; elements of a value; bytes of an element; bytes of the code (of bits: 1, 2 or 4 bits an element, none of which
crosses a byte); what a set element looks like, as a whole number. Loads no compiler.
"""

from rlcli.exports import lazily

__getattr__ = lazily(__name__)[0]  # names of files

KIND, AT, COUNT, SIZE, WIDE, ONE = range(6)
BITS, ONE_HOT, NARROW = range(3)
