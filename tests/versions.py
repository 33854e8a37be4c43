"""Writes `docs/versions.md` from `fastgpt/versions.toml`: `python -m tests.versions`."""

import tomllib

from tests.processes import ROOT

TABLE, PAGE = ROOT / "fastgpt" / "versions.toml", ROOT / "docs" / "versions.md"
HEAD = """# Versions

Written by `python -m tests.versions` from `fastgpt/versions.toml`; do not edit.

"""


def page() -> str:
    """Returns the text of the page: a column for each pair of PyTorch and Triton."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    pairs = table["pair"]
    rows = [
        ["", *(f"PyTorch {p['torch']}, Triton {p['triton']}" for p in pairs)],
        ["---"] * (1 + len(pairs)),
        ["", *("**pinned**" if p.get("pinned") else "" for p in pairs)],
        *([what, *(p["ran"].get(what, "not run") for p in pairs)] for what in table["what"]),
    ]
    return (
        HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows) + "\n" + table["note"].lstrip()
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
