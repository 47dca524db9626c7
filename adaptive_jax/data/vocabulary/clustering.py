"""How words are put into clusters: by frequency, by their vectors, or by how well an autoencoder
reproduces these.

Apostoae 2019, section 3.3. k-means, weighted k-means (weights: log counts) and Gaussian mixtures,
of full covariances, are those of scikit-learn, run once: k-means starts from k-means++, a mixture
from k-means. The autoencoder has one hidden layer of 32, no activation, and the mean squared error
(section 4.1 and chapter 5); Adam, its rate, batches and number of updates are ours.
"""

import warnings
from collections.abc import Callable

import numpy as np

from adaptive_jax.errors import InputError

METHODS = ("frequency", "kmeans", "weighted_kmeans", "mixture", "autoencoder")
HIDDEN, UPDATES, BATCH, RATE = 32, 5_000, 512, 3e-3  # of the autoencoder
SHOWN = 50  # times that its progress is shown
ITERATIONS = 300  # at most, of k-means; a third, of a mixture
Show = Callable[[int, int], None]  # called with the steps done and the steps in all


def labels(
    method: str, vectors: np.ndarray, counts: np.ndarray, clusters: int, seed: int, show: Show
) -> np.ndarray:
    """The cluster of each of `vectors [n, width]`, int `[n]`: "kmeans", "weighted_kmeans" or
    "mixture".

    counts: `[n]`, how often each word occurs.

    Raises:
        InputError: scikit-learn is missing, fewer vectors than clusters, or a cluster that stays
            empty.
    """
    try:
        from sklearn.cluster import KMeans
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.mixture import GaussianMixture
    except ImportError as error:
        raise InputError(
            f"--method={method} needs scikit-learn: run `pip install scikit-learn`, or take another"
            " method"
        ) from error
    if len(vectors) < clusters:
        raise InputError(
            f"{len(vectors):,} words with vectors do not make {clusters:,} clusters: give fewer"
            " --clusters"
        )
    if method == "mixture":
        mixture = GaussianMixture(clusters, max_iter=1, warm_start=True, random_state=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # after every iteration
            for iteration in range(ITERATIONS // 3):
                show(iteration, ITERATIONS // 3)
                if mixture.fit(vectors).converged_:
                    break
        found = mixture.predict(vectors)
    else:
        weights = (
            np.log(np.maximum(counts, 1))
            if method == "weighted_kmeans" and (counts > 1).any()
            else None
        )
        show(0, 1)
        found = (
            KMeans(clusters, max_iter=ITERATIONS, random_state=seed)
            .fit(vectors, sample_weight=weights)
            .labels_
        )
    if (empty := clusters - len(np.unique(found))) > 0:
        raise InputError(
            f"{empty} of {clusters} clusters stay empty: give another --seed or fewer --clusters"
        )
    return found


def reconstruction_losses(vectors: np.ndarray, seed: int, show: Show) -> np.ndarray:
    """The L2 norm of each of `vectors [n, width]` minus what an autoencoder makes of it,
    float32 `[n]`.
    """
    import jax  # processes that only read text should not wait for JAX
    import jax.numpy as jnp
    import optax

    count, width = vectors.shape
    init, keys = jax.nn.initializers.glorot_uniform(), jax.random.split(jax.random.key(seed))
    optimizer = optax.adam(optax.cosine_decay_schedule(RATE, UPDATES))
    params = {"encoder": init(keys[0], (width, HIDDEN)), "decoder": init(keys[1], (HIDDEN, width))}
    params |= {"hidden": jnp.zeros(HIDDEN), "mean": jnp.asarray(vectors.mean(axis=0))}

    def difference(params, x):
        hidden = x @ params["encoder"] + params["hidden"][None]
        return x - (hidden @ params["decoder"] + params["mean"][None])

    @jax.jit
    def train(params, state, vectors, key):
        def update(carry, rows):
            params, state = carry
            gradients = jax.grad(lambda params: jnp.mean(difference(params, vectors[rows]) ** 2))(
                params
            )
            changes, state = optimizer.update(gradients, state)
            return (optax.apply_updates(params, changes), state), None

        rows = jax.random.randint(key, (UPDATES // SHOWN, BATCH), 0, count)
        return jax.lax.scan(update, (params, state), rows)[0]

    state, vectors = optimizer.init(params), jnp.asarray(vectors)
    for number in range(SHOWN):
        show(number, SHOWN)
        params, state = train(params, state, vectors, jax.random.fold_in(keys[0], number))
    return np.asarray(jnp.linalg.norm(difference(params, vectors), axis=1))


def nearest_known(ids: np.ndarray, words: int) -> np.ndarray:
    """The index in `ids [n]` of the word nearest in frequency to each word, int `[words]`; of
    two, the more frequent.
    """
    right = np.searchsorted(ids, np.arange(words)).clip(0, len(ids) - 1)
    left = (right - 1).clip(0)
    return np.where(
        np.abs(ids[left] - np.arange(words)) <= np.abs(ids[right] - np.arange(words)), left, right
    )


def by_label(labels: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
    """Word ids in the order of clusters, and the clusters' sizes: the cluster of the most
    tokens first, its words by frequency.
    """
    tokens = np.bincount(labels, counts)
    ranks = np.argsort(np.argsort(-tokens, kind="stable"))
    return np.argsort(ranks[labels], kind="stable"), tuple(np.bincount(ranks[labels]).tolist())
