"""Whole updates a second: loss, gradients, clipping and optimizer, against the same model in PyTorch in the same run.

    python -m benchmarks.throughput [--repeats=9] [--json=FILE]
    python -m benchmarks.throughput --config=configs/wikitext103.py:adp --rows=32 --parts [--profile=DIR]

By default the model is one for a laptop: 6 blocks of width 256, feed-forward 1024, 8 heads, adaptive input and adaptive softmax
over 33,278 words, 8 rows of 256 Zipf-distributed tokens, no dropout, float32. Any config will do; torch, where it is installed,
joins in for those it has the layers for, adaptive input and adaptive softmax with tables of their own (`adp`), on the same device
and in the same type, on a GPU as it is and by torch.compile.

Repeats of the peers are interleaved, so that a busy machine slows them alike; times are medians. FLOPs are those of
`adaptive_jax.plan`, utilisation is of the speed of a large matrix product measured in the same run.
"""

import contextlib
import gzip
import json
import os
import platform
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch wants memory of the same GPU

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from ml_collections import config_flags

from adaptive_jax import command
from adaptive_jax.bodies.attention import PATHS
from adaptive_jax.data.batches.batching import Batch
from adaptive_jax.devices import sharding
from adaptive_jax.errors import InputError, check_at_least
from adaptive_jax.model import build
from adaptive_jax.plans.costs import plan
from adaptive_jax.training import optim
from adaptive_jax.training.state import initial_state
from adaptive_jax.training.update import make_update
from benchmarks.timing import interleaved
from configs import wikitext2


def laptop() -> dict:
    """The config of the model for a laptop."""
    config = wikitext2.get_config("adp")
    config.update_from_flattened_dict({
        "dtype": "float32", "data.block": 256, "input.cutoffs": (2_500, 10_000), "input.width": 0,
        "output.table.cutoffs": (2_500, 10_000), "output.table.width": 0, "output.tail_dropout": 0.0,
        "body.layers": 6, "body.features": 256, "body.feed_forward": 1024, "body.heads": 8,
        "body.dropout": 0.0, "body.attention_dropout": 0.0, "body.activation_dropout": 0.0})  # fmt: skip
    return config.to_dict()


def zipf(rows: int, block: int, words: int) -> np.ndarray:
    """Ids int32 `[rows, block + 1]`, the word of rank r as often as 1/r."""
    shares = 1 / np.arange(1, words + 1)
    return np.random.default_rng(0).choice(words, (rows, block + 1), p=shares / shares.sum()).astype(np.int32)


def our_update(config: dict, rows: int):
    """A function that makes an update of `rows` rows and returns its loss, and the bytes it needs by the compiler's count."""
    words, block = config["data"]["vocabulary_size"], config["data"]["block"]
    model, mesh = build(config, words), sharding.device_mesh()
    optimizer, rate = optim.from_config(config["optimizer"])
    ids = zipf(rows, block, words)[None]
    batch = sharding.put_rows(mesh, Batch(ids[..., :-1], ids[..., 1:], np.ones((1, rows, block), np.float32)), axis=1)
    state = [initial_state(model, optimizer, 0, mesh)]
    compiled = make_update(model, optimizer, rate, mesh, 0).lower(state[0], batch).compile()

    def update():
        state[0], numbers = compiled(state[0], batch)
        return numbers["loss"]

    memory = compiled.memory_analysis()
    return lambda: float(update()), memory.temp_size_in_bytes + memory.argument_size_in_bytes


def our_output(config: dict, rows: int):
    """A function that computes loss and gradients of the output layer alone, for as many tokens, and ends when they are there."""
    words, block = config["data"]["vocabulary_size"], config["data"]["block"]
    model = build(config, words)
    ids = jnp.asarray(zipf(rows, block, words))
    hidden = jax.random.normal(jax.random.key(0), (rows, block, config["body"]["features"]), config["dtype"])
    params = jax.jit(lambda: model.init(jax.random.key(0), ids[:1, :2], ids[:1, :2], jnp.ones((1, 2))))()["params"]
    given = {name: params[name] for name in ("input", "output") if name in params}

    def loss(params, hidden):
        key = {"dropout": jax.random.key(1)}
        weights = jnp.ones((rows, block))
        return model.apply({"params": params}, hidden, ids[:, 1:], weights, train=True, rngs=key, method="loss")[0]

    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(given, hidden).compile()
    return lambda: jax.block_until_ready(compiled(given, hidden))


def matrix_speed(dtype: str) -> float:
    """FLOP/s of a large matrix product on one device, the fastest of several runs."""
    size = 2048 if jax.default_backend() == "cpu" else 8192
    x = jax.random.normal(jax.random.key(0), (size, size), dtype)
    times = 2 if jax.default_backend() == "cpu" else 20
    chain = jax.jit(lambda x: jax.lax.fori_loop(0, times, lambda _, y: (x @ y) * (size**-0.5), x)).lower(x).compile()
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        jax.block_until_ready(chain(x))
        seconds.append(time.perf_counter() - start)
    return times * 2 * size**3 / min(seconds)


def torch_peers(config: dict, rows: int) -> dict:
    """The peer's updates by name, where torch is installed for this device and has the layers of the config."""
    on_gpu = jax.default_backend() == "gpu"
    if (config["input"]["name"], config["output"]["table"]["name"]) != ("adaptive", "own"):
        return {}
    try:
        import torch

        from benchmarks.torch_model import torch_update
    except ImportError:
        return {}
    if jax.default_backend() not in ("cpu", "gpu") or (on_gpu and not torch.cuda.is_available()):
        return {}
    words, block = config["data"]["vocabulary_size"], config["data"]["block"]
    ids = zipf(rows, block, words)
    how = {"device": "cuda" if on_gpu else "cpu", "bfloat16": config["dtype"] == "bfloat16"}
    peers = {}
    for name, compiled in (("torch", False), ("torch.compile", True))[: 1 + on_gpu]:
        update = torch_update(config, words, ids[:, :-1], ids[:, 1:], compiled=compiled, **how)
        try:
            update().item()
        except Exception as error:  # torch.compile meets many things it cannot do
            print(f"{name} left out: {str(error).strip().splitlines()[0][:120]}")
            continue
        peers[name] = lambda update=update: update().item()
    return peers


def our_parts(config: dict, rows: int) -> dict:
    """The config with a part changed or alone, by name: what the parts of an update cost."""
    parts = {"its output alone": our_output(config, rows)}
    none = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    parts["without dropout"] = our_update(config | {"body": config["body"] | none}, rows)[0]
    for path in PATHS[1:]:
        with contextlib.suppress(InputError, jax.errors.JaxRuntimeError):  # not on this device, or it has too little memory
            parts[f"attention {path}"] = our_update(config | {"body": config["body"] | {"attention": path}}, rows)[0]
    return parts


def profile(update, directory: str) -> list[tuple[str, float]]:
    """The operations of an update that take longest on the device, with their seconds; the whole profile is left in `directory`."""
    with jax.profiler.trace(directory, create_perfetto_trace=True):
        for _ in range(3):
            update()
    trace = max(Path(directory).rglob("perfetto_trace.json.gz"), key=lambda path: path.stat().st_mtime)
    events = json.loads(gzip.decompress(trace.read_bytes()))
    events = events["traceEvents"] if isinstance(events, dict) else events
    devices = {e["pid"] for e in events if e.get("name") == "process_name" and "/device:" in str(e.get("args"))}
    lines = {
        (e["pid"], e["tid"]) for e in events
        if e.get("name") == "thread_name" and e["pid"] in devices and "Stream" in str(e.get("args"))
    }  # fmt: skip
    seconds = Counter()
    for event in events:
        if event.get("ph") == "X" and (event.get("pid"), event.get("tid")) in lines:
            seconds[event["name"]] += event["dur"] / 3e6
    return seconds.most_common(25)


def measure(config: dict, rows: int, *, repeats: int, updates: int, parts: bool = False, profile_to: str | None = None) -> dict:
    """Device, versions and sizes; `rows`, one of each peer: seconds an update, tokens a second, ratio of its time to ours."""
    ours, memory = our_update(config, rows)
    peers = {"adaptive_jax": ours} | torch_peers(config, rows)
    if parts:
        peers |= our_parts(config, rows)
    measured = interleaved(peers, repeats, updates)
    block, words = config["data"]["block"], config["data"]["vocabulary_size"]
    tokens, speed = rows * block, matrix_speed(config["dtype"])
    work = tokens * plan(
        config | {"tokens_per_update": tokens, "tokens_per_device": tokens, "fsdp": 1}, words, 1
    )["flops_per_token"]["training"]  # fmt: skip
    body, device = config["body"], jax.devices()[0]
    whole = speed if device.platform == "cpu" else speed * jax.device_count()  # devices of a CPU share its cores
    return {
        "device": device.device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "model": f"{body['layers']} blocks of {body['features']}, vocabulary {words:,}, {rows} rows of {block}, {config['dtype']}",
        "matrix_flops_per_second": speed,
        "flops_per_update": work,
        "bytes": memory,
        "rows": [
            {
                "peer": name,
                "seconds": median,
                "fastest": least,
                "tokens_per_second": tokens / median,
                "utilisation": work / median / whole,
                "times_ours": median / measured["adaptive_jax"][0],
            }
            for name, (median, least) in measured.items()
        ],
        "longest": profile(ours, profile_to) if profile_to else [],
    }


def main(given: flags.FlagValues) -> None:
    """Prints a table of the peers and writes the JSON."""
    check_at_least(1, rows=given.rows, repeats=given.repeats, updates=given.updates)
    config = given.config.to_dict() if given.config else laptop()
    result = measure(
        config, given.rows, repeats=given.repeats, updates=given.updates, parts=given.parts, profile_to=given.profile
    )
    print(f"{result['device']}, python {result['python']}, jax {result['jax']}; {result['model']}; medians of {given.repeats}")
    print(
        f"a large product runs at {result['matrix_flops_per_second'] / 1e12:,.2f} TFLOP/s; an update is "
        f"{result['flops_per_update'] / 1e12:,.2f} TFLOP and needs {result['bytes'] / 2**30:,.2f} GiB"
    )
    print(f"{'peer':18} {'ms':>9} {'least':>9} {'tokens/s':>10} {'of the product':>14} {'time / ours':>12}")
    for row in result["rows"]:
        print(
            f"{row['peer']:18} {row['seconds'] * 1e3:9.1f} {row['fastest'] * 1e3:9.1f} {row['tokens_per_second']:10,.0f} "
            f"{row['utilisation']:14.1%} {row['times_ours']:12.2f}"
        )
    for name, seconds in result["longest"]:
        print(f"{seconds * 1e3:9.2f} ms  {name[:110]}")
    if given.json:
        Path(given.json).write_text(json.dumps(result, indent=2) + "\n")


def _define() -> flags.FlagValues:
    config_flags.DEFINE_config_file("config", None, "Config file and row, instead of the model for a laptop.")
    flags.DEFINE_integer("rows", 8, "Rows of a batch.")
    flags.DEFINE_integer("repeats", 9, "Timed runs of each peer, of several updates each.")
    flags.DEFINE_integer("updates", 3, "Updates in a timed run.")
    flags.DEFINE_bool("parts", False, "Also time the model without dropout, by every path of attention, and its output alone.")
    flags.DEFINE_string("profile", None, "Directory for a profile of three updates; the longest operations are listed.")
    flags.DEFINE_string("json", None, "File for the numbers.")
    return flags.FLAGS


if __name__ == "__main__":
    defined = _define()
    command.run(lambda: main(defined))
