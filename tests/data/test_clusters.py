"""Clusters from frequency and from vectors: files of vectors, the methods, the words without a
vector, and the command.
"""

import bz2
import gzip
import importlib.util
import io
import lzma
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from adaptive_jax.data.vocabulary import clustering
from adaptive_jax.data.vocabulary.clusters import in_order, read_header
from adaptive_jax.data.vocabulary.vectors import read_vectors
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.planning.cutoffs import Workload, equal_products
from adaptive_jax.training.make_clusters import Clustering, make_clusters
from tests import refuses

GLOVE = Path(__file__).parents[3] / "shared" / "data" / "glove" / "glove.6B.50d.cut.txt.xz"
WORDS = Vocabulary.build(
    {"<eos>": 99, "The": 98, "the": 97, "cat": 50}
    | {f"w{n:03d}": 300 // (n + 7) for n in range(236)}
)
needs_sklearn = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None, reason="scikit-learn is optional"
)


def blobs(count=240, width=12):
    """Vectors around three far points, ten times apart, and which point each is near."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 3, count)
    return (10 * np.eye(3, width)[labels] + random.normal(0, 0.3, (count, width))).astype(
        np.float32
    ), labels


@pytest.mark.parametrize(
    "name, write",
    [
        ("v.txt", lambda path, text: path.write_bytes(text)),
        ("v.txt.gz", lambda path, text: path.write_bytes(gzip.compress(text))),
        ("v.txt.xz", lambda path, text: path.write_bytes(lzma.compress(text))),
        ("v.txt.bz2", lambda path, text: path.write_bytes(bz2.compress(text))),
        ("v.zip", lambda path, text: zipfile.ZipFile(path, "w").writestr("v.txt", text)),
    ],
)
def test_files_of_vectors(name, write, tmp_path):
    """Plain or packed, with word2vec's header or not: exact words first, lower case else; words
    with spaces are left out.
    """
    text = "the 1 2 3\nÉté 4 5 6\nnew york 7 8 9\ncat 7 8 -9e-1\n\n"
    words = ("The", "the", "dog", "cat", "Été")
    for content in text, f"4 3\n{text}", f"\ufeff{text}":
        write(tmp_path / name, content.encode())
        ids, vectors, lower = read_vectors(tmp_path / name, words)
        assert ids.tolist() == [0, 1, 3, 4] and lower == 1 and vectors.dtype == np.float32
        np.testing.assert_allclose(vectors, [[1, 2, 3], [1, 2, 3], [7, 8, -0.9], [4, 5, 6]])


def in_deflate64(text):
    """A .zip as archivers make it of a large file, in a way that Python does not read."""
    with zipfile.ZipFile(archive := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("v.txt", text)
    stated = b"\x14\0\0\0\x08\0"  # version, flags and way of packing, in both headers
    assert archive.getvalue().count(stated) == 2
    return archive.getvalue().replace(stated, b"\x14\0\0\0\x09\0")


@pytest.mark.parametrize(
    "name, text, names",
    [
        ("a.txt", None, ["No such file"]),
        ("a.gz", b"the 1 2", ["gzipped"]),
        ("a.zip", b"the 1 2", ["zip"]),
        ("a.zip", in_deflate64("the 1 2"), ["compression"]),
        ("a.txt", b"the 1 2\ncat 1 x\n", ["line 2", "'cat 1 x'", "2 numbers"]),
        ("a.txt", b"the 1 2\ncat 1\n", ["line 2", "'cat 1'", "2 numbers"]),
        ("a.txt", b"the 1 2\ncat 1 nan\n", ["line 2", "'cat 1 nan'", "2 numbers"]),
        ("a.txt", b"a 1 2\n", ["2 words"]),
        ("a.txt", b"the\ncat\n", ["line 1", "'the'"]),
        ("a.txt", b"the\t1\t2\n", ["line 1"]),
    ],
)
def test_files_that_hold_no_vectors(name, text, names, tmp_path):
    """Each with the file and the line."""
    if text is not None:
        (tmp_path / name).write_bytes(text)
    with refuses(name, *names):
        read_vectors(tmp_path / name, ("the", "cat"))


def test_damaged_archives_of_vectors(tmp_path):
    """Whatever bit of a .gz is turned, or wherever it ends: one line that names it."""
    whole = gzip.compress("\n".join(f"w{n:03d} {n * n % 997} 0.5" for n in range(236)).encode())
    for at in range(10, len(whole), 31):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        for content in damaged, whole[:at]:
            (tmp_path / "v.gz").write_bytes(content)
            with refuses(f"{tmp_path}/v.gz"):
                read_vectors(tmp_path / "v.gz", WORDS.words)


@needs_sklearn
@pytest.mark.parametrize("method", ["kmeans", "weighted_kmeans", "mixture"])
def test_vectors_that_are_far_apart_are_clusters(method):
    """The three points are found, in any order of labels; the same seed gives the same ones."""
    vectors, labels = blobs()
    found, again = (
        clustering.run_method(method, vectors, np.arange(240, 0, -1), 3, 1) for _ in range(2)
    )
    assert (found == again).all()
    assert len(set(zip(labels.tolist(), found.tolist(), strict=True))) == 3
    with refuses("240", "300"):
        clustering.run_method(method, vectors, np.ones(240), 300, 1)


@needs_sklearn
def test_weights_are_log_counts():
    """Counts move the centres of 0, 1 and of 9, 10, and so decide whom 5 belongs to."""
    points = np.array([[0.0], [1.0], [5.0], [9.0], [10.0]])
    for counts, side in ([1_000, 1, 2, 1_000, 1], 4), ([1, 1_000, 2, 1, 1_000], 0):
        clusters = clustering.run_method("weighted_kmeans", points, np.array(counts), 2, 0)
        assert (
            clusters[2] == clusters[side]
            and clusters[0] == clusters[1] != clusters[3] == clusters[4]
        )


def test_scikit_learn_is_optional(monkeypatch):
    """Without it, one line names the command that installs it."""
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    with refuses("--method=kmeans", "scikit-learn"):
        clustering.run_method("kmeans", *blobs(), 3, 0)


def test_the_autoencoder_is_at_its_minimum():
    """Its losses are the norms of what the first 32 principal components leave, by another
    decomposition.
    """
    vectors = np.random.default_rng(0).normal(size=(600, 40)).astype(np.float32)
    with refuses("vectors", "32", "autoencoder"):
        clustering.run_method("autoencoder", vectors[:, :32], np.ones(600), 3, 0)
    ours = clustering.run_method("autoencoder", vectors, np.ones(600), 3, 0)
    centred = vectors - vectors.mean(axis=0)
    rest = np.linalg.svd(centred.astype(np.float64), full_matrices=False)[2][32:]
    np.testing.assert_allclose(ours, np.linalg.norm(centred @ rest.T, axis=1), rtol=1e-4)


def test_a_method_is_one_entry(monkeypatch, tmp_path):
    """A toy method that groups words by the sign of their first number."""
    toy = clustering.Method(lambda vectors, *_: (vectors[:, 0] < 0).astype(int), True, False)
    monkeypatch.setitem(clustering.METHODS, "sign", toy)
    signs = np.sign(np.arange(240) % 3 - 0.5)
    lines = [f"{word} {sign} 1" for word, sign in zip(WORDS.words, signs, strict=True)]
    (tmp_path / "vectors.txt").write_text("\n".join(lines))
    options = Clustering("sign", str(tmp_path / "vectors.txt"), clusters=2)
    header, order, _ = make_clusters(WORDS, options)
    assert sorted(header.sizes) == [80, 160]
    assert len({*signs[order[: header.sizes[0]]]}) == 1
    with refuses("--cutoffs", "--method=sign"):
        make_clusters(WORDS, options._replace(cutoffs=(9,)))


def test_words_without_a_vector_go_with_their_neighbours():
    """The nearest word in frequency that has one; of two as near, the more frequent."""
    nearest = clustering.nearest_with_vector(np.array([1, 4, 5]), 9)
    assert nearest.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    ids, sizes = clustering.by_label(np.array([2, 0, 2, 1, 0]), np.array([9, 8, 3, 2, 1]))
    assert (ids.tolist(), sizes) == ([0, 2, 1, 4, 3], (2, 2, 1))


def test_bands_of_equal_words_times_width():
    """To a word; the thesis rounds these to [2.5k, 10k] and [20k, 80k]."""
    workload = Workload(400, 3)
    for words in 33_278, 267_735:
        sizes = np.diff([0, *equal_products(words, 3, workload), words])
        products = sizes * np.array(workload.widths(3))
        assert np.ptp(products) <= 400 and sizes.sum() == words
    assert equal_products(33_278, 3, workload) == (2_541, 10_182) and equal_products(
        9, 3, Workload(4, 1)
    ) == (3, 6)
    with refuses("cutoffs"):
        equal_products(3, 3, workload)


@pytest.mark.parametrize("method", ["frequency", "autoencoder"])
def test_the_command(method, tmp_path, quick_command):
    """With a file of vectors or without: the file is of the vocabulary, and the lines say sizes,
    shares and missing words.
    """
    vectors = np.random.default_rng(0).normal(size=(len(WORDS.words), 40))
    lines = [
        f"{word} {' '.join(map(str, vector))}"
        for word, vector in zip(WORDS.words, vectors, strict=True)
        if word != "cat"
    ]
    (tmp_path / "vectors.txt").write_text(
        "\n".join(line for line in lines if line[:3] != "The") + "\n"
    )
    WORDS.write(tmp_path / "vocabulary.txt")
    read = [f"--embeddings={tmp_path / 'vectors.txt'}"] if method != "frequency" else []
    read += [f"--vocabulary={tmp_path / 'vocabulary.txt'}", f"--output={tmp_path / 'c.txt'}"]
    done = quick_command("-m", "adaptive_jax", "clusters", f"--method={method}", *read)
    assert (done.returncode, done.stderr) == (0, "")
    header = read_header(tmp_path / "c.txt")
    order = np.array([WORDS.index[word] for word in in_order(WORDS, tmp_path / "c.txt").words])
    assert header[:2] == (method, 0) and len(header.sizes) == 3
    share = WORDS.counts[order[: header.sizes[0]]].sum() / WORDS.counts.sum()
    said = f"{header.sizes[0]} words with {share:.1%} of the tokens"
    assert said in done.stdout and f"--config.output.clusters={tmp_path / 'c.txt'}" in done.stdout
    assert ("1 words have none (0.4%" in done.stdout) == (method != "frequency")
    if method == "frequency":
        assert order.tolist() == list(range(240))
        again = quick_command("-m", "adaptive_jax", "clusters", "--clusters=2", *read)
        assert again.returncode == 2 and "c.txt already exists: use another" in again.stderr
        assert read_header(tmp_path / "c.txt") == header


def test_clusters_of_own_text_whose_words_are_fixed(in_process, tmp_path):
    """By data.limit, say: they were refused, as if training would choose other words."""
    for split in "train", "valid", "test":
        (tmp_path / f"{split}.txt").write_text("a b c d\n" * 9)
    line = "--config=configs/own_text.py", f"--config.data.path={tmp_path}", "--clusters=2"
    line += f"--output={tmp_path / 'c.txt'}", f"--cache_dir={tmp_path / 'cache'}"
    done = in_process("-m", "adaptive_jax", "clusters", *line)
    assert done.returncode == 2 and "chooses its words" in done.stderr
    done = in_process("-m", "adaptive_jax", "clusters", *line, "--config.data.limit=5")
    assert done.returncode == 0 and (tmp_path / "c.txt").exists(), done.stderr


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--output=c.txt"], "--vocabulary is missing"),
        (["--config=configs/penn_treebank.py"], "--output is missing"),
        (
            ["--method=kmean", "--output=c.txt"],
            "--method=kmean: value should be one of <frequency|kmeans",
        ),
        (
            ["--cutoffs=1,b", "--output=c.txt"],
            "--cutoffs must be whole numbers",
        ),
    ],
)
def test_commands_that_lack_something(flags, says, in_process):
    """One line, status 2."""
    done = in_process("-m", "adaptive_jax", "clusters", *flags)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and says in done.stderr


@pytest.mark.parametrize(
    "request_, names",
    [
        (Clustering("autoencoder"), "--embeddings"),
        (Clustering("autoencoder", "no_such_file"), "no_such_file"),
        (Clustering("kmeans", cutoffs=(9,)), "--cutoffs --method=kmeans"),
        (Clustering("frequency", "runs/a"), "--embeddings --method=frequency"),
        (Clustering("frequency", clusters=0), "--clusters 0"),
        (Clustering("kmeans", seed=-1), "--seed -1"),
        (Clustering("kmeans", seed=1 << 32), "--seed 4294967296"),
        (Clustering("frequency", clusters=241), "--clusters=241 240"),
        (Clustering("frequency", clusters=10**9), "--clusters=1000000000 240"),
        (Clustering("frequency", cutoffs=(9, 3)), "cutoffs"),
        (Clustering("frequency", cutoffs=(9, 300)), "cutoff 300 240"),
        (Clustering("kmeens"), '"kmeans"'),
    ],
)
def test_requests_that_make_no_sense(request_, names):
    """A flag out of range or without effect is an error that names it, not other clusters."""
    with refuses(*names.split()):
        make_clusters(WORDS, request_)


def test_words_in_another_order_than_by_frequency():
    """Those of a run with clusters have no neighbours in frequency, and their file would fit no
    corpus.
    """
    turned = Vocabulary(WORDS.words[::-1], WORDS.counts[::-1])
    with refuses("frequency", "--config"):
        make_clusters(turned, Clustering("frequency"))


@pytest.mark.skipif(not GLOVE.exists(), reason="needs a cut of GloVe")
def test_a_cut_of_glove():
    """Its words have width 50, a capital is found in lower case."""
    ids, vectors, lower = read_vectors(GLOVE, ("the", "The", "zzzzqq"))
    assert (
        ids.tolist() == [0, 1]
        and vectors.shape == (2, 50)
        and lower == 1
        and vectors[0, 0] == np.float32(0.418)
    )
