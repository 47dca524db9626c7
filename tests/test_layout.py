"""The shape of the tree: which room may import which, what each needs of other packages, no
cycles, and docstrings.
"""

import ast
import functools
import graphlib
import itertools
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "adaptive_jax"
# The rooms, folders of the package or files in its root, by floor from the ground up. A room
# imports from floors below its own only.
FLOORS = [
    {"errors"},
    {"files", "numerics"},
    {"config", "losses"},
    {"testing", "parallel", "inputs", "bodies", "outputs", "optimizers"},
    {"nnx", "model", "data"},
    {"planning"},
    {"runs"},
    {"scores", "generation"},
    {"training", "interop", "text"},
]
FOLDERS = "*.py", "configs/*.py", "benchmarks/**/*.py", "adaptive_jax/**/*.py"
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
    modules = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "adaptive_jax":
            inner = node.module.removeprefix("adaptive_jax").lstrip(".")
            names = [f"{inner}.{alias.name}".lstrip(".") for alias in node.names]
            modules |= {name if name in MODULES else inner for name in names}
        elif isinstance(node, ast.Import):
            modules |= {
                alias.name.removeprefix("adaptive_jax.")
                for alias in node.names
                if "adaptive_jax." in alias.name
            }
    return modules & MODULES.keys()


def room_of(name):
    return name.split(".")[0]


def test_imports_go_one_way():
    """No arrow up: a room that knows those above it cannot be read, or used, without them."""
    wrong = {}
    for name, path in MODULES.items():
        floor = next(i for i, rooms in enumerate(FLOORS) if room_of(name) in rooms)
        allowed = {room_of(name)}.union(*FLOORS[:floor])
        if above := {use for use in imported(path) if room_of(use) not in allowed}:
            wrong[name] = above
    assert not wrong
    assert {room_of(name) for name in MODULES} == set().union(*FLOORS)


def at_import(path):
    """The statements that run when a file is imported; imports inside functions wait."""
    body = parsed(path).body
    return body + [inner for node in body if isinstance(node, ast.With) for inner in node.body]


def third_parties(room):
    """Packages that a room needs when it is imported, through what it imports of the project."""
    found, seen = set(), set()
    waiting = [path for name, path in MODULES.items() if room_of(name) == room]
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        nodes = at_import(path)
        names = [
            alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
        ]
        names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
        found |= {name.split(".")[0] for name in names} - {"adaptive_jax", *sys.stdlib_module_names}
        waiting += [MODULES[name] for name in imported(path)]
    return found


def test_losses_need_jax_alone_and_layers_flax():
    """Strangers import losses and layers into programs of their own, and install nothing else."""
    for room in "losses", "testing":
        assert third_parties(room) <= {"jax", "numpy"}, room
    for room in "numerics", "inputs", "bodies", "outputs", "nnx", "model", "optimizers":
        assert third_parties(room) <= {"jax", "numpy", "flax", "optax"}, room


LOSSES = "errors", "losses", "testing"
LAYERS = "numerics", "inputs", "bodies", "outputs", "nnx", "model", "optimizers"
BASE = {"jax", "numpy", "ml_dtypes"}
BROUGHT = {  # what the extra brings, and the rooms that then need nothing more
    "": (BASE, LOSSES),
    "layers": (
        BASE | {"flax", "optax", "absl", "orbax", "etils", "rich", "google"},
        LOSSES + LAYERS,
    ),
}
IMPORTS = """
import importlib, json, sys
from adaptive_jax.errors import MissingPackage

names, missing = json.loads(sys.argv[1])
sys.modules |= dict.fromkeys(missing)
said = {}
for name in names:
    try:
        importlib.import_module(f"adaptive_jax.{name}")
    except MissingPackage as error:
        said[name] = str(error)
print(json.dumps(said))
"""


@pytest.mark.parametrize("extra", BROUGHT)
def test_missing_package_error_names_the_extra(extra):
    """Without an extra's packages every module is imported, or ends in the line that names the
    extra. Otherwise `from adaptive_jax import AdaptiveSoftmax` would say a bare name of a package.
    """
    brought, rooms = BROUGHT[extra]
    every = set()
    for node in itertools.chain.from_iterable(map(ast.walk, map(parsed, MODULES.values()))):
        if isinstance(node, ast.Import):
            every |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            every.add(node.module.split(".")[0])
    missing = every - brought - {"adaptive_jax", *sys.stdlib_module_names}
    assert len(missing) > 5
    code = sys.executable, "-c", IMPORTS, json.dumps([sorted(MODULES), sorted(missing)])
    done = subprocess.run(code, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout)
    assert not {name for name in said if room_of(name) in rooms}
    assert said["training.loop"].endswith(": pip install 'adaptive_jax[train]'")
    if not extra:
        for name in "outputs.softmax", "nnx", "numerics.layers", "optimizers.optim":
            assert said[name].endswith(": pip install 'adaptive_jax[layers]'"), name


def test_no_module_imports_itself_through_others():
    """No cycle between modules, inside packages either, imports in functions among them."""
    list(
        graphlib.TopologicalSorter(
            {name: imported(path) for name, path in MODULES.items()}
        ).static_order()
    )


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


def test_requirements_are_the_project_and_its_quickstart():
    """requirements.txt lists exactly what pyproject.toml asks for, with the extras `train`, which
    has all of `layers`, and `quickstart`.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    of_layers, *train = extras["train"]
    assert of_layers == "adaptive_jax[layers]"
    wanted = {
        "requirements.txt": project["dependencies"]
        + extras["layers"]
        + train
        + extras["quickstart"],
        "requirements-bench.txt": extras["bench"],
    }
    for name, requirements in wanted.items():
        lines = (ROOT / name).read_text().splitlines()
        assert sorted(line for line in lines if line and line[0] != "#") == sorted(requirements)
