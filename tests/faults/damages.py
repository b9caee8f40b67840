"""Damage to a folder of ours: bytes, whole files, and files that are sealed again with what nobody of us writes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rlcli.data.files.disk import digest_of
from rlcli.data.files.sealed_folder import sealed

VALUES: list[Any] = [
    None, True, -1, -5, 0, 1, 3, 2**31, 10**15, 2**63, 10**30, 1.5, 1e300, "", "x", "load", "../../secret", "float64",
    [], [1, 2], [[]], {}, {"x": 1}, "\u2028", "é", [[["obs"], "load", [3]]], ["x"] * 40,
]  # fmt: skip


def damage(folder: Path, rng: np.random.Generator) -> str:
    """Damage one file below a folder; what was done, in words."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".md", ".diff"))
    kind = str(rng.choice([*_PLAIN, *_SEALED, *_SEALED]))
    if kind in _SEALED:
        named = {"journal": "journal.jsonl", "manifest": "manifest.json"}.get(kind)
        chosen = [path for path in files if (path.name == named if named else _SUITS[kind](path))]
        path = chosen[int(rng.integers(len(chosen)))] if chosen else None
        if path is not None:
            return f"{kind} {path.relative_to(folder)}: {_SEALED[kind](path, rng)}"
        kind = "cut"
    path = files[int(rng.integers(len(files)))]
    return f"{kind} {path.relative_to(folder)}: {_PLAIN[kind](path, rng)}"


# ---- bytes and files -----------------------------------------------------------------------------------------------
def flip(path: Path, rng: np.random.Generator) -> str:
    content = bytearray(path.read_bytes() or b"\0")
    at = int(rng.integers(len(content)))
    content[at] ^= 1 << int(rng.integers(8))
    write(path, bytes(content))
    return f"byte {at}"


def cut(path: Path, rng: np.random.Generator) -> str:
    content = path.read_bytes()
    end = int(rng.integers(len(content) + 1))
    write(path, content[:end])
    return f"to {end} of {len(content)}"


def cut_lines(path: Path, rng: np.random.Generator) -> str:
    lines = path.read_bytes().splitlines(keepends=True)
    keep = int(rng.integers(len(lines) + 1))
    write(path, b"".join(lines[:keep]))
    return f"to {keep} of {len(lines)} lines"


def grow(path: Path, rng: np.random.Generator) -> str:
    write(path, path.read_bytes() + bytes(rng.integers(0, 256, int(rng.integers(1, 5000)), np.uint8)))
    return "grown"


def fill(path: Path, rng: np.random.Generator) -> str:
    content = [b"", b"[" * 100_000, b"\xff" * 50, b"null", b"{}", b"[1,2]", b'{"pid":"x"}', b"\0" * 4096]
    write(path, content[int(rng.integers(len(content)))])
    return "other content"


def lose(path: Path, rng: np.random.Generator) -> str:
    path.unlink()
    return "missing"


def link(path: Path, rng: np.random.Generator) -> str:
    target = ["nowhere", "/dev/zero", "/dev/null", ".", str(path.parent / path.name)][int(rng.integers(5))]
    path.unlink()
    path.symlink_to(target)
    return f"a link to {target}"


def pipe(path: Path, rng: np.random.Generator) -> str:
    path.unlink()
    os.mkfifo(path)
    return "a pipe"


def folder_instead(path: Path, rng: np.random.Generator) -> str:
    path.unlink()
    path.mkdir()
    return "a folder"


def write(path: Path, content: bytes) -> None:
    """As a new file: other folders may hold links to the old one."""
    path.unlink()
    path.write_bytes(content)


# ---- sealed again --------------------------------------------------------------------------------------------------
def change(value: Any, rng: np.random.Generator) -> tuple[Any, str]:
    """A JSON value with something in it changed."""
    if isinstance(value, dict | list) and value and rng.random() < 0.85:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = keys[int(rng.integers(len(keys)))]
        if rng.random() < 0.12:
            rest = {k: v for k, v in value.items() if k != key} if isinstance(value, dict) else value[:key]
            return rest, f"{key} gone"
        new, text = change(value[key], rng)
        changed = {**value, key: new} if isinstance(value, dict) else [*value[:key], new, *value[key + 1 :]]
        return changed, f"{key}.{text}"
    new = VALUES[int(rng.integers(len(VALUES)))]
    if type(value) is int and rng.random() < 0.5:
        new = value + int(rng.choice([-1, 1, 7, 10**6, -(10**6)]))
    return new, f"{str(value)[:40]} -> {str(new)[:40]}"


def journal(path: Path, rng: np.random.Generator) -> str:
    """One record changed, and all checksums made anew."""
    lines = path.read_bytes().splitlines()
    if not lines:
        return "nothing"
    at = int(rng.integers(len(lines)))
    record, text = change(json.loads(lines[at][33:]), rng)
    lines[at] = lines[at][:33] + json.dumps(record).encode()
    out, digest = [], ""
    for line in lines:
        digest = digest_of(digest.encode(), line[33:])
        out.append(digest.encode() + b" " + line[33:] + b"\n")
    write(path, b"".join(out))
    return f"record {at}, {text}"


def manifest(path: Path, rng: np.random.Generator) -> str:
    body = json.loads(path.read_bytes())
    body.pop("seal")
    body, text = change(body, rng)
    write(path, sealed(body) if isinstance(body, dict) else json.dumps(body).encode())
    return text


def listed(path: Path, rng: np.random.Generator) -> str:
    """A file that a manifest or a journal names, changed, and its size and checksum made to fit."""
    before, kind = path.read_bytes(), str(rng.choice(["tree", "bytes", "size"]))
    text = _inside(path, rng, kind)
    said = {"size": len(path.read_bytes()), "digest": digest_of(path.read_bytes())}
    was = {"size": len(before), "digest": digest_of(before)}
    for place in (path.parent / "manifest.json", path.parent / "journal.jsonl"):
        if place.is_file():
            content = place.read_text()
            for name in ("size", "digest"):
                spelled = [json.dumps({name: was[name]}, separators=pair)[1:-1] for pair in ((",", ":"), (", ", ": "))]
                for one in spelled:
                    content = content.replace(one, one.replace(str(was[name]), str(said[name])))
            content = content.replace(f'[{was["size"]},"{was["digest"]}"]', f'[{said["size"]},"{said["digest"]}"]')
            write(place, content.encode())
            _reseal(place)
    return f"{kind}: {text}"


def _inside(path: Path, rng: np.random.Generator, kind: str) -> str:
    content = path.read_bytes()
    if kind == "size":
        return cut(path, rng)
    if path.suffix == ".json" and kind == "tree":
        value, text = change(json.loads(content), rng)
        write(path, json.dumps(value).encode())
        return text
    if path.suffix == ".safetensors" and len(content) > 8:
        size = int.from_bytes(content[:8], "little")
        header, body = json.loads(content[8 : 8 + size]), content[8 + size :]
        if kind == "tree" and "@tree" in header:
            start, stop = header["@tree"]["data_offsets"]
            value, text = change(json.loads(body[start:stop]), rng)
            spelled = json.dumps(value).encode()
            spelled = spelled.ljust(stop - start) if len(spelled) <= stop - start else body[start:stop]
            write(path, content[: 8 + size] + body[:start] + spelled + body[stop:])
            return text
        if kind == "tree":
            value, text = change(header, rng)
            spelled = json.dumps(value).encode()
            write(path, len(spelled).to_bytes(8, "little") + spelled + body)
            return text
        return _number(path, header, size, rng)
    return flip(path, rng)


def _number(path: Path, header: dict, size: int, rng: np.random.Generator) -> str:
    """A whole number in a tensor, set to one that leads elsewhere."""
    content = bytearray(path.read_bytes())
    tensors = [name for name, told in header.items() if told.get("dtype") in ("I64", "I32") and math_of(told["shape"])]
    if not tensors:
        return flip(path, rng)
    name = tensors[int(rng.integers(len(tensors)))]
    width = 8 if header[name]["dtype"] == "I64" else 4
    at = 8 + size + header[name]["data_offsets"][0] + width * int(rng.integers(math_of(header[name]["shape"])))
    new = int(rng.choice([-1, -2, 0, 1, 7, 10**6, 2**31 - 1, -(2**31)]))
    content[at : at + width] = new.to_bytes(width, "little", signed=True)
    write(path, bytes(content))
    return f"{name} at {at} set to {new}"


def math_of(shape: list[int]) -> int:
    return int(np.prod(shape)) if shape else 1


def _reseal(path: Path) -> None:
    if path.name == "manifest.json":
        body = json.loads(path.read_bytes())
        body.pop("seal")
        write(path, sealed(body))
        return
    out, digest = [], ""
    for line in path.read_bytes().splitlines():
        digest = digest_of(digest.encode(), line[33:])
        out.append(digest.encode() + b" " + line[33:] + b"\n")
    write(path, b"".join(out))


def _is_listed(path: Path) -> bool:
    return path.suffix in (".safetensors", ".bin") or path.name == "state.json"


Damage = Callable[[Path, np.random.Generator], str]
_PLAIN: dict[str, Damage] = {
    "flip": flip, "cut": cut, "cut lines": cut_lines, "grow": grow, "fill": fill, "lose": lose, "link": link,
    "pipe": pipe, "folder": folder_instead,
}  # fmt: skip
_SEALED: dict[str, Damage] = {"journal": journal, "manifest": manifest, "listed": listed, "json": listed}
_SUITS: dict[str, Callable[[Path], bool]] = {
    "listed": _is_listed, "json": lambda path: path.name in ("run.json", "config.json", "summary.json", "lock"),
}  # fmt: skip


def plain_json(path: Path, rng: np.random.Generator) -> str:
    """A file of JSON without a seal, something in it changed."""
    content = path.read_bytes()
    value, text = change(json.loads(content) if content else {"pid": 3}, rng)
    write(path, json.dumps(value).encode())
    return text


_SEALED["json"] = plain_json
