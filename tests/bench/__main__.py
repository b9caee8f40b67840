"""`python -m tests.bench NAME [key=value ...]`: measure parts of rlcli beside hand-written ones and peers."""

import sys

from rlcli.cli.bench import answer
from rlcli.errors import RlcliError
from tests.bench.settings import BENCHES

try:
    sys.exit(answer(BENCHES, sys.argv[1:]))
except RlcliError as error:
    print(f"{BENCHES.command}: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
