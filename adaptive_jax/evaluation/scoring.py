"""Loss and perplexity of a model over a split, with as much context as asked for."""

import functools
import hashlib
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import track

from adaptive_jax.data.batches.batching import WindowBatch, windows
from adaptive_jax.data.corpora import load as corpora
from adaptive_jax.data.vocabulary.subwords import read_vocabulary
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.devices import accelerators, hosts, sharding
from adaptive_jax.errors import InputError
from adaptive_jax.model import LanguageModel, build
from adaptive_jax.plans.costs import parameter_shapes, plan
from adaptive_jax.training import optim
from adaptive_jax.training.metrics import perplexity
from adaptive_jax.training.state import shape_of_state
from adaptive_jax.workdir.checkpoints import Checkpoints, read_config, write_json


def score(
    model: LanguageModel,
    params,
    mesh: Mesh,
    ids: np.ndarray,
    eos: int,
    *,
    break_mode: str,
    kind: str,
    window: int,
    context: int,
    rows: int,
    progress=lambda batches, count: batches,
) -> np.ndarray:
    """Negative log-likelihood of every token of a split, in nats.

    Rows of `window` tokens are read; the first `context` of each are given and not scored, so with window 512 and context
    480 every token but the first few sees at least 480 before it, at 16 times the work of context 0 (Baevski & Auli 2019,
    section 5.3 and Table 5). With break_mode "complete" what is scored in a row are whole sentences, after as much context
    (section 4.3). Those of "complete_doc" and "eos" are scored as they are trained on, each seeing nothing else.

    Args:
        params: the model's parameters, laid on `mesh` as `sharding.parameter_specs` says.
        ids: `[tokens]`.
        break_mode, kind, window, context: see `windows`.
        rows: rows of a batch, rounded up to a multiple of the devices.
        progress: given the batches and their number, passes them on and shows how far it is.

    Returns:
        `[tokens]` float32, in the order of `ids`: every token is scored exactly once, and NaN stands for those that are of no
        example, the empty lines of "complete_doc". Where the model gives no number, the loss is infinite.

    Raises:
        InputError: see `windows`.
    """
    rows = -(-rows // mesh.size) * mesh.size
    count, batches = windows(ids, eos, break_mode=break_mode, kind=kind, window=window, context=context, rows=rows)
    scorer = _scorer(model, mesh, context)
    scored, before = np.full(len(ids), np.nan, np.float32), None

    def fetch(nll, batch, at):
        columns = batch.first[:, None] + np.arange(nll.shape[1])
        counts = np.take_along_axis(batch.weights, columns, axis=1) > 0
        scored[at] = np.nan_to_num(jax.device_get(nll)[counts], nan=np.inf, posinf=np.inf)

    for batch, at in progress(batches, count):
        nll = scorer(params, sharding.put_rows(mesh, batch))
        # Fetch a batch's numbers only once the next is under way.
        if before is not None:
            fetch(*before)
        before = nll, batch, at
    fetch(*before)
    return scored


def evaluate(
    workdir: Path,
    *,
    split: str,
    window: int,
    context: int,
    checkpoint: str,
    data_path: str | None,
    break_mode: str | None = None,
) -> dict:
    """Scores a split with a trained model, prints the result and writes it to workdir/eval/.

    Args:
        workdir: of a run of train.py.
        split: "train", "validation" or "test".
        window, context: see `score`; window 0 is the block the model was trained with.
        checkpoint: "best" by validation, "latest", or a step.
        data_path: a directory with the split as .txt, .txt.xz or .txt.gz, instead of the corpus in the run's config.
        break_mode: how the split is broken, instead of as the run's config says.

    Returns:
        `summary(...)`, with `split`, `step` and `settings`: the config, break_mode, window, context and checkpoint.

    Raises:
        InputError: no run or checkpoint, a corpus that is missing, and see `windows`.
    """
    config = read_config(workdir)
    data = _data(workdir, config, split, data_path)
    window = window or data["block"]
    break_mode = break_mode or data["break_mode"]
    vocabulary = read_vocabulary(workdir / "vocabulary.txt")
    ids = corpora.from_config(data, vocabulary=vocabulary, splits=(split,)).ids[split]

    accelerators.keep_programs(Path(data["cache"]).expanduser())
    mesh = sharding.device_mesh(_cut(config, len(vocabulary)))
    model = build(config, vocabulary)
    checkpoints = Checkpoints(workdir, read_only=True)
    step = checkpoints.step(checkpoint)
    params = checkpoints.restore(step, shape_of_state(model, optim.from_config(config["optimizer"])[0], mesh)).params
    checkpoints.close()

    rows = max(1, config["tokens_per_device"] // window) * mesh.size
    nll = score(model, params, mesh, ids, vocabulary.eos, break_mode=break_mode, kind=config["data"]["rows"], window=window,
                context=context, rows=rows, progress=_bar)  # fmt: skip
    result = summary(nll, ids, vocabulary) | {
        "split": split,
        "step": step,
        "settings": {"break_mode": break_mode, "window": window, "context": context, "checkpoint": checkpoint,
                     "data_path": data_path, "config": config},
    }  # fmt: skip
    path = _result_file(workdir, result)
    if hosts.first():
        write_json(path, result)
    hosts.say(
        f"{split}: perplexity {result['perplexity']:.2f} ({result['nll']:.4f} nats a word) over {result['words']:,} words, "
        f"unigram perplexity {result['unigram_perplexity']:.2f}; step {step:,}, break_mode {break_mode}, "
        f"window {window}, context {context}\n{path}"
    )
    return result


def _result_file(workdir, result):
    """Scores of other text, and of text broken otherwise, stand beside those of the run's own, not in their place."""
    settings = result["settings"]
    name = f"{result['split']}-{settings['window']}-{settings['context']}-{result['step']}"
    if settings["break_mode"] != settings["config"]["data"]["break_mode"]:
        name += f"-{settings['break_mode']}"
    if settings["data_path"] is not None:
        name += "-" + hashlib.sha256(str(Path(settings["data_path"]).resolve()).encode()).hexdigest()[:8]
    return workdir / "eval" / f"{name}.json"


def _cut(config, words):
    """Over how many devices parameters are cut: as the config says or, left open, as few as one batch of an update would need."""
    devices, block = jax.device_count(), config["data"]["block"]
    if config["fsdp"]:
        return math.gcd(config["fsdp"], devices)
    batch = devices * (config["tokens_per_device"] // block) * block
    return plan(config | {"tokens_per_update": batch}, words, devices, accelerators.memory())["fsdp"]


def _data(workdir, config, split, data_path):
    """The group `data` of a run's config, with another path if one is given."""
    if missing := {"break_mode", "rows"} - config["data"].keys():
        raise InputError(f"{workdir}/config.json has no data.{min(missing)}, as of an older version: add it, or train anew")
    data = config["data"] | ({"path": data_path} if data_path is not None else {})
    if data["corpus"] == "text_files" and not data["path"]:
        raise InputError(f"{workdir} does not know where its text lies: give --data_path=DIR, a directory with {split}.txt")
    return data


def summary(nll: np.ndarray, ids: np.ndarray, vocabulary: Vocabulary) -> dict:
    """Loss and perplexity per word of the text, whatever the tokens: a word's probability is the product of its units'.

    Args:
        nll: `[tokens]`, nats of each, NaN for those that do not count.
        ids: `[tokens]`.

    Returns:
        Of the tokens that count, `nll` (nats a word), `perplexity`, `words`, `tokens` and `unigram_perplexity`, the
        perplexity by the words' counts alone.
    """
    counts = ~np.isnan(nll)
    nll, ids = nll[counts], ids[:][counts]
    words = vocabulary.count_words(ids)
    mean = float(np.sum(nll, dtype=np.float64) / words)
    return {
        "nll": mean,
        "perplexity": perplexity(mean),
        "words": words,
        "tokens": len(nll),
        "unigram_perplexity": perplexity(vocabulary.unigram_nll(ids)),
    }


@functools.lru_cache(maxsize=8)
def _scorer(model, mesh, context):
    def local(params, batch: WindowBatch):
        variables = {"params": gather(params)}
        columns = batch.first[:, None] + jnp.arange(batch.inputs.shape[1] - context)[None]
        hidden = local_model.apply(variables, batch.inputs, batch.segments, method="hidden")
        hidden = jnp.take_along_axis(hidden, columns[..., None], axis=1)
        return local_model.apply(variables, hidden, jnp.take_along_axis(batch.targets, columns, axis=1), method="nll")

    shapes = parameter_shapes(model)
    local_model, gather = sharding.gathering(model, shapes, mesh)
    specs, rows = sharding.parameter_specs(shapes, mesh), sharding.rows_along(0)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(specs, rows), out_specs=rows, check_vma=False)
    return jax.jit(mapped, out_shardings=sharding.whole(mesh))  # whole, so that every host can read all of it


def _bar(batches, count):
    console = Console(stderr=True)
    shown = console.is_terminal and hosts.first()
    with hosts.stopping() as stop:
        for number, batch in enumerate(track(batches, description="scoring", total=count, console=console, disable=not shown)):
            if stop(number):
                raise KeyboardInterrupt  # on all hosts
            yield batch
