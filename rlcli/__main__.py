"""`python -m rlcli` is `rlcli`."""

import sys

from rlcli.cli.main import main

sys.exit(main())
