"""Words a second of whole models, beside their peers in the same run.

    python -m benchmarks.throughput [--repeats=9] [--json=FILE]
    python -m benchmarks.throughput --config=configs/wikitext103.py:adp --rows=32
        "--peers=adaptive_jax,its output alone,without dropout" [--profile=DIR]
    python -m benchmarks.throughput --of=evaluate --config=configs/wikitext2.py:gcnn_small
        [--config.batches.sequence_length=256 --context=192]
    python -m benchmarks.throughput --of=generate --workdir=runs/quickstart [--words=60]

- `update`: loss, gradients, clipping and optimizer, against the same model in PyTorch. The default
  is a model for a laptop: `configs/wikitext2.py:adp` without dropout, which has 6 blocks of width
  256, adaptive input and adaptive softmax over 33,278 words; 8 rows of 256 Zipf-distributed
  tokens, float32. torch, where it is installed, takes part if it has the layers of the config,
  which is true of `adp`: adaptive input and adaptive softmax with tables of their own. It uses the
  same device and dtype, and on a GPU it runs both as it is and by torch.compile. FLOPs are those
  of `adaptive_jax.planning.plan`; utilisation is relative to the speed of a large matrix product,
  measured in the same run.
- `evaluate`, `generate`: see `benchmarks.reading_and_writing`.

The peers take turns, so that a busy machine slows all of them alike; times are medians.
"""

import gzip
import json
import math
import os
import sys
from collections import Counter
from pathlib import Path

# torch needs memory of the same GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from adaptive_jax.config import commands
from adaptive_jax.config import flags as config_flags
from adaptive_jax.config.keys import resolve
from adaptive_jax.data.vocabulary.lexicon import lexicon
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError, check_at_least
from adaptive_jax.model.language_model import build, init_params
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.numerics.products import product
from adaptive_jax.optimizers import optim
from adaptive_jax.parallel import sharding
from adaptive_jax.planning.plan import make_plan
from adaptive_jax.training.sparse import parts_of
from adaptive_jax.training.state import initial_state, shape_of_state
from adaptive_jax.training.update import make_update
from benchmarks.reading_and_writing import evaluate_peers, generate_peers
from benchmarks.timing import exact_products, first_line, machine, timed, torch_device, write_json
from configs import wikitext2

OURS, OUTPUT, NO_DROPOUT = "adaptive_jax", "its output alone", "without dropout"
LONGEST = 40  # operations of a profile that are listed
# Input, body, output, table, optimizer and positions of torch's model
TORCH_HAS = ["adaptive", "transformer", "adaptive", "own", "nag", "sinusoidal"]


def without_dropout(config: dict) -> dict:
    """The config with every rate of dropout 0."""
    return {
        key: without_dropout(value) if isinstance(value, dict) else 0.0 if "drop" in key else value
        for key, value in config.items()
    }


def laptop() -> dict:
    """The config of the model for a laptop."""
    return without_dropout(resolve(wikitext2.get_config("adp")))


def zipf(config: dict, *shape: int) -> np.ndarray:
    """Ids int32 of this shape; the word of rank r is as frequent as 1/r."""
    words = config["data"]["vocabulary_size"]
    shares = 1 / np.arange(1, words + 1)
    ids = np.random.default_rng(0).choice(words, shape, p=shares / shares.sum())
    return ids.astype(np.int32)


def numbered(words: int) -> Vocabulary:
    """A vocabulary of so many words, which are spelt as numbers."""
    return Vocabulary(tuple(map(str, range(words))), np.ones(words, np.int64))


def model_and_lexicon(config: dict, vocabulary: Vocabulary | None = None):
    """The model of a config, and the lexicon of the words; None: as many, spelt as numbers."""
    words = config["data"]["vocabulary_size"]
    model = build(config, words)
    return model, lexicon(vocabulary or numbered(words), model.lexicon_spec())


def our_update(
    config: dict,
    rows: int,
    vocabulary: Vocabulary | None = None,
    text: np.ndarray | None = None,
    microbatches: int = 1,
):
    """A function that makes an update of microbatches of `rows` rows and returns its loss; and the
    bytes it needs as the compiler counts them.

    text: ids that are read; None: random words.
    """
    (model, words), mesh = model_and_lexicon(config, vocabulary), sharding.device_mesh()
    optimizer = optim.from_config(config)
    shape = microbatches, rows, config["batches"]["sequence_length"] + 1
    ids = zipf(config, *shape) if text is None else text[: math.prod(shape)].reshape(shape)
    inputs = ids[..., :-1]
    row_ids = np.arange(microbatches * rows, dtype=np.int32).reshape(microbatches, rows)
    batch = Batch(inputs, ids[..., 1:], np.ones(inputs.shape, np.float32), row_ids)
    words = jax.device_put(words, sharding.replicated(mesh))
    arguments = words, sharding.put_batch(mesh, batch, axis=1)
    layout = shape_of_state(model, optimizer, mesh)
    state = [initial_state(model, optimizer, 0, layout)]
    update = make_update(model, optimizer, mesh, 0, layout)
    with exact_products(config["dtype"]):
        compiled = update.lower(state[0], *arguments).compile()

    def run():
        state[0], metrics = compiled(state[0], *arguments)
        return float(metrics["loss"])

    memory = compiled.memory_analysis()
    return run, memory.temp_size_in_bytes + memory.argument_size_in_bytes


def our_output(config: dict, rows: int):
    """A function that computes loss and gradients of the output layer alone, for as many tokens."""
    model, words = model_and_lexicon(config)
    targets = jnp.asarray(zipf(config, rows, config["batches"]["sequence_length"]))
    hidden = jax.random.normal(
        jax.random.key(0), (*targets.shape, config["body"]["features"]), config["dtype"]
    )
    params = jax.jit(lambda: init_params(model, 0))()
    arguments = {name: params[name] for name in ("input", "output") if name in params}, hidden

    def loss(params, hidden):
        variables, rngs = {"params": params, "lexicon": words}, {"dropout": jax.random.key(1)}

        def of_output(model):
            return model.output.loss(hidden, targets, jnp.ones(targets.shape), train=True).total

        return model.apply(variables, method=of_output, rngs=rngs)

    with exact_products(config["dtype"]):
        compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arguments).compile()
    return lambda: jax.block_until_ready(compiled(*arguments))


def matrix_speed(dtype: str) -> float:
    """FLOP/s of a large matrix product on one device, the fastest of several runs."""
    size, times = (2048, 2) if jax.default_backend() == "cpu" else (8192, 20)
    x = jax.random.normal(jax.random.key(0), (size, size), dtype)

    @jax.jit
    def chain(x):
        return jax.lax.fori_loop(0, times, lambda _, y: product(x, y) * size**-0.5, x)

    with exact_products(dtype):
        [row] = timed({"product": lambda: jax.block_until_ready(chain(x))}, repeats=3)
    return times * 2 * size**3 / row["fastest"]


def torch_peers(config: dict, rows: int, names=()) -> dict:
    """torch's updates by name; none without torch for this device, or if torch lacks the
    config's layers. names: (): all.
    """
    device, parts = torch_device(), [config[part]["name"] for part in ("input", "body", "output")]
    parts += [config["output"]["table"]["name"], config["optimizer"]["name"]]
    parts.append(config["body"].get("positions"))
    if device is None or parts != TORCH_HAS:
        return {}
    peers = {}
    for name in ("torch", "torch.compile")[: 1 + (device == "cuda")]:
        if names and name not in names:
            continue
        from benchmarks.torch_model import torch_update

        ids = zipf(config, rows, config["batches"]["sequence_length"] + 1)
        update = torch_update(config, ids, device, compiled=name == "torch.compile")
        try:
            update()
            peers[name] = update
        except Exception as error:  # torch.compile fails in many ways
            print(f"{name} left out: {first_line(error)}")
    return peers


def profile(update, directory: str) -> list[tuple[str, float]]:
    """Writes a profile to `directory`; returns the operations of an update that take longest on
    the device, with their seconds.
    """
    with jax.profiler.trace(directory, create_perfetto_trace=True):
        for _ in range(3):
            update()
    traces = Path(directory).rglob("perfetto_trace.json.gz")
    trace = max(traces, key=lambda path: path.stat().st_mtime)
    events = json.loads(gzip.decompress(trace.read_bytes()))
    events = events["traceEvents"] if isinstance(events, dict) else events

    def named(kind, text):
        return [e for e in events if e.get("name") == kind and text in str(e.get("args"))]

    devices = {event["pid"] for event in named("process_name", "/device:")}
    streams = {(event["pid"], event["tid"]) for event in named("thread_name", "Stream")}
    seconds = Counter()
    for event in events:
        stream = event.get("pid"), event.get("tid")
        if event.get("ph") == "X" and stream[0] in devices and stream in streams:
            seconds[event["name"]] += event["dur"] / 3e6
    return seconds.most_common(LONGEST)


def update_peers(config: dict, settings) -> tuple[dict, int | None]:
    """Functions by name that make an update, and the bytes that ours needs."""
    rows, wanted, peers, memory = settings.rows, settings.peers, {}, None
    if not wanted or OURS in wanted:
        peers[OURS], memory = our_update(config, rows)
    peers |= torch_peers(config, rows, wanted)
    if OUTPUT in wanted:
        peers[OUTPUT] = our_output(config, rows)
    if NO_DROPOUT in wanted:
        peers[NO_DROPOUT] = our_update(without_dropout(config), rows)[0]
    if not peers:
        raise InputError(
            f"none of --peers={','.join(wanted)} runs here: use {OURS}, torch, torch.compile,"
            f" {OUTPUT!r} or {NO_DROPOUT!r}"
        )
    return peers, memory


def flops(config: dict, rows: int) -> float:
    """FLOPs of an update of so many rows, as the plan counts them."""
    tokens, words = rows * config["batches"]["sequence_length"], config["data"]["vocabulary_size"]
    sizes = {"tokens_per_update": tokens, "tokens_per_device": tokens, "fsdp": 1}
    return tokens * make_plan(config | sizes, parts_of(config | sizes, words), 1).flops_per_token


def main(settings) -> None:
    """Prints a table of the peers and writes the JSON; then, if asked, the operations of our
    update that take longest.
    """
    counts = {name: getattr(settings, name) for name in COUNTS}
    check_at_least(1, **counts)
    result = {"of": settings.of, "machine": machine(), "command": sys.argv[1:]}
    runs, speed, about = settings.updates, None, ""
    if settings.of == "generate":
        if not settings.workdir:
            raise InputError("--of=generate needs --workdir=RUN, a run that train.py made")
        peers, words, runs = generate_peers(settings.workdir, settings.words), settings.words, 1
    else:
        config = config_flags.config()[0] if config_flags.has_config() else laptop()
        rows = settings.rows
        length = config["batches"]["sequence_length"]
        if settings.of == "evaluate":
            words, runs = settings.tokens, 1
            ids = zipf(config, words)
            peers = evaluate_peers(config, settings.context, words, ids)
        else:
            words, work = rows * length, flops(config, rows)
            peers, memory = update_peers(config, settings)
            speed = matrix_speed(config["dtype"])
            result |= {"flops_per_update": work, "matrix_flops_per_second": speed, "bytes": memory}
            if jax.default_backend() != "cpu":  # devices of a CPU share its cores
                speed *= jax.device_count()
            about = f"; an update takes {work / 1e12:,.2f} TFLOP" + (
                f" and {memory / 1e9:,.2f} GB" if memory else ""
            )
    result["rows"] = timed(peers, settings.repeats, runs)
    for row in result["rows"]:
        row["words_per_second"] = words / row["seconds"]
        row["utilisation"] = speed and work / row["seconds"] / speed
        row["times_first"] = row["seconds"] / result["rows"][0]["seconds"]
    print(f"{result['machine']}; median of {settings.repeats}{about}")
    if speed:
        print(f"a large product runs at {speed / 1e12:,.2f} TFLOP/s")
    print(f"{'peer':18} {'ms':>9} {'least':>9} {'words/s':>10} {'of product':>10} {'/ first':>8}")
    for row in result["rows"]:
        share = f"{row['utilisation']:.1%}" if speed else ""
        print(
            f"{row['peer']:18} {row['seconds'] * 1e3:9.1f} {row['fastest'] * 1e3:9.1f}"
            f" {row['words_per_second']:10,.0f} {share:>10} {row['times_first']:8.2f}"
        )
    write_json(settings.json, result)  # now: a profile can fail, and take what was measured with it
    if settings.profile and OURS in peers:
        sys.stdout.flush()
        result["longest"] = profile(peers[OURS], settings.profile)
        for name, seconds in result["longest"]:
            print(f"{seconds * 1e3:9.2f} ms  {name[:110]}")
        write_json(settings.json, result)


COUNTS = {  # flags of whole numbers: default and meaning
    "rows": (8, "Rows of an update."),
    "repeats": (9, "Timed runs of each peer."),
    "updates": (3, "Updates in a timed run."),
    "tokens": (16_384, "Tokens of the text that is scored."),
    "words": (60, "Words to write."),
}

if __name__ == "__main__":
    config_flags.define("Config file and row, instead of the model for a laptop")
    flags.DEFINE_enum("of", "update", ["update", "evaluate", "generate"], "What to measure.")
    for name, (default, meaning) in COUNTS.items():
        flags.DEFINE_integer(name, default, meaning)
    flags.DEFINE_integer("context", 0, "Tokens of a window that are given and not scored.")
    flags.DEFINE_string("workdir", None, "The run that writes.")
    known = f"{OURS}, torch, torch.compile, {OUTPUT!r} and {NO_DROPOUT!r}"
    flags.DEFINE_list("peers", [], f"Only these of {known}; default: the first three.")
    longest = "Directory for a profile of three updates; the longest operations are listed."
    flags.DEFINE_string("profile", None, longest)
    flags.DEFINE_string("json", None, "File for the numbers.")
    commands.run(lambda: main(flags.FLAGS))
