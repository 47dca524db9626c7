"""Runs cases in one checkout: the process that `tools.compare_commits` starts for each side.

Reads one JSON object from stdin, `{"root": checkout, "out": directory, "jobs": 2, "cases": ...}`,
and prints the seconds of processors and the name of every case once its results are in `out`, as
NAME.pickle: a dict of arrays by name, in the order in which a run makes them. A case is a process,
forked after the imports, and so is each of its commands; JAX must not have started before.

It opens a checkout by doors that stay where they are: the scripts in the root, the commands of
`python -m adaptive_jax`, the files of a workdir, and what `adaptive_jax` exports.
"""

import contextlib
import importlib
import json
import logging
import os
import pickle
import re
import runpy
import shutil
import signal
import socket
import sys
import traceback
import warnings
from pathlib import Path

import numpy as np

LIMIT = 900  # seconds that a command may take
FAILED = "failed"  # the name under which the results have the end of a command's stderr
READERS = "score", "generate", "examples/stablehlo_scorer.py"  # of their stdin
TIMES = ("_second", "seconds", "data_wait", "utilisation")  # in the names of metrics that vary
RESULTS = ("nll", "perplexity", "words", "tokens", "unknown", "unseen", "open", "grid")
RESULTS += ("characters", "bits_per_character", "unigram_perplexity")  # what is read of eval/*.json


def serve(request: dict) -> None:
    """Runs the cases, `request["jobs"]` at a time."""
    warnings.filterwarnings("ignore", message="os.fork")  # no thread has started
    waiting, running = list(request["cases"]), {}
    while waiting or running:
        while waiting and len(running) < request["jobs"]:
            case = waiting.pop(0)
            running[forked(lambda case=case: run_case(request, case))] = case["name"]
        done, _, used = os.wait3(0)
        print(f"{used.ru_utime + used.ru_stime:.0f} {running.pop(done)}", flush=True)


def forked(call) -> int:
    """The number of a new process that calls and ends."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    status = 1
    try:
        status = call() or 0
    except SystemExit as end:
        print(end.code if isinstance(end.code, str) else "", file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def run_case(request: dict, case: dict) -> None:
    """Runs the commands of a case and writes what they make."""
    out = Path(request["out"])
    here = out / "work" / case["name"].replace(" ", "_").replace("/", "_")
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir(parents=True)
    places = request["places"] | {"here": str(here)}
    arrays = {}
    try:
        for number, step in enumerate(case["steps"]):
            step = step | {key: filled(step[key], places) for key in ("argv", "place")}
            if step["read"] == "evaluation":  # results of earlier commands
                for file in Path(step["place"], "eval").glob("*.json"):
                    file.unlink()
            log = here / f"{number}.log"
            statuses = run_command(request, step, log)
            if any(statuses):
                says = log.with_suffix(".err").read_text(errors="replace").strip().splitlines()
                raise RuntimeError(f"{step['label']}: {' '.join(says[-1:])[-300:]}")
            reading = here / f"{number}.pickle"
            pid = forked(lambda step=step, log=log, file=reading: write(read(step, log), file))
            if os.waitpid(pid, 0)[1]:
                raise RuntimeError(f"{step['label']}: its results cannot be read")
            if not (values := pickle.loads(reading.read_bytes())):
                raise RuntimeError(f"{step['label']}: there are no results")
            arrays |= {f"{step['label']}: {name}": value for name, value in values.items()}
    except Exception as error:
        arrays[FAILED] = np.array(str(error))
    write(arrays, out / f"{case['name']}.pickle")
    if FAILED not in arrays:
        shutil.rmtree(here)


def write(value: dict, file: Path) -> None:
    """Writes a file that is there as a whole or not at all."""
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_bytes(pickle.dumps(value))
    unfinished.rename(file)


def filled(value: str | list[str], places: dict) -> str | list[str]:
    """Text with directories in the place of `{here}`, `{text}` …"""
    if isinstance(value, list):
        return [filled(each, places) for each in value]
    for name, place in places.items():
        value = value.replace(f"{{{name}}}", place)
    return value


def run_command(request: dict, step: dict, log: Path) -> list[int]:
    """The exit statuses of a command's hosts, whose output goes to files beside `log`."""
    if step["argv"][0] == "rows":
        return [0]
    arguments = [[]]
    if step["hosts"] > 1:
        with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"
        hosts = [f"--coordinator={address}", f"--hosts={step['hosts']}"]
        arguments = [[*hosts, f"--host={host}"] for host in range(step["hosts"])]
    pids = []
    for host, more in enumerate(arguments):
        file = log.with_suffix(f".{host}.log") if host else log
        argv = [*step["argv"], *more]
        pids.append(
            forked(lambda argv=argv, file=file: run_script(request, argv, step["devices"], file))
        )
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def run_script(request: dict, argv: list[str], devices: int, log: Path) -> None:
    """Becomes a script of the checkout."""
    signal.alarm(LIMIT)
    for number, file in (1, log), (2, log.with_suffix(".err")):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    given = request["places"]["given"] if argv[0] in READERS else os.devnull
    os.dup2(os.open(given, os.O_RDONLY), 0)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={devices} {request['xla_flags']}"
    )
    try:
        if argv[0].endswith(".py"):
            sys.argv = argv
            runpy.run_path(argv[0], run_name="__main__")
        else:
            sys.argv = ["adaptive_jax", *argv]
            runpy.run_module("adaptive_jax", run_name="__main__", alter_sys=True)
    finally:
        import jax

        jax.distributed.shutdown()  # or the other host would see this one die


def read(step: dict, log: Path) -> dict:
    """Results of a command: arrays by name."""
    place = Path(step["place"])
    return {
        "run": lambda: metrics(place) | parameters(place),
        "parameters": lambda: parameters(place),
        "evaluation": lambda: evaluations(place),
        "arrays": lambda: exported(place),
        "rows": rows,
        "output": lambda: lines(log),
        "file": lambda: lines(place),
    }[step["read"]]()


def lines(file: Path) -> dict:
    """The lines of a text, by number."""
    return {f"line {n}": np.array(line) for n, line in enumerate(file.read_text().split("\n"))}


def exported(directory: Path) -> dict:
    """The arrays of an exported model."""
    from safetensors.numpy import load_file

    files = sorted(directory.glob("*.safetensors"))
    arrays = ((file.stem, sorted(load_file(file).items())) for file in files)
    return {f"{stem} {name}": array for stem, inner in arrays for name, array in inner}


def metrics(workdir: Path) -> dict:
    """The numbers of metrics.jsonl, update after update: the loss first, then the rest."""
    arrays = {}
    for line in (workdir / "metrics.jsonl").read_text().splitlines():
        line = json.loads(line)
        step = line.pop("step")
        names = [name for name in line if not any(part in name for part in TIMES)]
        for name in sorted(names, key=lambda name: (not name.endswith("/nll"), -name.count("/"))):
            arrays[f"update {step} {name}"] = np.array(line[name], float)
    return arrays


def parameters(workdir: Path) -> dict:
    """The parameters of all checkpoints, by step and name; not the optimizer's state, whose layout
    may change.
    """
    import jax
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax misses a file that it does not need
    arrays, handler = {}, ocp.PyTreeCheckpointer()
    steps = [path for path in (workdir / "checkpoints").iterdir() if path.name.isdecimal()]
    for path in sorted(steps, key=lambda path: int(path.name)):
        tree = handler.metadata(path / "params").item_metadata.tree
        how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        tree = handler.restore(path / "params", restore_args=how)
        for keys, array in jax.tree.leaves_with_path(tree):
            arrays[f"step {path.name} {'/'.join(key.key for key in keys)}"] = np.asarray(array)
    return arrays


def evaluations(workdir: Path) -> dict:
    """The numbers of eval/*.json."""
    arrays = {}
    for path in sorted((workdir / "eval").glob("*.json")):
        result = json.loads(path.read_text())
        name = re.sub("-[0-9a-f]{8}", "", path.stem)  # hashes of options and of places
        for key in RESULTS:
            if key in result:
                arrays |= flat(f"{name} {key}", result[key])
    return arrays


def flat(name: str, value) -> dict:
    """The numbers inside lists and dicts, by name."""
    if isinstance(value, dict | list):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, each in inner for k, v in flat(f"{name}/{key}", each).items()}
    return {} if isinstance(value, str) else {name: np.array(value, float)}


def rows() -> dict:
    """The shapes of all parameters of every row of configs/, as models are built from them."""
    import jax
    import jax.numpy as jnp

    from adaptive_jax import Batch, build
    from adaptive_jax.config.keys import resolve

    ids = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    weights = jax.ShapeDtypeStruct((1, 2), jnp.float32)
    batch = Batch(ids, ids, weights, jax.ShapeDtypeStruct((1,), jnp.int32))
    shapes, arrays = {}, {}
    for path in sorted(Path("configs").glob("*.py")):
        module = importlib.import_module(f"configs.{path.stem}")
        for row in getattr(module, "ROWS", ()):
            config = resolve(module.get_config(row))
            config["output"] |= {"clusters": ""}  # a file that users make
            what = {key: config[key] for key in ("dtype", "input", "body", "output")}
            words = config["data"]["vocabulary_size"] or 10_000  # own text: known when it is read
            if (key := repr((words, what))) not in shapes:
                tree = jax.eval_shape(build(config, words).init, jax.random.key(0), batch)
                shapes[key] = {
                    "/".join(part.key for part in keys): np.array(leaf.shape, int)
                    for keys, leaf in jax.tree.leaves_with_path(tree["params"])
                }
            arrays |= {f"{path.stem}:{row} {name}": v for name, v in shapes[key].items()}
    return arrays


def main() -> None:
    """Imports what commands need, from the checkout, and serves."""
    request = json.load(sys.stdin)
    os.chdir(request["root"])
    sys.path[0] = request["root"]
    import adaptive_jax

    assert Path(adaptive_jax.__file__).parents[1] == Path(request["root"]), adaptive_jax.__file__
    for name in adaptive_jax.__all__:
        getattr(adaptive_jax, name)
    for name in ("sacremoses", "orbax.checkpoint", "optax", "tensorstore"):
        importlib.import_module(name)
    serve(request)


if __name__ == "__main__":
    main()
