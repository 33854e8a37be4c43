"""The site that `make docs` builds: settings, and what pages in Markdown need beside them."""

import os
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))
project = html_title = "fastgpt"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
include_patterns = ["docs/**.md", "*.md", "simgpu/README.md"]
root_doc, html_extra_path = "docs/index", ["index.html"]  # the latter leads to the former
html_theme = "furo"
html_copy_source = html_show_search_summary = False  # a page on a disk may not read another
myst_heading_anchors = 6
myst_enable_extensions = ["dollarmath"]
suppress_warnings = ["misc.highlighting_failure"]  # of Mermaid, which the git host alone draws
highlight_language = "text"
maximum_signature_line_length = 80
napoleon_use_rtype = smartquotes = toc_object_entries = False
default_role = "py:obj"  # `name` in a docstring: code, and a link where the API has the name.
# It may also be an argument, a setting, PyTorch's name, or in a module that is not public:
nitpick_ignore_regex = [(".*", r"(?!fastgpt\.(kernels\.)?[a-z]\w*$|fastgpt\.(GPT|Trainer)).*")]
TOCTREE = "\n```{{toctree}}\n:hidden:\n:glob:\n{}\n\n{}\n```\n"
API = "### {0}\n\n```{{eval-rst}}\n.. auto{1}:: {0}\n```\n"
API_ENTRY = r"^### (fastgpt\.\S+)\n(?:(?!##).*\n)*?```text\n(?:(?!```).*\n)*```\n"


class Outside(SphinxTransform):
    """Makes links to files and folders that are no pages lead to the repository."""

    default_priority = 1

    def apply(self, **kwargs: Any) -> None:
        page = self.env.docname
        address = self.config.repository or os.path.relpath(ROOT, self.app.outdir / page / "..")
        for node in [*self.document.findall(nodes.Element)]:
            path = (ROOT / page / ".." / node.get("reftarget", "?")).resolve()
            if node.get("refdomain") not in ("doc", "py") and path.exists():
                uri = f"{address}/{path.relative_to(ROOT).as_posix()}"
                node.replace_self(nodes.reference("", "", *node.children, refuri=uri))


def read(app: Sphinx, page: str, text: list[str]) -> None:
    """Adds the navigation to a page, and the docstrings to the page of the API."""
    if page == root_doc:
        for heading, links in re.findall(r"^## (.*)\n\n((?:- .+\n)+)", text[0], re.M):
            pages = re.sub(r"^- \[(.+?)\]\((\S+)\.md\).*", r"\1 <\2>", links, flags=re.M)
            text[0] += TOCTREE.format(f":caption: {heading}", pages)
    elif page == "docs/api":
        text[0] = re.sub(API_ENTRY, docstring, text[0], flags=re.M)
    elif (ROOT / page).is_dir():
        text[0] += TOCTREE.format("", f"/{page}/*")


def docstring(entry: re.Match[str]) -> str:
    """Puts a docstring, with types and links, in place of its text."""
    *_, owner, name = entry[1].split(".")
    kind = "class" if name[0].isupper() else "method" if owner[0].isupper() else "function"
    return API.format(entry[1], kind)


def mathml(translator: Any, node: nodes.math | nodes.math_block) -> None:
    """Writes a formula as MathML, which browsers draw."""
    display = "block" if isinstance(node, nodes.math_block) else "inline"
    box = f'<span style="display: {display}; overflow: auto hidden">'  # for long formulas
    translator.body.append(f"{box}{convert(node.astext(), display=display)}</span>")
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    from api import page

    (ROOT / "docs" / "api.md").write_text(page(), encoding="utf-8")
    app.add_config_value("repository", "", "env")
    app.add_html_math_renderer("mathml", (mathml, None), (mathml, None))
    app.add_transform(Outside)
    app.connect("source-read", read)
