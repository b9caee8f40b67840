"""`rlcli completion bash|zsh|fish`: tab completion of verbs, keys, choices and recipes.

The script asks the hidden verb `__complete`, which reads the schema's table alone, so that a tab is
answered at once.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path

from rlcli.cli.flags import OF_EVERY_VERB
from rlcli.cli.help import topics
from rlcli.cli.job import flags_of
from rlcli.cli.ls import WHAT
from rlcli.cli.main import VERBS, runner
from rlcli.config.choices import CHOICES
from rlcli.config.option import find, groups, leaves
from rlcli.config.recipes import choice_file, find_recipes, overridden, parents, shipped
from rlcli.config.registry import choices
from rlcli.config.schemas import VERBS as SCHEMAS
from rlcli.config.schemas import read_by
from rlcli.errors import ConfigError

_SCRIPTS = {
    "bash": """\
_rlcli() {
    local line="${COMP_LINE:0:COMP_POINT}" IFS=$'\\n'
    COMPREPLY=($(rlcli __complete "$line" 2>/dev/null))
    # bash splits words at = and :, so only what follows them is replaced
    local word="${line##* }" cut
    for cut in "=" ":"; do
        if [[ "$COMP_WORDBREAKS" == *"$cut"* && "$word" == *"$cut"* ]]; then
            local head="${word%"${word##*$cut}"}"
            COMPREPLY=("${COMPREPLY[@]#"$head"}")
        fi
    done
    [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *[=.] ]] && compopt -o nospace
}
complete -F _rlcli rlcli
""",
    "zsh": """\
#compdef rlcli
_rlcli() {
    local -a found
    found=(${(f)"$(rlcli __complete "${LBUFFER}" 2>/dev/null)"})
    compadd -Q -S '' -- $found
}
compdef _rlcli rlcli
""",
    "fish": """\
complete -c rlcli -f -a '(rlcli __complete (commandline -cp) 2>/dev/null)'
""",
}
_INSTALL = {
    "bash": 'eval "$(rlcli completion bash)"   # in ~/.bashrc',
    "zsh": 'eval "$(rlcli completion zsh)"    # in ~/.zshrc, after compinit',
    "fish": "rlcli completion fish | source    # in config.fish",
}


def run(words: Sequence[str], recipe_dirs: Sequence[str]) -> int:
    """Run the verb, or the hidden one that its scripts call."""
    if words and words[0] == "__complete":
        for candidate in candidates(words[1] if len(words) > 1 else ""):
            print(candidate)
        return 0
    if not words or not {"-h", "--help"}.isdisjoint(words):
        print("usage: rlcli completion bash|zsh|fish\n\nPrint a script. Where your shell starts, put:")
        for line in _INSTALL.values():
            print(f"  {line}")
        return 0
    if words[0] not in _SCRIPTS:
        raise ConfigError(f"no completion for {words[0]!r}", fix=f"Known: {', '.join(_SCRIPTS)}.")
    if len(words) > 1:
        raise ConfigError("completion is for one shell", why=f"got {' '.join(words)}")
    print(_SCRIPTS[words[0]], end="")
    return 0


def candidates(line: str) -> list[str]:
    """Return what the last word of a command line up to the cursor (`rlcli train env.n`) can become."""
    words = line.split(" ")
    word, before = words[-1], [w for w in words[1:-1] if w]
    return list(dict.fromkeys(text for text in _offers(word, before) if text.startswith(word)))


def _offers(word: str, before: list[str]) -> Iterable[str]:
    if not before:
        return VERBS
    verb = before[0]
    if word.startswith("-") and verb in VERBS:
        return _flags(verb)
    if verb in ("show", "plan") and len(before) == 1 and "=" not in word:
        return ("train", "collect")
    if verb in ("train", "collect"):
        return _of_job(verb, word, before[1:])
    if verb in ("show", "plan") and len(before) > 1:
        return _of_job(before[1] if before[1] in ("train", "collect") else "train", word, before[1:])
    if verb == "cp" and len(before) == 1:
        return find_recipes()
    if verb in ("resume", "eval", "inspect", "verify", "prune"):
        return sorted(str(path.parent) for path in Path("runs").glob("**/config.json"))
    if verb == "help":
        return (*topics(), *VERBS)
    if verb == "ls":
        return WHAT
    if verb == "bench":
        from rlcli.bench import BENCHES  # by way of checks it brings Hydra's grammar

        return BENCHES.about if len(before) == 1 else [f"{name}=" for name in BENCHES.settings.get(before[1], ())]
    return _SCRIPTS if verb == "completion" else ()


def _flags(verb: str) -> Iterator[str]:
    """Yield the flags of a verb: those of jobs, or of its usage, and every verb's."""
    if verb in ("train", "collect"):
        yield from (name for name in flags_of(verb).names if name.startswith("--"))
        return
    with redirect_stdout(io.StringIO()) as usage:
        runner(verb)(["--help"], [])
    yield from re.findall(r"(?<![\w-])--[a-z-]+", usage.getvalue())
    yield from ("--help", *OF_EVERY_VERB)


def _of_job(verb: str, word: str, before: Sequence[str]) -> Iterator[str]:
    schema = SCHEMAS[verb]
    key, equals, _ = word.partition("=")
    if equals:
        yield from (f"{key}={value}" for value in _values(schema, key))
        return
    if find_recipes():
        yield "recipe="
    keys = [key for key in read_by(schema, _chosen(verb, before)) if not key.endswith(".kind")]
    for group in groups(schema):
        if f"{group}.kind" in leaves(schema) and choices(schema, group):
            yield f"{group}="
        if any(key.startswith(f"{group}.") for key in keys):
            yield f"{group}."
    in_group = word.partition(".")[0] if "." in word else None
    yield from (f"{key}=" for key in keys if key.partition(".")[0] == in_group or "." not in key)


def _chosen(verb: str, words: Sequence[str]) -> dict[str, str]:
    """Return the choices of a command so far, group -> choice: those typed, its recipe's, and the defaults."""
    import yaml

    def by_recipe(name: str) -> dict[str, str]:
        data = yaml.safe_load(recipes[name].path.read_text(encoding="utf-8")) if name in recipes else {}
        return {k: v for parent in parents(data) for k, v in by_recipe(parent).items()} | overridden(
            data.get("defaults", [])
        )

    recipes = find_recipes()
    typed = dict(word.split("=", 1) for word in words if "=" in word)
    entries = yaml.safe_load((shipped("conf") / f"{verb}.yaml").read_text(encoding="utf-8"))["defaults"]
    first = {group: choice for entry in entries if isinstance(entry, dict) for group, choice in entry.items()}
    given = (by_recipe(typed["recipe"]) if "recipe" in typed else {}) | typed
    by_loss = choice_file("loss", given.get("loss", first.get("loss", "")))[1]
    return {key: x for key, x in (first | by_loss | given).items() if x in CHOICES.get(key, ())}  # a user's: who knows


def _values(schema: type, key: str) -> Iterable[str]:
    if key == "recipe":
        return find_recipes()
    if key in groups(schema):
        return choices(schema, key)
    if key == "env.id":
        from gymnasium.envs.registration import registry as known

        return sorted(known)
    leaf = find(schema, key)
    if leaf is None:
        return ()
    is_flag = leaf.type_name.startswith("true or false")  # also of one that may be null
    return leaf.option.choices or leaf.option.words or (("true", "false") if is_flag else ())
