"""`pip install -e .`: scripts beside the clone import the package, and an ordinary wheel has
all of it: losses by themselves, layers and the trainer with their extras.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from adaptive_jax.errors import InputError, of_extra

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
    for name in "tests", "benchmarks", "tools":  # which no wheel takes along
        (clone / name).mkdir()
        (clone / name / "__init__.py").touch()
    return clone


def built(clone, hook):
    """A wheel of the clone."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, hook, str(clone.parent)],
        cwd=clone,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return clone.parent / done.stdout.splitlines()[-1]


def build(clone, hook):
    """The names and contents of a wheel of the clone."""
    with zipfile.ZipFile(built(clone, hook)) as wheel:
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


@pytest.mark.parametrize(
    "extra, says",
    [
        (
            "layers",
            "layers and optimizers need no_such_package: pip install 'adaptive_jax[layers]'",
        ),
        ("train", "trained models need no_such_package: pip install 'adaptive_jax[train]'"),
        ("gcs", "workdirs on gs:// need no_such_package: pip install 'adaptive_jax[gcs]'"),
    ],
)
def test_a_missing_package_is_an_error_of_one_line(extra, says):
    """Whoever has the losses alone and imports layers or the trainer reads how to install them, as
    an error of imports and as one that commands print without a traceback.
    """
    for kind in InputError, ModuleNotFoundError:
        with pytest.raises(kind, match=re.escape(says)), of_extra(extra):
            import no_such_package  # noqa: F401


CONFIG = """
from adaptive_jax.config import rows

def get_config():
    return rows.config({
        "steps": 2, "tokens_per_update": 64, "tokens_per_device": 64, "batches.sequence_length": 16,
        "evaluate_every": 0, "data.corpus": "ids", "data.path": "ids", "data.vocabulary_size": 50,
        "input.cutoffs": (20,), "body.layers": 1, "body.features": 8,
        "body.heads": 1, "body.feed_forward": 8, "schedule.warmup_steps": 1,
    })
"""
LAYERS = ["AdaptiveInput", "AdaptiveSoftmax", "LSTM", "Transformer", "build"]
LAYERS += ["row_wise_adam", "update_rows"]


@pytest.mark.slow
def test_a_wheel_installed_outside_the_clone(clone, tmp_path):
    """Without extras it brings jax and numpy alone, passes tests of losses, and says in one
    line what layers and training need; with `layers` it has them and passes tests of theirs; with
    `train` it trains on ids by a config file of one's own, and by a copy of configs/own_text.py. A
    wheel that only works in the clone is of no use to others.
    """
    outside = tmp_path / "outside"
    shutil.copytree(ROOT / "tests" / "losses", outside / "tests" / "losses")
    for name in "__init__.py", "toys.py", "eight.py", "programs.py", "test_testing.py":
        shutil.copy(ROOT / "tests" / name, outside / "tests")
    (outside / "tests" / "conftest.py").write_text("from tests.programs import *\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command, status=0):
        done = subprocess.run(command, cwd=outside, env=environment, capture_output=True, text=True)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout if status == 0 else done.stderr

    run(sys.executable, "-m", "venv", str(tmp_path / "venv"))
    python, command = (str(tmp_path / "venv" / "bin" / name) for name in ("python", "adaptive_jax"))
    wheel = str(built(clone, "build_wheel"))
    run(python, "-m", "pip", "install", "--quiet", wheel)
    listed = run(python, "-m", "pip", "list", "--format=freeze").split()
    names = {line.partition("==")[0].lower().replace("_", "-") for line in listed}
    brought = {"adaptive-jax", "jax", "jaxlib", "ml-dtypes", "numpy", "opt-einsum", "scipy"}
    assert names - {"pip", "setuptools", "wheel"} == brought
    (outside / "my.py").write_text(CONFIG)

    def check_needs(extra, cures):
        for statement, needs in cures.items():
            said = run(python, "-c", statement, status=1)
            line = rf"MissingPackage: {needs} \w+: pip install 'adaptive_jax\[{extra}\]'\n$"
            assert re.search(line, said), said

    def check_training_is_missing():
        needs = "training and trained models need"  # whichever of its packages is imported first
        statements = "import adaptive_jax.training.loop", "import adaptive_jax; adaptive_jax.load"
        check_needs("train", dict.fromkeys(statements, needs))
        said = run(command, "train", "--config=my.py", status=2)
        assert re.fullmatch(rf"error: {needs} \w+: pip install 'adaptive_jax\[train\]'\n", said)

    def check_tests(*paths):
        run(python, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", *paths)

    assert "trains a language model" in run(command)
    check_training_is_missing()
    statements = [f"from adaptive_jax import {name}" for name in LAYERS]
    check_needs("layers", dict.fromkeys(statements, "layers and optimizers need"))
    run(python, "-m", "pip", "install", "--quiet", "pytest")
    of_losses = "asked_gradients", "cross_entropy", "distillation", "reports"
    check_tests("tests/test_testing.py", *(f"tests/losses/test_{name}.py" for name in of_losses))

    run(python, "-m", "pip", "install", "--quiet", f"{wheel}[layers]")
    for statement in statements:
        run(python, "-c", statement)
    check_training_is_missing()
    (outside / "tests" / "outputs").mkdir()
    shutil.copy(ROOT / "tests" / "outputs" / "test_on_devices.py", outside / "tests" / "outputs")
    check_tests("tests/outputs")

    run(python, "-m", "pip", "install", "--quiet", f"{wheel}[train]")
    (outside / "ids").mkdir()
    for split in "train", "valid", "test":
        ids = np.random.default_rng(0).integers(0, 50, 2_000)
        np.save(outside / "ids" / f"{split}.npy", ids)
    assert "finished: 2 updates" in run(command, "train", "--config=my.py", "--workdir=run")
    assert "nats a token" in run(command, "evaluate", "--workdir=run")
    shutil.copy(ROOT / "configs" / "own_text.py", outside)
    of_ids = (
        "--config.data.corpus=ids",
        "--config.data.path=ids",
        "--config.data.vocabulary_size=50",
    )
    own = "--config=own_text.py", "--workdir=own", *of_ids
    assert "bands        none" in run(command, "train", *own, "--hours=0.01", "--dry_run")
