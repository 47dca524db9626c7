"""Methods that cluster words: by frequency, by their vectors, or by the loss of an autoencoder that
reproduces the vectors.

Apostoae 2019, section 3.3. k-means, weighted k-means (weights: log counts) and Gaussian mixtures
(full covariances) are those of scikit-learn, run once: k-means starts from k-means++, a mixture
from k-means. The autoencoder has one hidden layer of 32, no activation, and the mean squared error
(section 4.1 and chapter 5). Its minimum is the projection on the first 32 principal components,
which is computed instead.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from adaptive_jax.errors import InputError

HIDDEN = 32  # units of the autoencoder
ITERATIONS = 300  # of k-means; a mixture has a third


class Method(NamedTuple):
    """Method of clustering words.

    function: maps the vectors `[n, width]`, the counts `[n]`, the number of clusters and the seed
        to the cluster of each word, int `[n]`; or, if the order is cut, to a score `[n]`, the
        highest first. None: words stay in order of frequency.
    needs_vectors: whether it reads --embeddings.
    cuts: whether its order is divided by --cutoffs, or into equal words times width.
    """

    function: Callable[[np.ndarray, np.ndarray, int, int], np.ndarray] | None
    needs_vectors: bool
    cuts: bool


def kmeans(vectors: np.ndarray, counts: np.ndarray, clusters: int, seed: int) -> np.ndarray:
    """k-means with equal weights."""
    return _kmeans(vectors, None, clusters, seed)


def weighted_kmeans(
    vectors: np.ndarray, counts: np.ndarray, clusters: int, seed: int
) -> np.ndarray:
    """k-means, with the log of its count as the weight of a word."""
    weights = np.log(np.maximum(counts, 1)) if (counts > 1).any() else None
    return _kmeans(vectors, weights, clusters, seed)


def _kmeans(vectors, weights, clusters, seed):
    from sklearn.cluster import KMeans

    model = KMeans(clusters, max_iter=ITERATIONS, random_state=seed)
    return model.fit(vectors, sample_weight=weights).labels_


def mixture(vectors: np.ndarray, counts: np.ndarray, clusters: int, seed: int) -> np.ndarray:
    """A mixture of Gaussians with full covariances."""
    from sklearn.mixture import GaussianMixture

    return GaussianMixture(clusters, max_iter=ITERATIONS // 3, random_state=seed).fit_predict(
        vectors
    )


def autoencoder(vectors: np.ndarray, counts: np.ndarray, clusters: int, seed: int) -> np.ndarray:
    """The L2 norm of each vector minus its reconstruction, float `[n]`."""
    centred = vectors - vectors.mean(axis=0)
    basis = np.linalg.eigh(centred.T @ centred).eigenvectors[:, -HIDDEN:]
    return np.linalg.norm(centred - centred @ basis @ basis.T, axis=1)


METHODS = {
    "frequency": Method(None, needs_vectors=False, cuts=True),
    "kmeans": Method(kmeans, needs_vectors=True, cuts=False),
    "weighted_kmeans": Method(weighted_kmeans, needs_vectors=True, cuts=False),
    "mixture": Method(mixture, needs_vectors=True, cuts=False),
    "autoencoder": Method(autoencoder, needs_vectors=True, cuts=True),
}


def run_method(
    method: str, vectors: np.ndarray, counts: np.ndarray, clusters: int, seed: int
) -> np.ndarray:
    """Runs a method on `vectors [n, width]`, see `Method`.

    Raises:
        InputError: scikit-learn is missing, fewer vectors than clusters, vectors that an
            autoencoder reproduces exactly, or an empty cluster.
    """
    chosen = METHODS[method]
    if not chosen.cuts and len(vectors) < clusters:
        raise InputError(
            f"{len(vectors):,} words with vectors do not make {clusters:,} clusters: use fewer"
            " --clusters"
        )
    if chosen.function is autoencoder and vectors.shape[1] <= HIDDEN:
        raise InputError(
            f"vectors of width {vectors.shape[1]} lose nothing in the autoencoder, which has"
            f" {HIDDEN} units: use wider ones, or another --method"
        )
    try:
        result = chosen.function(vectors, counts, clusters, seed)
    except ImportError as error:
        raise InputError(
            f"--method={method} needs scikit-learn: run `pip install scikit-learn`, or take another"
            " method"
        ) from error
    if not chosen.cuts and (empty := clusters - len(np.unique(result))) > 0:
        raise InputError(
            f"{empty} of {clusters} clusters are empty; try another --seed or fewer --clusters"
        )
    return result


def nearest_with_vector(ids: np.ndarray, words: int) -> np.ndarray:
    """Returns the index in `ids [n]` of the word nearest in frequency to each word, int `[words]`;
    on ties, of the more frequent one.
    """
    every = np.arange(words)
    right = np.searchsorted(ids, every).clip(0, len(ids) - 1)
    left = (right - 1).clip(0)
    return np.where(np.abs(ids[left] - every) <= np.abs(ids[right] - every), left, right)


def by_label(labels: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
    """Returns word ids in the order of clusters, and the clusters' sizes. The cluster with the most
    tokens comes first; its words are sorted by frequency.
    """
    tokens = np.bincount(labels, counts)
    ranks = np.argsort(np.argsort(-tokens, kind="stable"))
    return np.argsort(ranks[labels], kind="stable"), tuple(np.bincount(ranks[labels]).tolist())
