"""Layers and optimizers as small as can be, for what the shipped ones do not use yet: a carry,
penalties, hooks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from adaptive_jax.inputs.lookup import Lookup
from adaptive_jax.planning.plan import make_plan
from adaptive_jax.training.sparse import parts_of


def normal(*shape, seed=0):
    """Numbers of a normal distribution, float32."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def random_params(shapes, scale=1.0, seed=0):
    """Parameters of these shapes, `scale` times about as large as a layer's own: those would
    have to be compiled.
    """
    random = np.random.default_rng(seed)

    def draw(a):
        return jnp.asarray(
            random.normal(0, scale * max(a.shape[-1:], default=1) ** -0.5, a.shape), a.dtype
        )

    return jax.tree.map(draw, shapes)


def params_of_output(model, features):
    """Random parameters of an output that reads hidden states `[tokens, features]`."""
    hidden = jnp.zeros((1, features))
    init = lambda: model.init(jax.random.key(0), hidden, method="log_probs")
    return random_params(jax.eval_shape(init)["params"])


class NoBody(nn.Module):
    """Returns the vectors that it is given."""

    dtype: jnp.dtype = jnp.float32

    def __call__(self, vectors, carry=(), batch=None, *, train=False):
        """The vectors."""
        return vectors, carry


class HashedNGrams(Lookup):
    """Words, and the pairs and triples of words that end with each, hashed into a table.

    Attributes:
        reach: earlier tokens that it says it reads.
        reads: those that it reads.
        rows: of the table.
    """

    reach: int = 2
    reads: int = 2
    rows: int = 32

    def setup(self):
        """Makes the tables."""
        super().setup()
        init = nn.initializers.normal(1.0)
        self.ngrams = self.param("ngrams", init, (self.rows, self.features), jnp.float32)

    def __call__(self, tokens, batch=None, *, train=False, earlier=None):
        """Token ids `[rows, time]` after `earlier [rows, reach]` to vectors `[rows, time,
        features]`.
        """
        vectors = super().__call__(tokens, batch, train=train)
        before = jnp.zeros((len(tokens), 0), jnp.int32) if earlier is None else earlier
        missing = jnp.full((len(tokens), self.reads), -1, jnp.int32)
        row = jnp.concatenate([missing, before, tokens], axis=1)
        code = tokens
        for n in range(1, self.reads + 1):
            begin = row.shape[1] - tokens.shape[1] - n
            other = row[:, begin : begin + tokens.shape[1]]
            inside = other >= 0
            if batch is not None and batch.segment_ids is not None:
                segments = jnp.pad(batch.segment_ids, ((0, 0), (n, 0)))[:, :-n]
                inside &= segments == batch.segment_ids
            code = 31 * code + other
            vectors += jnp.where(inside[..., None], self.ngrams[code % self.rows], 0)
        return vectors


class Recurrent(nn.Module):
    """A body of one tanh layer whose state passes from row to row of a stream; it sows the
    square of its states.
    """

    features: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, vectors, carry=(), batch=None, *, train=False):
        """Hidden states `[rows, time, features]` and, if one was given, the next carry `[rows,
        features]`.
        """
        init = nn.initializers.xavier_uniform()
        inner = self.param("inner", init, (self.features, self.features))
        outer = self.param("outer", init, (self.features, self.features))
        state = self.initial_carry(len(vectors)) if isinstance(carry, tuple) else carry
        if batch is not None and batch.reset is not None:
            state = jnp.where(batch.reset[:, None], 0, state)

        def step(state, vector):
            state = jnp.tanh(vector @ inner + state @ outer)
            return state, state

        state, hidden = jax.lax.scan(step, state, jnp.swapaxes(vectors, 0, 1))
        hidden = jnp.swapaxes(hidden, 0, 1)
        self.sow("penalties", "activation", 0.1 * jnp.mean(hidden**2, axis=-1))
        return hidden, () if isinstance(carry, tuple) else state

    def initial_carry(self, rows):
        """Zeros `[rows, features]`."""
        return jnp.zeros((rows, self.features))

    def cache(self, rows, length):
        """See `initial_carry`."""
        return self.initial_carry(rows)


class Heard(NamedTuple):
    """Validation losses: how many, and the last one."""

    evaluations: jax.Array
    last: jax.Array

    def after_evaluation(self, nll):
        """Counts it, and keeps its loss."""
        return Heard(self.evaluations + 1, jnp.full_like(self.last, nll))


class HalvingState(NamedTuple):
    """Half of the parameters, to be evaluated, and what was heard."""

    average: dict
    heard: Heard


def halving(learning_rate: float = 0.01, *, flip: bool = False, share: float = 0.5):
    """Plain descent whose state counts evaluations, and which evaluates a share of the parameters.

    Args:
        learning_rate: of every update.
        flip: whether to ascend.
        share: of the parameters, that is evaluated.
    """

    def halved(params):
        return jax.tree.map(lambda a: share * a, params)

    def init(params):
        return HalvingState(halved(params), Heard(jnp.zeros(()), jnp.zeros(())))

    def update(gradients, state, params):
        rate = learning_rate if flip else -learning_rate
        changes = jax.tree.map(lambda g: rate * g, gradients)
        return changes, state._replace(average=halved(optax.apply_updates(params, changes)))

    return optax.GradientTransformation(init, update)


TEXT = {
    "corpus": "text_files",
    "codes": 0,
    "tokenizer": "",
}  # of the group `data`, for a plan's lines


def plan_of(config, vocabulary_size, devices=1, **options):
    """The plan of a config's update for so many words."""
    return make_plan(config, parts_of(config, vocabulary_size), devices, **options)


def misplaced_labels(figure):
    """Texts of a matplotlib figure that overlap others or stand outside it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    texts = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes:
        texts += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        texts += axes.legend_.get_texts() if axes.legend_ else []
        for axis in axes.xaxis, axes.yaxis:
            texts += [tick.label1 for tick in axis._update_ticks()]  # those that are drawn
    texts = [text for text in texts if text.get_text().strip()]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts]
    right, top = figure.bbox.width + 1, figure.bbox.height + 1
    outside = [t for t, b in boxes if b.x0 < -1 or b.y0 < -1 or b.x1 > right or b.y1 > top]
    return outside + [
        (one, two)
        for i, (one, box) in enumerate(boxes)
        for two, other in boxes[:i]
        if box.overlaps(other)
    ]
