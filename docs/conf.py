"""The site: every page of docs/, the README and the results, and a reference from docstrings. `make
docs` builds it.

Pages are the same files that people read in the repository, so the source directory is the root of
the repository:

    python -m sphinx -c docs . docs/_build
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]

project = "adaptive_jax"
version = release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
copyright = "its authors, Apache-2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "benchmarks/RESULTS.md"]
exclude_patterns = [".*", "docs/_build", "runs", "build", "*.egg-info"]
myst_heading_anchors = 3
myst_enable_extensions = ["html_image"]  # images of a given width
html_show_sourcelink = False
default_role = "code"  # docstrings write `name`, as Markdown does
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

html_theme = "furo"
html_title = "adaptive_jax"
html_extra_path = ["site"]  # index.html, which leads to docs/index.html


def contents(app, page, source):
    """Makes the links of docs/index.md the site's table of contents, a part for each of its
    headings.
    """
    if page != root_doc:
        return
    for heading, links in re.findall(
        r"^## (.*?)$(.*?)(?=^## |\Z)", source[0], re.MULTILINE | re.DOTALL
    ):
        entries = [
            f"{text} <{page}>"
            for text, page in re.findall(r"^- \[([^\]]+)\]\(([\w./]+\.md)\)", links, re.MULTILINE)
        ]
        source[0] += "\n".join(
            ["\n```{toctree}", ":hidden:", f":caption: {heading}", *entries, "```\n"]
        )


def arguments(app, what, name, thing, options, lines):
    """Makes arguments of a class's attributes, as its signature has them, also of those after
    `as those of X, and`.
    """
    for number, line in enumerate(lines):
        if what in ("class", "exception") and (
            match := re.match(r"Attributes:(?: (as .*), and)?$", line)
        ):
            lines[number : number + 1] = (
                [f"Arguments are {match[1]}, and these.", "", "Args:"] if match[1] else ["Args:"]
            )


def examples(app, what, name, thing, options, lines):
    """Makes blocks that are indented by four spaces literal, as Markdown does."""
    for number in range(len(lines) - 1, 1, -1):
        first = (
            lines[number].startswith("    ")
            and not lines[number - 1]
            and lines[number - 2][:1] not in ("", " ")
        )
        if first and not lines[number - 2].endswith("::"):
            lines[number:number] = ["::", ""]


def signature(app, what, name, thing, options, given, result):
    """Leaves out the fields that flax gives to every module, and shortens defaults that have no
    short form.
    """
    if given:
        given = re.sub(r"(, )?parent=<.*?>, name=None", "", given)
        given = re.sub(r"<class 'jax\.numpy\.(\w+)'>", r"jnp.\1", given)
        given = re.sub(r"<function .*?<lambda>>", "...", given)
    return given, result


def setup(app):
    """Connects the functions; docstrings pass `arguments` before napoleon and `examples` after
    it.
    """
    app.connect("source-read", contents)
    app.connect("autodoc-process-docstring", arguments, priority=400)
    app.connect("autodoc-process-docstring", examples, priority=600)
    app.connect("autodoc-process-signature", signature)
