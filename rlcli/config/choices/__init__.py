"""The choices of every group, ours, a dataclass each: its options, what does not fit among them, and what it builds.

Nothing is imported for it, so that a mistake in a command is answered before torch is loaded.
"""

from __future__ import annotations

from typing import get_type_hints

from rlcli.config.choices.learn import Config
from rlcli.config.option import REGISTERED, Part, parts_of

# group -> choice -> what is known of it
CHOICES: dict[str, dict[str, Part]] = {
    group: {name: part for name, part in parts.items() if name != REGISTERED}
    for group, parts in parts_of(Config).items()
}
BASES = {group: get_type_hints(Config)[group] for group in CHOICES}  # group -> the options that every choice has
# group -> what is known of a choice that a user's package has registered, before it says more of itself
USERS = {group: parts.get(REGISTERED, Part(BASES[group])) for group, parts in parts_of(Config).items()}
