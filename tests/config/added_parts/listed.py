"""A logger: a line for every record."""

import rlcli


@rlcli.register_logger("listed")
class Listed:
    def __init__(self, folder, resume_at, name="figures"):
        self.path = folder / f"{name}.txt"
        self.path.write_text(f"begun at {resume_at}\n")

    def settings(self, settings):
        self._say(f"seed {settings['seed']}")

    def write(self, frames, scalars):
        self._say(f"{frames} {' '.join(sorted(name for name, _ in scalars))}")

    def flush(self):
        pass

    def close(self):
        self._say("closed")

    def _say(self, text):
        with self.path.open("a") as file:
            file.write(f"{text}\n")
