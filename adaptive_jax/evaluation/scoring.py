"""Loss and perplexity of a model over a split, with as much context as asked for."""

import functools
import hashlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from rich.console import Console
from rich.progress import track

from adaptive_jax import optim, sharding
from adaptive_jax.checkpoints import Checkpoints, read_config, write_json
from adaptive_jax.data import corpora
from adaptive_jax.data.batching import WindowBatch, windows
from adaptive_jax.data.subwords import read_vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.metrics import perplexity
from adaptive_jax.model import LanguageModel, build
from adaptive_jax.state import shape_of_state


def score(
    model: LanguageModel,
    params,
    mesh: Mesh,
    ids: np.ndarray,
    eos: int,
    *,
    window: int,
    context: int,
    rows: int,
    progress=lambda batches, count: batches,
) -> np.ndarray:
    """Negative log-likelihood of every token of a split, in nats.

    Rows of `window` tokens are read; the first `context` of each are given and not scored, so with window 512 and context
    480 every token but the first few sees at least 480 before it, at 16 times the work of context 0 (Baevski & Auli 2019,
    section 5.3 and Table 5).

    Args:
        params: the model's parameters, whole on every device of `mesh`.
        ids: `[tokens]`.
        rows: rows of a batch, rounded up to a multiple of the devices.
        progress: given the batches and their number, passes them on and shows how far it is.

    Returns:
        `[tokens]` float32, in the order of `ids`: every token is scored exactly once.

    Raises:
        InputError: window <= context, or an empty split.
    """
    if not 0 <= context < window:
        raise InputError(f"window={window} must be greater than context={context}, and context 0 or more")
    rows = -(-rows // mesh.size) * mesh.size
    stride = window - context
    scorer = _scorer(model, mesh, stride)
    scored, before = [], None
    batches = windows(ids, eos, window, context, rows)
    for batch in progress(batches, -(-len(ids) // (stride * rows))):
        nll = scorer(params, sharding.put_rows(mesh, batch))
        # Fetch a batch's numbers only once the next is under way.
        if before is not None:
            scored.append(_scored(*before))
        before = nll, batch, stride
    return np.concatenate([*scored, _scored(*before)])


def evaluate(workdir: Path, *, split: str, window: int, context: int, checkpoint: str, data_path: str | None) -> dict:
    """Scores a split with a trained model, prints the result and writes it to workdir/eval/.

    Args:
        workdir: of a run of train.py.
        split: "train", "validation" or "test".
        window, context: see `score`; window 0 is the block the model was trained with.
        checkpoint: "best" by validation, "latest", or a step.
        data_path: a directory with the split as .txt, .txt.xz or .txt.gz, instead of the corpus in the run's config.

    Returns:
        `summary(...)`, with `split`, `step` and `settings`: the config, window, context and checkpoint that made it.

    Raises:
        InputError: no run or checkpoint, a corpus that is missing, window <= context.
    """
    config = read_config(workdir)
    window = window or config["data"]["block"]
    vocabulary = read_vocabulary(workdir / "vocabulary.txt")
    data = config["data"] | ({"path": data_path} if data_path is not None else {})
    if data["corpus"] == "text_files" and not data["path"]:
        raise InputError(f"{workdir} does not know where its text lies: give --data_path=DIR, a directory with {split}.txt")
    ids = corpora.from_config(data, vocabulary=vocabulary, splits=(split,)).ids[split]

    mesh = sharding.data_mesh()
    model = build(config, vocabulary)
    checkpoints = Checkpoints(workdir, read_only=True)
    step = checkpoints.step(checkpoint)
    params = checkpoints.restore(step, shape_of_state(model, optim.from_config(config["optimizer"])[0], mesh)).params
    checkpoints.close()

    rows = max(1, config["tokens_per_device"] // window) * mesh.size
    nll = score(model, params, mesh, ids, vocabulary.eos, window=window, context=context, rows=rows, progress=_bar)
    result = summary(nll, vocabulary.count_words(ids), vocabulary.unigram_nll(ids)) | {
        "split": split,
        "step": step,
        "settings": {
            "window": window, "context": context, "checkpoint": checkpoint, "data_path": data_path, "config": config,
        },
    }  # fmt: skip
    # Scores of other text are kept beside those of the run's own, not in their place.
    other = "" if data_path is None else "-" + hashlib.sha256(str(Path(data_path).resolve()).encode()).hexdigest()[:8]
    path = workdir / "eval" / f"{split}-{window}-{context}-{step}{other}.json"
    write_json(path, result)
    print(
        f"{split}: perplexity {result['perplexity']:.2f} ({result['nll']:.4f} nats a word) over {result['words']:,} words, "
        f"unigram perplexity {result['unigram_perplexity']:.2f}; step {step:,}, window {window}, context {context}\n{path}",
        flush=True,
    )
    return result


def summary(nll: np.ndarray, words: int, unigram_nll: float) -> dict:
    """Loss and perplexity per word of the text, whatever the tokens: a word's probability is the product of its units'.

    Args:
        nll: `[tokens]`, nats of each.
        words: how many words these tokens spell.
        unigram_nll: nats a word of the same words by their counts alone.

    Returns:
        `nll` (nats a word), `perplexity`, `words`, `tokens` and `unigram_perplexity`.
    """
    mean = float(np.sum(nll, dtype=np.float64) / words)
    return {
        "nll": mean,
        "perplexity": perplexity(mean),
        "words": words,
        "tokens": len(nll),
        "unigram_perplexity": perplexity(unigram_nll),
    }


@functools.lru_cache(maxsize=8)
def _scorer(model, mesh, stride):
    def local(params, batch: WindowBatch):
        variables = {"params": params}
        columns = batch.first[:, None] + jnp.arange(stride)[None]
        hidden = model.apply(variables, batch.inputs, method="hidden")
        hidden = jnp.take_along_axis(hidden, columns[..., None], axis=1)
        return model.apply(variables, hidden, jnp.take_along_axis(batch.targets, columns, axis=1), method="nll")

    rows = PartitionSpec(sharding.DATA)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(PartitionSpec(), rows), out_specs=rows, check_vma=False))


def _bar(batches, count):
    console = Console(stderr=True)
    return track(batches, description="scoring", total=count, console=console, disable=not console.is_terminal)


def _scored(nll, batch, stride):
    columns = batch.first[:, None] + np.arange(stride)
    counts = np.take_along_axis(batch.weights, columns, axis=1) > 0
    return np.asarray(jax.device_get(nll))[counts]
