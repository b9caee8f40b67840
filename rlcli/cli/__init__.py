"""The command line: one thin file per verb. Nothing heavy is imported until a verb runs."""
