"""The shape of the tree: which package may import which, no cycles, small files and functions,
and every setting stated once.
"""

import ast
import functools
import graphlib
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "adaptive_jax"
LEAVES = {
    "activations",
    "arrays",
    "errors",
    "files",
    "stores",
    "object_files",
    "command",
    "dropout",
    "bands",
    "batch",
    "registry",
    "weight_norm",
    "defaults",
    "layer_defaults",
    "config_file",
    "progress",
}
LAYERS = {"inputs", "bodies", "outputs"}
MAY_IMPORT = {  # besides the leaves and itself; a package, or a module beside the packages
    **{name: set() for name in LEAVES | {"devices", "data"}},
    **{name: {"devices"} for name in LAYERS},
    "model": LAYERS | {"data"},
    "cross_entropy": {"outputs"},
    "composition": {"devices", "model"},
    "gradients": {"devices", "model", "composition"},
    "plans": {"devices", "data", "model", "outputs"},
    "workdir": {"devices", "data"},
    "evaluation": {"devices", "data", "model", "composition", "gradients", "plans", "workdir"},
    "training": {
        "devices",
        "data",
        "model",
        "composition",
        "gradients",
        "plans",
        "workdir",
        "evaluation",
    },
    "score": {"text"},
    "text": {
        "devices",
        "data",
        "model",
        "composition",
        "outputs",
        "plans",
        "workdir",
        "evaluation",
    },
    "generate": {"text"},
    "explain": {"data", "model", "training"},
    "convert": {"data", "model", "plans", "workdir"},
    "export": {"devices", "data", "model", "composition", "workdir", "evaluation"},
    "fairseq": set(),
}
FOLDERS = "*.py", "configs/*.py", "benchmarks/*.py", "adaptive_jax/**/*.py"
FILES = {
    path.relative_to(ROOT).as_posix(): path for pattern in FOLDERS for path in ROOT.glob(pattern)
}


@functools.cache
def parsed(path):
    return ast.parse(path.read_text())


def name_of(path):
    return (
        path.relative_to(PACKAGE)
        .with_suffix("")
        .as_posix()
        .replace("/", ".")
        .removesuffix(".__init__")
    )


# The first file only names what the package exports, and scripts are imported by none.
MODULES = {
    name_of(path): path
    for path in PACKAGE.rglob("*.py")
    if path != PACKAGE / "__init__.py" and path.stem != "__main__"
}


def imported(path):
    """Modules of this project that a file imports anywhere in it, without the package's name."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "adaptive_jax":
            inner = node.module.removeprefix("adaptive_jax").lstrip(".")
            names = [f"{inner}.{alias.name}".lstrip(".") for alias in node.names]
            found |= {name if name in MODULES else inner for name in names}
        elif isinstance(node, ast.Import):
            found |= {
                alias.name.removeprefix("adaptive_jax.")
                for alias in node.names
                if "adaptive_jax." in alias.name
            }
    return found & MODULES.keys()


def functions(path):
    return [
        node
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_imports_go_one_way():
    """Leaves know leaves; layers and data know nothing of each other; `MAY_IMPORT` says the
    rest and has no cycle.
    """
    uses = {name: {use.split(".")[0] for use in imported(path)} for name, path in MODULES.items()}
    wrong = {}
    for name, packages in uses.items():
        package = name.split(".")[0]
        if more := packages - LEAVES - MAY_IMPORT[package] - {package}:
            wrong[name] = more
    assert not wrong
    list(graphlib.TopologicalSorter(MAY_IMPORT).static_order())
    assert MAY_IMPORT.keys() == {name.split(".")[0] for name in MODULES}


def test_no_module_imports_itself_through_others():
    """No cycle between modules, inside packages either, imports in functions among them."""
    list(
        graphlib.TopologicalSorter(
            {name: imported(path) for name, path in MODULES.items()}
        ).static_order()
    )


def test_files_and_functions_are_small():
    """No file over 500 lines, no function over 90 (the training loop: 150)."""
    lengths = {label: len(path.read_text().splitlines()) for label, path in FILES.items()}
    assert not {label: length for label, length in lengths.items() if length > 500}
    most = {"adaptive_jax/training/loop.py": 150}
    lengths = {
        (label, node.name): node.end_lineno - node.lineno + 1
        for label, path in FILES.items()
        for node in functions(path)
    }
    assert not {key: length for key, length in lengths.items() if length > most.get(key[0], 90)}


def test_no_file_has_a_name_that_says_nothing():
    """configs/base.py, which holds what all configs share, is the one exception."""
    assert {
        label
        for label, path in FILES.items()
        if path.stem in ("utils", "common", "helpers", "base", "manager")
    } <= {"configs/base.py"}


def test_public_names_are_documented():
    """Every module has a docstring, and in the package so has every public class, function and
    method.
    """
    assert not [label for label, path in FILES.items() if not ast.get_docstring(parsed(path))]
    missing = []
    for name, path in MODULES.items():
        public = [
            node
            for node in parsed(path).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_"
        ]
        for node in list(public):
            methods = [
                inner
                for inner in node.body
                if isinstance(inner, ast.FunctionDef) and inner.name != "setup"
            ]
            if isinstance(node, ast.ClassDef):
                public += [
                    inner for inner in methods if inner.name[0] != "_" or inner.name == "__call__"
                ]
        missing += [(name, node.name) for node in public if not ast.get_docstring(node)]
    assert not missing


def test_layers_need_nothing_else():
    """Layers import no third party but jax, flax and numpy."""
    for name, path in MODULES.items():
        if name.split(".")[0] in LAYERS:
            nodes = [
                node
                for node in ast.walk(parsed(path))
                if isinstance(node, ast.Import | ast.ImportFrom)
            ]
            tops = {
                (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).split(
                    "."
                )[0]
                for node in nodes
            }
            assert tops <= {"jax", "flax", "numpy", "adaptive_jax"} | sys.stdlib_module_names, name


def test_requirements_are_the_project_and_its_quickstart():
    """requirements.txt lists exactly what pyproject.toml asks for, with the extra `quickstart`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {
        "requirements.txt": project["dependencies"] + extras["quickstart"],
        "requirements-bench.txt": extras["bench"],
    }
    for name, requirements in wanted.items():
        lines = (ROOT / name).read_text().splitlines()
        assert sorted(line for line in lines if line and line[0] != "#") == sorted(requirements)
