"""The reference numbers that the papers' public code computed, and which of them a test has read.

The environment variable REFERENCE names their folder; without it, it is `../shared/reference`, or
where that is not either, `tests/fixtures`, which has the smaller ones. It has a folder for each
public code, in which `X.json` has the settings of the cases of `X`, and
`X.npz` their arrays, as its README says. Another set of the same format runs unchanged: tests take
names of cases and sizes from the files.
"""

import fnmatch
import json
import os
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
import pytest

from adaptive_jax.numerics.batch import Batch

FIXTURES = Path(__file__).parents[1] / "fixtures"
BESIDE = Path(__file__).parents[3] / "shared" / "reference"
RAN = set()  # the tests of tests/reference that this process has begun


# Settings that the shapes of arrays give again, and those with which arrays were drawn
SIZES = {
    f"*:{name}": "in the shapes of arrays"
    for name in (
        *("seed", "emsize", "nhid", "nlayers", "tie_weights", "n", "n_tokens", "T", "B", "hidden"),
        *("input_size", "hidden_size", "batch_size", "cluster_ends"),
    )
}


class Arrays(Mapping):
    """The arrays whose names begin with `start`, by the rest of their names; those that are taken
    count as read.
    """

    def __init__(self, stored, read, start=""):
        self.stored, self.read, self.start = stored, read, start

    def __getitem__(self, name):
        array = self.stored[self.start + name]
        self.read.add(self.start + name)
        return array

    def __contains__(self, name):
        return self.start + name in self.stored

    def __iter__(self):
        return (key[len(self.start) :] for key in self.stored if key.startswith(self.start))

    def __len__(self):
        return sum(1 for _ in self)

    def under(self, start):
        """Of these, the arrays whose names begin with `start`."""
        return Arrays(self.stored, self.read, self.start + start)


class Settings(dict):
    """The settings of a case, and those inside them; those that are looked up count as read."""

    def __init__(self, stored, read, start=""):
        self.read, self.start = read, start
        inner = {k: Settings(v, read, f"{start}{k}.") for k, v in stored.items() if type(v) is dict}
        super().__init__(stored | inner)

    def __getitem__(self, name):
        self.read.add(self.start + name)
        return super().__getitem__(name)

    def get(self, name, default=None):
        self.read.add(self.start + name)
        return super().get(name, default)

    def items(self):
        return [(name, self[name]) for name in self]

    def __or__(self, other):
        return dict(self.items()) | other

    def __ror__(self, other):
        return other | dict(self.items())

    def numbers(self):
        """Names of the settings that are numbers, or lists of them."""
        for name, value in super().items():
            if isinstance(value, Settings):
                yield from value.numbers()
            elif is_numeric(value):
                yield self.start + name


def is_numeric(value):
    """True of a number, and of lists of numbers."""
    return (
        all(map(is_numeric, value)) if isinstance(value, list) else isinstance(value, int | float)
    )


class Code:
    """The files of one public code."""

    def __init__(self, folder):
        self.folder, self.stored = folder, {}
        self.files, self.taken, self.read = set(), {}, {}

    def about(self, file):
        """All that `file.json` says."""
        name = f"{file}.json"
        self.files.add(name)
        if name not in self.stored:
            self.stored[name] = json.loads((self.folder / name).read_text())
        return self.stored[name]

    def cases(self, file, entry="cases", *, has=None, lacks=None):
        """Names of the cases of a file, or their numbers where it lists them; of those whose
        settings have one entry and lack another.
        """
        cases = self.about(file).get(entry, [])
        named = cases.items() if isinstance(cases, dict) else enumerate(cases)
        return [
            name
            for name, case in named
            if (has is None or has in case) and (lacks is None or lacks not in case)
        ]

    def settings(self, file, case, entry="cases"):
        """The settings of a case, which counts as read."""
        read = self.taken.setdefault((file, entry, case), set())
        return Settings(self.about(file)[entry][case], read)

    def arrays(self, file, start=""):
        """The arrays of `file.npz` whose names begin with `start`, as `Arrays`."""
        return Arrays(self._stored(file), self.read.setdefault(file, set()), start)

    def case(self, file, case):
        """The settings of a case, and its arrays."""
        return self.settings(file, case), self.arrays(file, f"{case}/")

    def _stored(self, file):
        name = f"{file}.npz"
        self.files.add(name)
        if name not in self.stored:
            with np.load(self.folder / name) as stored:
                self.stored[name] = dict(stored)
        return self.stored[name]

    def _unread_numbers(self):
        """`file:setting` of the numbers of cases that count as read, which no test looks up."""
        numbers, seen = set(), set()
        for (file, entry, case), read in self.taken.items():
            of_case = Settings(self.about(file)[entry][case], set()).numbers()
            numbers |= {f"{file}:{name}" for name in of_case}
            seen |= {f"{file}:{name}" for name in read}
        return numbers - seen

    def path(self, name):
        """The path of another file, which counts as read."""
        self.files.add(name)
        return self.folder / name

    def named(self, pattern):
        """Names without their ending of the files that the pattern matches."""
        return sorted(path.stem for path in self.folder.glob(pattern))

    def unread(self, left_out=(), lists=()):
        """Names of all that no test has read: files, cases, their numbers, arrays.

        left_out: patterns of names that no test reads, and why. lists: entries `file/entry` that
            are cases too.
        """
        files = {path.name for path in self.folder.iterdir()} - {"README.md"} - self.files
        names = sorted(files)
        entries = [(f"{path.stem}", "cases") for path in self.folder.glob("*.json")]
        for file, entry in entries + [tuple(each.split("/")) for each in lists]:
            for case in self.cases(file, entry):
                label = f"{file}/{case}" if entry == "cases" else f"{file}/{entry}/{case}"
                if (file, entry, case) not in self.taken:
                    names.append(label)
        names += sorted(self._unread_numbers())
        for file in self.named("*.npz"):
            read = self.read.get(file, set())
            names += [f"{file}/{key}" for key in self._stored(file) if key not in read]
        return [n for n in names if not any(fnmatch.fnmatchcase(n, each) for each in left_out)]


def run_once(function, *arguments):
    """The result of a jitted function, whose program is not kept, as NumPy arrays."""
    return jax.device_get(jax.jit(function).lower(*arguments).compile()(*arguments))


def close_to_largest(ours, theirs, atol=1e-4, rtol=0.0):
    """Compares trees: each entry to a share of the largest of its array, and of itself."""

    def compare(a, b):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol * np.abs(b).max())

    jax.tree.map(compare, ours, theirs)


def batch_of(inputs, targets, weights=None):
    """Rows as a batch, each with its number; weights: all 1 by default."""
    weights = np.ones(inputs.shape) if weights is None else weights
    of_ids = np.asarray(inputs, np.int32), np.asarray(targets, np.int32)
    return Batch(*of_ids, np.asarray(weights, np.float32), np.arange(len(inputs), dtype=np.int32))


def window(columns, start, rows, length):
    """So many rows of `columns [time, streams]`, padded to `length`, as a batch of one microbatch;
    the first one begins anew.
    """
    inputs, targets = (
        np.pad(columns[i : i + rows].T.astype(np.int32), ((0, 0), (0, length - rows)))[None]
        for i in (start, start + 1)
    )
    ids = np.arange(columns.shape[1], dtype=np.int32)[None]
    weights = np.broadcast_to(np.arange(length) < rows, inputs.shape).astype(np.float32)
    return Batch(inputs, targets, weights, ids, reset=np.full(ids.shape, start == 0))


def code(name):
    """The files of a public code."""
    given = os.environ.get("REFERENCE")
    folder = Path(given) if given else BESIDE if BESIDE.is_dir() else FIXTURES
    if not folder.is_dir():
        raise NotADirectoryError(f"REFERENCE must be a folder, got {folder}")
    if not (folder / name).is_dir():
        pytest.skip(f"{folder} has no numbers of {name}", allow_module_level=True)
    return Code(folder / name)


def assert_all_is_read(code, request, left_out, lists=()):
    """Fails with the names of what no test of the module has read, if all its tests have run."""
    if code.folder.parent == FIXTURES:
        pytest.skip("the fixtures have files of other tests, too")
    others = [item for item in request.session.items if item.path == request.path]
    ran = {item.nodeid for item in others} - {request.node.nodeid} <= RAN
    defined = {name for name in vars(request.module) if name.startswith("test_")}
    if not ran or defined - {item.function.__name__ for item in others}:
        pytest.skip("needs all tests of its file, in one process")
    unread = code.unread(left_out, lists)
    assert not unread, f"{len(unread)} read by no test: " + ", ".join(unread)
