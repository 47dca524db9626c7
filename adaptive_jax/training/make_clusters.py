r"""Puts the words of a vocabulary into clusters, for config.output.clusters; docs/words.md says
more.

    python -m adaptive_jax clusters --config=configs/penn_treebank.py:hsm_kmeans_glove \
        --method=kmeans --embeddings=glove.txt
    python -m adaptive_jax clusters --vocabulary=runs/awd_sm --method=mixture \
        --embeddings=runs/awd_sm --output=mixture.txt
"""

from typing import Annotated, NamedTuple

import numpy as np
from absl import flags

from adaptive_jax.config import commands
from adaptive_jax.config import flags as config_flags
from adaptive_jax.config.options import Option, PositiveInt, check
from adaptive_jax.data.vocabulary.clustering import (
    METHODS,
    by_label,
    nearest_with_vector,
    run_method,
)
from adaptive_jax.data.vocabulary.clusters import Header, write_clusters
from adaptive_jax.data.vocabulary.on_disk import read_vocabulary
from adaptive_jax.data.vocabulary.vectors import read_vectors
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.files import path_of
from adaptive_jax.numerics.bands import band_sizes
from adaptive_jax.planning.cutoffs import Workload, equal_products

WIDTH = 400  # of band 0, from which the bands narrow (Apostoae 2019, Table 4.1)


STOPPED = "stopped: nothing was written"


class Clustering(NamedTuple):
    """Clusters to make.

    Attributes:
        method: How words are put into clusters.
        embeddings: Workdir of a run, or a text file of vectors: plain, .gz, .xz, .bz2 or .zip.
        clusters: Their number.
        factor: frequency, autoencoder: widths narrow from 400 by this factor; words times width are
            equal.
        cutoffs: frequency, autoencoder: where clusters begin, instead of equal words times width.
        seed: Of k-means or mixture.
    """

    method: Annotated[str, Option(among=METHODS)] = "frequency"
    embeddings: str = ""
    clusters: PositiveInt = 3
    factor: PositiveInt = 3
    cutoffs: tuple[int, ...] = ()
    seed: Annotated[int, Option(within="[0, 4294967296)")] = 0


class Files(NamedTuple):
    """The other flags of the command.

    Attributes:
        vocabulary: vocabulary.txt, or the workdir of a run; default: the words of --config's
            corpus.
        output: The file to write; default: output.clusters of --config.
    """

    vocabulary: str = ""
    output: str = ""


def make_clusters(
    vocabulary: Vocabulary, options: Clustering
) -> tuple[Header, np.ndarray, list[str]]:
    """A header, the word ids in the order of the clusters, and lines that say what was done.

    A word without a vector goes where the word next to it in frequency goes.

    Raises:
        InputError: settings out of range, embeddings that cannot be read, or words that are not in
            order of frequency, as those of a run with clusters.
    """
    check(options)
    method = METHODS[options.method]
    draws = method.needs_vectors and not method.cuts
    _check_fit(options, draws, vocabulary)
    lines, ids, counts = [], np.arange(len(vocabulary)), vocabulary.counts
    if method.cuts:
        workload = Workload(WIDTH, options.factor)
        cutoffs = options.cutoffs or equal_products(len(ids), options.clusters, workload)
        sizes = band_sizes(len(ids), cutoffs)
    if method.needs_vectors:
        with_vectors, vectors, lines = _embeddings(vocabulary, options.embeddings)
        clusters = run_method(
            options.method, vectors, counts[with_vectors], options.clusters, options.seed
        )
        clusters = clusters[nearest_with_vector(with_vectors, len(ids))]
        if method.cuts:
            ids = np.argsort(-clusters, kind="stable")
        else:
            ids, sizes = by_label(clusters, counts)
    shares = np.add.reduceat(counts[ids], np.cumsum([0, *sizes[:-1]])) / max(counts.sum(), 1)
    text = ", ".join(
        f"{size:,} words with {share:.1%} of the tokens"
        for size, share in zip(sizes, shares, strict=True)
    )
    lines.append(f"{options.method}{f', seed {options.seed}' if draws else ''}: {text}")
    header = Header(options.method, options.seed, vocabulary.digest, tuple(sizes))
    return header, ids, lines


def _check_fit(options, draws, vocabulary):
    """Checks that options fit each other and the vocabulary. draws: the method reads the seed."""
    method, defaults = METHODS[options.method], Clustering._field_defaults
    if options.clusters > len(vocabulary):
        raise InputError(
            f"--clusters={options.clusters} must be at most the {len(vocabulary):,} words of the"
            " vocabulary"
        )
    fits = dict.fromkeys(("cutoffs", "factor"), method.cuts)
    fits |= {"embeddings": method.needs_vectors, "seed": draws}
    for flag in fits:
        if not fits[flag] and getattr(options, flag) != defaults[flag]:
            raise InputError(f"--{flag} does not fit --method={options.method}: leave it out")
    for flag in ("clusters", "factor"):
        value = getattr(options, flag)
        if options.cutoffs and value != defaults[flag]:
            raise InputError(f"--{flag}={value} has no effect with --cutoffs: leave one out")
    if not np.array_equal(vocabulary.ranks, np.arange(len(vocabulary))):
        raise InputError(
            f"the {len(vocabulary):,} words are not in order of frequency: pass --config=FILE for"
            " those of its corpus, or --vocabulary= of a run without clusters"
        )


def _embeddings(vocabulary, source):
    """Ids of the words that have a vector, the vectors, and lines about them."""
    if not source:
        raise InputError(
            "--embeddings is missing: use the workdir of a run, or a text file of vectors such as"
            " GloVe's"
        )
    path, lower = path_of(source), 0
    if path.is_dir():
        ids, vectors = of_run(path, vocabulary)
    else:
        ids, vectors, lower = read_vectors(path, vocabulary.words)
    counts, total = vocabulary.counts, len(vocabulary)
    lines = [f"{source}: vectors of width {vectors.shape[1]} for {len(ids):,} of {total:,} words"]
    lines[0] += f", {lower:,} of them in lower case only" if lower else ""
    missing = np.setdiff1d(np.arange(total), ids)
    if len(missing):
        share = counts[missing].sum() / max(counts.sum(), 1)
        first = " ".join(vocabulary.words[i] for i in missing[:5])
        lines.append(
            f"{len(missing):,} words have none ({len(missing) / total:.1%}, {share:.1%} of the"
            f" tokens: {first} …); each goes where the word next to it in frequency goes"
        )
    return ids, vectors, lines


def of_run(workdir, vocabulary):
    """Ids of the words that a run knows, and their vectors: rows of its input's assembled table."""
    import jax
    import jax.numpy as jnp

    from adaptive_jax.runs.run import Run

    run = Run.open(workdir)
    variables = {"params": run.params, "lexicon": run.lexicon}

    def table(model):
        return jnp.concatenate([band.vectors() for band in model.input.bands()])

    apply = jax.jit(lambda variables: run.model.apply(variables, method=table))
    vectors = np.asarray(apply(variables), np.float32)
    rows = dict(zip(run.vocabulary.words, range(len(vectors)), strict=True))
    ids = np.array([i for i, word in enumerate(vocabulary.words) if word in rows])
    if not len(ids):
        raise InputError(
            f"{workdir} has none of the {len(vocabulary):,} words: use a run on the same words"
        )
    return ids, vectors[[rows[vocabulary.words[i]] for i in ids]]


def _vocabulary(path):
    """The words of a file or a run, or of the corpus of --config."""
    if path:
        path = path_of(path)
        return read_vocabulary(path / "vocabulary.txt" if path.is_dir() else path)
    if not config_flags.has_config():
        raise InputError(
            "--vocabulary is missing: use a vocabulary.txt or the workdir of a run, or"
            " --config=FILE for its corpus"
        )
    from adaptive_jax.data.corpora.load import load
    from adaptive_jax.training.own_text import chooses_words

    config, _ = config_flags.config()
    data = config["data"]
    if config["own_text"] and chooses_words(data):
        raise InputError(
            "configs/own_text.py chooses its words when training begins: pass --vocabulary=RUN of a"
            " run on this text, or --config.data.threshold=N for both commands"
        )
    return load(data, splits=()).vocabulary


def main() -> None:
    """Writes the clusters that the flags ask for."""
    values = flags.FLAGS
    output = values.output
    if not output and config_flags.has_config():
        output = config_flags.config()[0]["output"]["clusters"]
    if not output:
        raise InputError("--output is missing: pass --output=FILE")
    if config_flags.has_config() and values.vocabulary and values.output:
        raise InputError(
            "--config has no effect with --vocabulary and --output: leave it, or one of these, out"
        )
    path = path_of(output)
    if path.exists():
        raise InputError(f"--output={output} already exists: use another file, or remove it")
    options = config_flags.options(Clustering)
    vocabulary = _vocabulary(values.vocabulary)
    header, ids, lines = make_clusters(vocabulary, options)
    write_clusters(path, header, [vocabulary.words[i] for i in ids])
    print("\n".join([*lines, f"written to {output}: train with --config.output.clusters={output}"]))


def define_flags() -> None:
    """Defines the flags of the command."""
    config_flags.define()
    config_flags.define_options(Clustering, Files, commands.Allow)
