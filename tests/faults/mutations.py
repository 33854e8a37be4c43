"""Damage to files: changes of their bytes, and of what the bytes mean, drawn from a seed."""

import copy
import io
import json
import random
import struct
import sys
from collections.abc import Callable
from typing import Any

import torch


class Evil:
    """An object whose pickle ends the process, as it could do anything else, when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, ("it ran",)

    def __deepcopy__(self, _: object) -> "Evil":
        return self


def values() -> tuple[Any, ...]:
    """Returns values that a file should not have, new ones each time as they may be changed."""
    return (
        None, True, False, 0, -1, 1, 7, 2**31, 2**40, 2**63, -(2**63), 10**30, 0.5, -1e300, "", "x",
        float("nan"), float("inf"), "../../x", "/etc/passwd", "\ud800", "\0", [], {}, [[]],
        [1, "a"], {"a": {"b": []}}, 3 * [2**20], "a" * 10_000, list(range(5000)),
    )  # fmt: skip


INTS = (0, 1, -1, 2, 3, 255, 2**16, 2**24, 2**31 - 1, -(2**31))


# --- trees of values ------------------------------------------------------------------------------


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Lists every (container, key or index) of a tree of dictionaries and lists."""
    found, rest = [], [tree]
    while rest:
        node = rest.pop()
        keys = list(node) if isinstance(node, dict) else range(min(len(node), 20))
        found += [(node, key) for key in keys]
        rest += [node[key] for key in keys if isinstance(node[key], (dict, list))]
    return found


def change_tree(tree: Any, draw: random.Random, *odd: Any) -> Any:
    """Changes up to three values of a tree, or replaces all of it."""
    if draw.random() < 0.03 or not isinstance(tree, (dict, list)):
        return draw.choice(values() + odd)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        if not (known := places(tree)):
            break
        node, key = draw.choice(known)
        other, key_there = draw.choice(known)
        action = draw.choice(("value", "value", "value", "swap", "remove", "double"))
        if action == "value":
            node[key] = draw.choice(values() + odd)
        elif action == "swap":
            node[key] = copy.deepcopy(other[key_there])
        elif action == "remove":
            del node[key]
        elif isinstance(node, dict):
            node[f"{key}2"] = node[key]
        else:
            node.append(node[key])
    return tree


# --- files ----------------------------------------------------------------------------------------


def change_bytes(data: bytes, draw: random.Random) -> bytes:
    """Flips, cuts, extends, doubles, swaps or overwrites bytes, often near the beginning."""
    reach = draw.choice((16, 512, len(data)))
    a, b, c = sorted(draw.randrange(min(reach, len(data)) + 1) for _ in range(3))
    some = draw.randbytes(draw.choice((1, 2, 4, 8, 64)))
    flipped = bytes([(data[a : a + 1] or b"\0")[0] ^ 1 << draw.randrange(8)])
    forms = (
        data[:a] + flipped + data[a + 1 :], data[:a] + some + data[a + len(some) :], data[:a],
        data[a:], data + some, data[:b] + data[a:], data[:a] + bytes(b - a) + data[b:], b"",
        data[:a] + data[b:c] + data[a:b] + data[c:], some,
    )  # fmt: skip
    return draw.choice(forms)


def change_json(data: bytes, draw: random.Random) -> bytes:
    """Changes values of a JSON text, or nests it deeply."""
    depth = draw.choice((0,) * 30 + (2000, 200_000))
    if depth:
        return b'{"a":' * depth + data + b"}" * depth
    tree = json.loads(data)
    return json.dumps(change_tree(tree, draw) if draw.random() < 0.8 else tree).encode()


def change_template(data: bytes, draw: random.Random) -> bytes:
    """Inserts a piece into a chat template: an error, or what the sandbox refuses."""
    at, piece = draw.randrange(len(data) + 1), draw.choice(PIECES).encode()
    return data[:at] + piece + data[at:]


PIECES = (
    "{% if 1 %}", "{% for a in range(99999999) %}{% endfor %}", "{{ raise_exception('no\\nno') }}",
    "{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}", "{{ messages.__class__.__mro__ }}",
    "{% include 'x' %}", "{{ messages | tojson }}", "{{ 0 / 0 }}", "\0",
)  # fmt: skip


def change_safetensors(data: bytes, draw: random.Random) -> bytes:
    """Changes the length of the header, or values in it: dtypes, shapes and offsets."""
    end = 8 + int.from_bytes(data[:8], "little")
    if draw.random() < 0.2:
        length = draw.choice((0, 1, 7, end, len(data), 2**31, 2**63, 2**64 - 1))
        return struct.pack("<Q", length) + data[8:]
    header = change_json(data[8:end], draw)
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + data[end:]


def change_header(data: bytes, draw: random.Random) -> bytes:
    """Changes a number of the header of a shard or of a model of llm.c."""
    at = 4 * draw.randrange(9)
    return data[:at] + struct.pack("<i", draw.choice(INTS)) + data[at + 4 :]


def change_saved(data: bytes, draw: random.Random) -> bytes:
    """Changes values of what torch.save wrote."""
    tree = torch.load(io.BytesIO(data), weights_only=True)
    odd = (Evil(), torch.zeros(3), torch.zeros(0, dtype=torch.int64), {1: 2})
    tree, file = change_tree(tree, draw, *4 * odd), io.BytesIO()
    torch.save(tree, file)
    return file.getvalue()


MEANT: dict[str, Callable[[bytes, random.Random], bytes]] = {
    ".json": change_json, ".safetensors": change_safetensors, ".bin": change_header,
    ".pt": change_saved, ".jinja": change_template,
}  # fmt: skip
"""Suffix of a file -> how its content is changed."""
