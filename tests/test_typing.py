"""Type checkers know the package's exports, and users get at run time what type checkers were
told.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import adaptive_jax

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_type_checker_knows_the_exports():
    """mypy finds every mistake marked in tests/typing/exports.py and no other; where a name
    were Any, it would find none.
    """
    pytest.importorskip("mypy", reason="mypy is not installed: pip install -e '.[test]'")
    options = "--strict", "--follow-imports=silent", "--cache-dir=.pytest_cache/mypy"
    command = sys.executable, "-m", "mypy", *options, "tests/typing/exports.py"
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_exports_are_what_type_checkers_are_told():
    """The names under TYPE_CHECKING are those of __all__ and those that the lazy import finds,
    in the same modules.
    """
    tree = ast.parse(Path(adaptive_jax.__file__).read_text())
    told = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    del told["TYPE_CHECKING"]
    assert list(told) and sorted(told) == sorted(adaptive_jax.__all__)
    for name, module in told.items():
        assert getattr(adaptive_jax, name) is getattr(sys.modules[module], name)
