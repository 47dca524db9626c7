"""nanodo: a tiny transformer whose tied table is cut by width, or whole on each device."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from nanodo import data, loss, model

from adaptive_jax.losses.cross_entropy import linear_cross_entropy
from benchmarks.trainers import OURS, Size

LAYOUTS = "by width", "replicated"


def hidden_states(next_method, args, kwargs, context):
    """An interceptor of flax: `Embed.attend` gives what it was to multiply with the table."""
    if isinstance(context.module, nn.Embed) and context.method_name == "attend":
        return args[0]
    return next_method(*args, **kwargs)


def ours(batch, apply_fn):
    """A loss of the parameters that makes no logits."""

    def loss_fn(params):
        tokens, targets, weights = data.get_in_out(batch)
        with nn.intercept_methods(hidden_states):
            hidden = apply_fn({"params": params}, tokens)
        table = nn.unbox(params)["embed"]["embedding"]
        return linear_cross_entropy(hidden, table, targets, weights=weights)

    return loss_fn


def theirs(batch, apply_fn):
    """nanodo's loss of the parameters."""
    loss_fn = loss.get_default_loss_fn(batch, apply_fn, {})
    return lambda params: loss_fn(params)[0]


def programs(layout: str, size: Size, devices: list[jax.Device], place: Callable):
    """As the package says."""
    mesh = Mesh(np.array(devices), ("data",))
    config = model.DoConfig(
        V=size.words,
        D=size.width,
        H=size.heads,
        L=size.length,
        N=2,
        F=4 * size.width,
        fsdp_enabled=layout == "by width",
        dtype=size.dtype,
    )
    module = model.TransformerDo(config)
    rng = np.random.default_rng(0)
    # A twelfth is nanodo's padding, id 0.
    shape = size.rows, size.length
    tokens = np.where(rng.random(shape) < 1 / 12, 0, rng.integers(1, size.words, shape))
    batch = place(lambda: jnp.int32(tokens), NamedSharding(mesh, P()))

    def init():
        return module.init(jax.random.key(0), tokens[:1])["params"]

    shardings = nn.get_sharding(jax.eval_shape(init), mesh)
    params = place(init, shardings)

    def lowered(loss_of):
        def step(params, batch):
            batch = jax.lax.with_sharding_constraint(batch, NamedSharding(mesh, P("data")))
            return jax.value_and_grad(loss_of(batch, module.apply))(params)

        out = NamedSharding(mesh, P()), shardings
        return jax.jit(step, out_shardings=out).lower(params, batch), (params, batch)

    return {"nanodo's": lowered(theirs), OURS: lowered(ours)}
