"""Runs two checkouts and compares their numbers: 20 updates of every choice, evaluation by every
method, the shapes of all rows, conversion and export.

    python -m tools.compare_commits HEAD~1 .
    python -m tools.compare_commits 1d9b9db . --only='groc|hosts' --keep=/var/tmp/compared

Each argument is the directory of a checkout or a git revision. A line for each case says "equal" or
which array differs first; after a difference the exit status is 1. Checkouts run one after the
other on two cores, with compiled programs shared.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import inspect
import json
import os
import pickle
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from tools.compare_commits.cases import FLAGS, NAMES, cases, write_texts
from tools.compare_commits.worker import FAILED

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Programs run once or twice, so they are compiled in haste, as in tests/conftest.py.
HASTE = "--xla_backend_optimization_level=0"
if tuple(map(int, importlib.metadata.version("jax").split(".")[:2])) < (0, 11):
    HASTE += " --xla_cpu_use_fusion_emitters=false"
# Share of the largest entry of an array, for cases on several devices. On one device a commit
# repeats itself bit for bit. Several sum gradients in an order that the compiler chooses for a
# program, and another program that computes the same may get another; 1e-6 is 8 times the rounding
# of float32.
TOLERANCE = 1e-6


def difference(old: Mapping, new: Mapping, tolerance: float = 0.0) -> str | None:
    """First difference between two dicts of arrays by name, and its size; None: none.

    tolerance: share of the largest entry of an array by which its entries may differ. NaN equals
    NaN.
    """
    names = [*old, *(name for name in new if name not in old)]
    wrong = {name: text for name in names if (text := _apart(name, old, new, tolerance))}
    if not wrong:
        return None
    first = next(iter(wrong))
    more = f"; {len(wrong):,} of {len(names):,} arrays differ" if len(wrong) > 1 else ""
    return f"{first}: {wrong[first]}{more}"


def _apart(name, old, new, tolerance):
    """Difference of the arrays of a name, or None."""
    if name not in new or name not in old:
        return "missing in NEW" if name in old else "only in NEW"
    a, b = np.asarray(old[name]), np.asarray(new[name])
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype}{list(a.shape)} became {b.dtype}{list(b.shape)}"
    if a.dtype.kind in "US":
        return None if np.array_equal(a, b) else f"{str(a)[:60]!r} became {str(b)[:60]!r}"
    a, b = a.astype(float), b.astype(float)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return None
    both = np.isfinite(a) & np.isfinite(b)
    if not (both | same).all():
        at = np.argmin(both | same)
        return f"{a.flat[at]:g} became {b.flat[at]:g}"
    a, b = np.where(both, a, 0.0), np.where(both, b, 0.0)
    apart, largest = np.abs(a - b).max(), np.abs(a).max()
    if apart <= tolerance * largest:
        return None
    return f"by {apart:.3g} where the largest entry is {largest:.3g}"


def exact(case: dict) -> bool:
    """True if all of a case runs on one device."""
    return all(step["devices"] == step["hosts"] == 1 for step in case["steps"])


def renamed(name: str, table: Mapping[str, str | None]) -> str | None:
    """A name in which the table's part, which begins it or a word in it, is replaced; None: the
    table drops the name.
    """
    for old, new in table.items():
        if re.search(rf"(^|\s){re.escape(old)}", name):
            return None if new is None else name.replace(old, new, 1)
    return name


def for_new(case: dict, table: Mapping[str, str | None] = FLAGS) -> dict:
    """A case with the flags that NEW knows."""
    steps = []
    for step in case["steps"]:
        argv = [renamed(part, table) for part in step["argv"]]
        steps.append(step | {"argv": [part for part in argv if part is not None]})
    return case | {"steps": steps}


@contextlib.contextmanager
def checkout(given: str, scratch: Path) -> Iterator[tuple[Path, str | None]]:
    """The directory of a checkout or revision; and its commit, None if files differ from it."""
    git = ["git", "-C", given if Path(given).is_dir() else str(ROOT)]
    if Path(given).is_dir():
        changed = _said([*git, "status", "--porcelain", "--untracked-files=no"])
        yield Path(given).resolve(), None if changed else _said([*git, "rev-parse", "HEAD"])
        return
    commit = _said([*git, "rev-parse", "--verify", f"{given}^{{commit}}"])
    place = scratch / commit[:12]
    _said([*git, "worktree", "add", "--force", "--detach", str(place), commit])
    try:
        yield place.resolve(), commit
    finally:
        _said([*git, "worktree", "remove", "--force", str(place)])


def _said(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


def _key(case):
    """Key of results besides the commit: commands, how they are read, the machine."""
    libraries = [importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")]
    where = platform.node(), platform.python_version(), libraries
    how = inspect.getsource(write_texts), (HERE / "worker.py").read_text()
    return hashlib.sha256(repr((case, how, where)).encode()).hexdigest()[:12]


def results(root: Path, out: Path, todo: list[dict], places: dict, jobs: int) -> Iterator[tuple]:
    """Runs cases in a checkout; the seconds of processors and the name of each when its results
    are in `out`.
    """
    out.mkdir(parents=True, exist_ok=True)
    cache = out / "cache"
    cache.mkdir(exist_ok=True)
    request = {"root": str(root), "out": str(out), "jobs": jobs, "cases": todo}
    request |= {"places": places, "xla_flags": HASTE}
    programs = os.environ.get("JAX_COMPILATION_CACHE_DIR", places["programs"])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": programs}
    environment |= {"ADAPTIVE_JAX_CACHE": str(cache)}  # commits before it have ~/.cache
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1", "PYTHONPATH": str(root)}
    environment |= {"XLA_FLAGS": f"--xla_force_host_platform_device_count=1 {HASTE}"}
    with subprocess.Popen(
        [sys.executable, str(HERE / "worker.py")],
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            process.stdin.write(json.dumps(request))
            process.stdin.close()
            for line in process.stdout:
                yield line.rstrip("\n").split(" ", 1)
        except BaseException:  # such as an interruption, which its processes do not get
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        sys.exit(f"error: cases cannot run in {root}")


def compare(arguments, scratch: Path) -> int:
    """Runs both checkouts, prints a line for each case; how many differ."""
    places = write_texts(scratch) | {"programs": str(scratch / "programs")}
    for name in "reference", "wordnet":
        if (place := Path(getattr(arguments, name)).resolve()).is_dir():
            places[name] = str(place)
        else:
            print(f"skipped  what needs {place}, which is not there")
    table = cases(places)
    names = [name for name in table if re.search(arguments.only, name)]
    if not names:
        raise SystemExit(f"error: --only={arguments.only!r} finds none of the {len(table)} cases")
    chosen = {name: {"name": name, "steps": table[name]} for name in names}
    width, wrong = max(map(len, chosen)), []
    with contextlib.ExitStack() as stack:
        (old, commit), (new, _) = (
            stack.enter_context(checkout(given, scratch / side))
            for side, given in (("old", arguments.old), ("new", arguments.new))
        )
        kept = Path(arguments.keep or scratch, "results", commit or "changed").resolve()
        if commit is None:
            shutil.rmtree(kept, ignore_errors=True)
        before = {name: kept / f"{name} {_key(case)}.pickle" for name, case in chosen.items()}
        todo = [case for name, case in chosen.items() if FAILED in _load(before[name])]
        print(f"OLD  {old}: {len(todo)} of {len(chosen)} cases to run", flush=True)
        out = scratch / "old"
        for _, name in results(old, out, todo, places, arguments.jobs) if todo else ():
            kept.mkdir(parents=True, exist_ok=True)
            shutil.move(out / f"{name}.pickle", before[name])
        print(f"NEW  {new}", flush=True)
        out, todo = scratch / "new", [for_new(case) for case in chosen.values()]
        for seconds, name in results(new, out, todo, places, arguments.jobs):
            pair = [_load(before[name]), _load(out / f"{name}.pickle")]
            pair[0] = {k: v for key, v in pair[0].items() if (k := renamed(key, NAMES))}
            difference = _line(*pair, 0.0 if exact(chosen[name]) else TOLERANCE)
            said = "differs" if difference else "equal"
            print(
                f"{said:<8} {name:<{width}} {seconds:>4} s  {difference or ''}".rstrip(), flush=True
            )
            wrong += [name] if difference else []
    print(f"{len(chosen) - len(wrong)} cases equal, {len(wrong)} differ", *wrong, sep="; ")
    return len(wrong)


def _line(old, new, tolerance):
    sides = {"OLD": old, "NEW": new}
    failed = [f"{side} fails: {sides[side][FAILED]}" for side in sides if FAILED in sides[side]]
    return "; ".join(failed) or difference(old, new, tolerance)


def _load(path):
    try:
        return pickle.loads(path.read_bytes())
    except FileNotFoundError:
        return {FAILED: np.array("the process of the case ended without results")}


def main() -> None:
    """Parses the command line and compares."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.compare_commits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shared = ROOT.parent / "shared"
    parser.add_argument("old", help="directory of a checkout, or a revision")
    parser.add_argument("new", help="likewise")
    parser.add_argument("--only", default="", help="cases whose names this expression finds")
    parser.add_argument("--keep", help="directory that keeps OLD's results, by commit")
    parser.add_argument("--jobs", type=int, default=2, help="cases that run at a time")
    parser.add_argument("--reference", default=shared / "reference", help="checkpoints to convert")
    parser.add_argument(
        "--wordnet", default=Path("~/nltk_data/corpora/wordnet").expanduser(), help="unpacked"
    )
    arguments = parser.parse_args()
    start = time.perf_counter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an interruption: cleans up
    with tempfile.TemporaryDirectory() as scratch:
        wrong = compare(arguments, Path(scratch))
    spent = os.times()
    cpu = spent.children_user + spent.children_system
    print(f"{time.perf_counter() - start:,.0f} s, {cpu:,.0f} s of processors")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
