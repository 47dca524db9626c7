"""The shape of the tree: which module may import which, how large files are, and that every setting is stated once."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "adaptive_jax"
LEAVES = {"errors", "files", "cutoffs", "command", "dropout", "products"}
LAYERS = ("inputs", "bodies", "outputs", "data")


def modules():
    return {path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."): path for path in PACKAGE.rglob("*.py")}


def imported(path):
    """Modules of this project that a file imports, without the package's name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "adaptive_jax":
            inner = node.module.removeprefix("adaptive_jax").lstrip(".")
            for name in (alias.name for alias in node.names):
                whole = f"{inner}.{name}".lstrip(".")
                found.add(whole if whole in modules() or f"{whole}.__init__" in modules() else inner)
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("adaptive_jax.") for alias in node.names if "adaptive_jax." in alias.name}
    return found - {""}


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_go_one_way(name):
    """Layers and data know only their own folder and the leaves; model knows layers; training and evaluation come last."""
    uses = imported(modules()[name])
    folder = name.split(".")[0]
    if name in LEAVES:
        assert not uses - LEAVES
    elif folder in LAYERS:
        assert {use for use in uses if use.split(".")[0] != folder} <= LEAVES
    elif name == "model":
        assert {use.split(".")[0] for use in uses} <= {"inputs", "bodies", "outputs", "data"} | LEAVES
    elif folder != "training":
        assert "training" not in uses
    if name in ("optim", "sharding", "checkpoints", "metrics"):
        assert not {use for use in uses if use.split(".")[0] in ("inputs", "bodies", "outputs", "model", "evaluation")}


def test_the_check_of_imports_sees_an_import():
    """The reader of imports finds what is known to be there."""
    assert {"optim", "model", "evaluation.scoring"} <= imported(PACKAGE / "training.py")


@pytest.mark.parametrize("name", sorted(modules()))
def test_files_are_small_and_well_named(name):
    """No file over 300 lines, no function over 60 (the loop: 120), no name that says nothing."""
    text = modules()[name].read_text()
    assert len(text.splitlines()) <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < (120 if name == "training" else 60), node.name
    assert name.split(".")[-1] not in ("utils", "common", "helpers", "base", "manager")


@pytest.mark.parametrize("name", sorted(modules()))
def test_public_names_are_documented(name):
    """Every public module, class and function has a docstring."""
    tree = ast.parse(modules()[name].read_text())
    assert ast.get_docstring(tree)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), node.name


def test_layers_need_nothing_else():
    """No module does work at import: none but the leaves of jax, flax, numpy is imported by a layer."""
    allowed = {"jax", "flax", "numpy", "functools", "typing", "collections", "adaptive_jax"}
    for name, path in modules().items():
        if name.split(".")[0] in ("inputs", "bodies", "outputs"):
            nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
            tops = {(node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).split(".")[0] for node in nodes}
            assert tops <= allowed, name


def test_requirements_are_the_project_and_its_quickstart():
    """requirements.txt lists exactly what pyproject.toml asks for, with the extra `quickstart`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    listed = [line for line in lines if line and not line.startswith("#")]
    assert sorted(listed) == sorted(project["dependencies"] + project["optional-dependencies"]["quickstart"])
    lines = (ROOT / "requirements-bench.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == project["optional-dependencies"]["bench"]
