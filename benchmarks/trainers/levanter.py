"""levanter: its Llama with haliax's named arrays.

Its own losses are the one with all logits, and that with `cross_entropy_block_size`. The layout
`tied with z-loss` ties the output to the embedding and adds a z-loss.
"""

import dataclasses
from collections.abc import Callable

import equinox
import haliax
import haliax.nn.loss
import jax
import jax._src.core
import jax.numpy as jnp
import jmp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from levanter.layers.attention import AttentionMask
from levanter.models import loss as levanter_loss
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmExample, compute_next_token_loss

from adaptive_jax.losses.cross_entropy import linear_cross_entropy
from benchmarks.trainers import OURS, Size


@dataclasses.dataclass
class Layout:
    """A mesh, and the mesh axes of named axes: of parameters, and of what is computed."""

    mesh: dict[str, int]
    params: dict[str, str]
    compute: dict[str, str | tuple[str, ...]]
    tied: bool = False
    z_loss: float | None = None


FSDP = {"embed": "data"}, {"batch": "data"}
MODEL = {"vocab": "model", "mlp": "model", "heads": "model"}
LAYOUTS = {
    "data 8": Layout({"data": 8}, *FSDP),
    "replica 2 data 4": Layout(
        {"replica": 2, "data": 4}, {"embed": "data"}, {"batch": ("replica", "data")}
    ),
    "data 4 model 2": Layout(
        {"data": 4, "model": 2}, {"embed": "data"} | MODEL, {"batch": "data"} | MODEL
    ),
    "tied with z-loss": Layout({"data": 8}, *FSDP, tied=True, z_loss=1e-4),
}
BLOCKS = levanter_loss.fused_cross_entropy_loss_and_logsumexp_penalty
LOSSES = {"levanter's": (None, BLOCKS), "levanter's, blocks": (8_192, BLOCKS)}


def fused_cross_entropy_loss_and_logsumexp_penalty(
    pred_embeddings,
    pred_lm_head,
    Contract,
    Label,
    target_y,
    *,
    reduction=haliax.mean,
    reduction_axis=None,
    where=None,
    logsumexp_weight=None,
    logit_soft_cap=None,
    block_size=None,
    dtype=jnp.float32,
):
    """The loss in the place of levanter's function of this name."""
    axes = target_y.axes
    is_mean = reduction is haliax.mean and reduction_axis is None
    loss = linear_cross_entropy(
        pred_embeddings.rearrange((*axes, Contract)).array,
        pred_lm_head.rearrange((Label, Contract)).array,
        target_y.array,
        weights=None if where is None else haliax.broadcast_to(where, axes).rearrange(axes).array,
        z_loss=logsumexp_weight or 0.0,
        soft_cap=logit_soft_cap,
        reduction="mean" if is_mean else "none",
    )
    if is_mean:
        return haliax.named(loss, ())
    return haliax.nn.loss.maybe_reduce_loss(
        haliax.named(loss, axes), reduction, reduction_axis, where
    )


LOSSES[OURS] = 8_192, fused_cross_entropy_loss_and_logsumexp_penalty


def with_boolean_mask(reduce):
    """haliax's age: its mask of floats is an error in today's jax.numpy."""

    def reduce_loss(loss, reduction, reduction_axis, where):
        where = None if where is None else where.astype(bool)
        return reduce(loss, reduction, reduction_axis, where)

    return reduce_loss


jax.core.is_constant_dim = jax._src.core.is_constant_dim  # haliax's age: it left jax.core
haliax.nn.loss.maybe_reduce_loss = with_boolean_mask(haliax.nn.loss.maybe_reduce_loss)


def programs(layout: str, size: Size, devices: list[jax.Device], place: Callable):
    """As the package says."""
    layout = LAYOUTS[layout]
    mesh = Mesh(np.array(devices).reshape(*layout.mesh.values()), tuple(layout.mesh))
    batch = haliax.Axis("batch", size.rows)
    policy = jmp.get_policy(f"params=float32,compute={size.dtype},output=float32")

    def lowered(block_size, loss):
        config = LlamaConfig(
            seq_len=size.length,
            hidden_dim=size.width,
            intermediate_dim=4 * size.width,
            num_layers=2,
            num_heads=size.heads,
            num_kv_heads=size.heads,
            attn_backend="vanilla",
            cross_entropy_block_size=block_size,
            tie_word_embeddings=layout.tied,
        )

        def build():
            return config.build(haliax.Axis("vocab", size.words), key=jax.random.key(0))

        shapes = equinox.filter_eval_shape(build)
        shardings = haliax.partitioning.infer_resource_partitions(shapes, layout.params)
        is_shape = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
        _, definition = equinox.partition(shapes, is_shape)
        params = place(lambda: equinox.filter(build(), equinox.is_array), shardings)

        def step(params, tokens, mask):
            def loss_of(params):
                example = LmExample(
                    tokens=haliax.named(tokens, (batch, config.Pos)),
                    loss_mask=haliax.named(mask, (batch, config.Pos)),
                    attn_mask=AttentionMask.causal(),
                )
                example = haliax.shard(example)
                model = policy.cast_to_compute(equinox.combine(params, definition))
                return compute_next_token_loss(
                    model, example, logsumexp_weight=layout.z_loss
                ).scalar()

            with haliax.axis_mapping(layout.compute):
                mean, gradients = jax.value_and_grad(loss_of)(params)
            return mean, jax.tree.leaves(haliax.shard(gradients, layout.params))

        levanter_loss.fused_cross_entropy_loss_and_logsumexp_penalty = loss
        arguments = params, *place(tokens_and_mask, NamedSharding(mesh, P()))
        return jax.jit(step).lower(*arguments), arguments

    def tokens_and_mask():
        rng, shape = np.random.default_rng(0), (size.rows, size.length)
        tokens, mask = rng.integers(0, size.words, shape), rng.random(shape) > 1 / 12
        return jnp.int32(tokens), jnp.float32(mask)

    with mesh:
        return {name: lowered(*loss) for name, loss in LOSSES.items()}
