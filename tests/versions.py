"""Writes `docs/versions.md` from `fastgpt/versions.toml`: `python -m tests.versions`."""

import tomllib

from tests.processes import ROOT

TABLE, PAGE = ROOT / "fastgpt" / "versions.toml", ROOT / "docs" / "versions.md"
PREFACE = """# Versions

Written by `python -m tests.versions` from `fastgpt/versions.toml`; do not edit. Each line is what
was run with a pair of PyTorch and Triton, and what came of it. Only what is listed has been run.
"""


def page() -> str:
    """Returns the text of the page."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    text = f"{PREFACE}\n{table['note'].strip()}\n"
    for pair in table["pair"]:
        pinned = ", pinned" if pair.get("pinned") else ""
        title = f"PyTorch {pair['torch']}, Triton {pair['triton']}, Python {pair['python']}{pinned}"
        text += f"\n## {title}\n\n| what | result | date |\n|---|---|---|\n"
        text += "".join(f"| {r['what']} | {r['result']} | {r['date']} |\n" for r in pair["run"])
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
