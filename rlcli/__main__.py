"""`python -m rlcli` is `rlcli`."""

from rlcli.cli.main import command

command()
