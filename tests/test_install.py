"""`pip install -e .`: scripts beside the clone import the package, and an ordinary wheel has
all of it.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools", minversion="77")
ROOT = Path(__file__).parents[1]
BUILD = (
    "import sys; from setuptools import build_meta; print(getattr(build_meta,"
    " sys.argv[1])(sys.argv[2]))"
)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of what an installation needs, under the name that `git clone` gives it."""
    clone = tmp_path_factory.mktemp("work") / "adaptive_jax"
    shutil.copytree(
        ROOT / "adaptive_jax", clone / "adaptive_jax", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copytree(
        ROOT / "configs", clone / "configs", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in "pyproject.toml", "README.md", "LICENSE":
        shutil.copy(ROOT / name, clone)
    return clone


def build(clone, hook):
    """The names and contents of a wheel of the clone."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, hook, str(clone.parent)],
        cwd=clone,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(clone.parent / done.stdout.splitlines()[-1]) as wheel:
        return {name: wheel.read(name).decode(errors="replace") for name in wheel.namelist()}


def test_a_script_beside_the_clone(clone):
    """It imports the package and not the clone's directory, whose name is the same; and
    configs, from anywhere.
    """
    [path] = [
        text.strip()
        for name, text in build(clone, "build_editable").items()
        if name.endswith(".pth")
    ]
    assert Path(path) == clone
    (clone.parent / "my.py").write_text(
        "from adaptive_jax import InputError\nimport adaptive_jax,"
        " configs.papers\nprint(adaptive_jax.__file__)\n"
    )
    # Where a .pth file's line comes on the path: after the script's directory and the standard
    # library.
    start = (
        f"import sys, runpy; sys.path = [p for p in sys.path if p != {str(ROOT)!r}] + [{path!r}]; "
    )
    start += f"sys.path[0] = {str(clone.parent)!r}; runpy.run_path('my.py')"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", start],
        cwd=clone.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str(clone / "adaptive_jax" / "__init__.py"), done.stderr


def test_a_wheel_has_the_package(clone):
    """All of it, and nothing else."""
    paths = (clone / "adaptive_jax").rglob("*")
    files = {
        path.relative_to(clone).as_posix()
        for path in paths
        if path.suffix in (".py", ".typed", ".css")
    }
    assert {name for name in build(clone, "build_wheel") if ".dist-info/" not in name} == files
