"""The comparison of two commits finds what differs, and names it; tools/compare_commits runs it."""

import re
from pathlib import Path

import numpy as np
import pytest

from tools.compare_commits.__main__ import difference, exact, for_new, renamed
from tools.compare_commits.cases import cases, write_texts

DOCS = Path(__file__).parents[1] / "docs"
RUN = {
    "train: update 1 nll": np.array(4.5),
    "train: update 2 nll": np.array(np.nan),
    "train: step 20 body/kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
    "score: line 0": np.array("-1.25\tthe cat"),
}
KERNEL = "train: step 20 body/kernel"


def test_equal_runs():
    """A run equals its copy, NaN among its numbers, with and without a tolerance."""
    copy = {name: array.copy() for name, array in RUN.items()}
    assert difference(RUN, copy) is None and difference(RUN, copy, 1e-6) is None


@pytest.mark.parametrize(
    "name, array, says",
    [
        (KERNEL, np.array([[0, 1, 2], [3, 4, 5.5]], np.float32), "by 0.5 where"),
        (KERNEL, RUN[KERNEL] * np.float32(1 + 2e-7), "by 9.54e-07 where"),
        (KERNEL, RUN[KERNEL].T, "float32[2, 3] became float32[3, 2]"),
        (KERNEL, RUN[KERNEL].astype(np.float16), "became float16[2, 3]"),
        ("train: update 2 nll", np.array(3.0), "nan became 3"),
        ("train: update 1 nll", np.array(np.nan), "4.5 became nan"),
        ("score: line 0", np.array("-1.26\tthe cat"), r"'-1.25\tthe cat' became '-1.26"),
        ("score: line 1", np.array(""), "only in NEW"),
    ],
)
def test_the_first_difference_has_a_name(name, array, says):
    """A last bit, a shape, a type, a NaN, a line of text: without this, a restructuring that
    changes a number would pass.
    """
    line = difference(RUN, RUN | {name: array})
    assert line.startswith(f"{name}: ") and says in line


def test_the_first_of_several_and_their_number():
    """In the order of the run, not of the size; arrays that are missing count."""
    new = {name: array for name, array in RUN.items() if name != "score: line 0"}
    new |= {"train: update 1 nll": np.array(4.5001), KERNEL: RUN[KERNEL] + 100}
    line = difference(RUN, new)
    assert line.startswith("train: update 1 nll: by 0.0001") and "3 of 4 arrays differ" in line


def test_a_tolerance_is_of_the_largest_entry():
    """Several devices may add in another order, and no more."""
    near = RUN | {KERNEL: RUN[KERNEL] + np.float32(2e-6)}
    assert difference(RUN, near, 1e-6) is None and difference(RUN, near, 1e-7)
    assert difference(RUN, RUN | {"train: update 2 nll": np.array(1.0)}, 1e-6)


def test_translations():
    """A key that is renamed reaches the new side under its new name, one that vanished does not."""
    table = {"--config.body.heads": "--config.body.attention.heads", "--config.keep": None}
    case = {"steps": [{"argv": ["--config.body.heads=2", "--config.keep=9", "--config.steps=3"]}]}
    assert for_new(case, table)["steps"][0]["argv"] == [
        "--config.body.attention.heads=2",
        "--config.steps=3",
    ]
    assert renamed("train: step 20 body/norm", {"body/": "net/"}) == "train: step 20 net/norm"


def test_every_class_is_compared(tmp_path):
    """Each name that a config may choose is in some case; a new class needs a line in cases.txt."""
    table = cases(write_texts(tmp_path))
    given = {flag for steps in table.values() for step in steps for flag in step["argv"]}
    classes = re.findall(r"^### `(.*?)`", (DOCS / "configuration.md").read_text(), re.MULTILINE)
    assert len(classes) > 25
    missing = [name for name in classes if f"--config.{name}" not in given]
    assert not missing
    assert [
        name for name in ("8 devices", "2 hosts", "caches") if exact({"steps": table[name]})
    ] == ["caches"]
