"""MaxText: its decoder, output head and sharding rules, as flax nnx modules.

Its own losses are the one with all logits, and that with `num_vocab_tiling=8`. The layout
`tied with z-loss` ties the output to the embedding, with Gemma's soft cap, and adds a z-loss.
MaxText rounds a tied table to bfloat16 before the product, whatever the dtype, so there even the
gradients of its own two losses agree to 3e-3 only.
"""

import logging
import tempfile
from collections.abc import Callable

import jax
import jax.numpy as jnp
import maxtext.configs
import numpy as np
import optax
from flax import nnx
from flax.linen import partitioning
from maxtext.common.train_state_nnx import TrainStateNNX
from maxtext.configs import pyconfig
from maxtext.trainers.pre_train import train
from maxtext.utils import maxtext_utils, model_creation_utils, sharding

from adaptive_jax.losses.cross_entropy import linear_cross_entropy
from benchmarks.trainers import OURS, Size

LAYOUTS = {
    "fsdp 8": ("ici_fsdp_parallelism=8",),
    "data 2 fsdp 4": ("ici_data_parallelism=2", "ici_fsdp_parallelism=4"),
    "fsdp 4 tensor 2": ("ici_fsdp_parallelism=4", "ici_tensor_parallelism=2"),
    "fsdp 4 expert 2": ("ici_fsdp_parallelism=4", "ici_expert_parallelism=2"),
    "tied with z-loss": (
        *("ici_fsdp_parallelism=8", "logits_via_embedding=true", "z_loss_multiplier=1e-4"),
        "final_logits_soft_cap=30.0",
    ),
}
SETTINGS = (
    *("base_num_decoder_layers=2", "attention=dot_product"),
    *("enable_checkpointing=False", "enable_dropout=False"),
    *("run_name=adoption", "hardware=cpu", "skip_jax_distributed_system=true"),
    *("dataset_type=synthetic", "override_model_config=true", "log_config=False"),
)
TILED = train.vocab_tiling_nnx_loss
LOSSES = {"MaxText's": (1, TILED), "MaxText's, 8 tiles": (8, TILED)}


def vocab_tiling_nnx_loss(model, hidden_states, data, config, is_train):
    """Summed loss and z-loss, in the place of MaxText's function of this name."""
    head = model.decoder
    dropout = config.enable_dropout and is_train
    hidden = head.dropout(head.decoder_norm(hidden_states), deterministic=not dropout)
    scale = cap = None
    if config.logits_via_embedding:
        table = model.token_embedder.embedding[...]
        scale = hidden.shape[-1] ** -0.5 if config.normalize_embedding_logits else None
        cap = config.final_logits_soft_cap or None
    else:
        table = head.logits_dense.kernel[...].T
    if config.logits_dot_in_fp32:
        hidden = hidden.astype(jnp.float32)
    loss, report = linear_cross_entropy(
        *(hidden, table, data["targets"]),
        weights=(data["targets_segmentation"] != 0).astype(jnp.float32),
        logit_scale=scale,
        soft_cap=cap,
        z_loss=config.z_loss_multiplier,
        reduction="sum",
        reports=("z_loss",),
    )
    return loss, report.z_loss.sum()


LOSSES[OURS] = 8, vocab_tiling_nnx_loss


def settings_of(layout, size, tiles, devices):
    """MaxText's config."""
    yml = f"{next(iter(maxtext.configs.__path__))}/base.yml"
    return pyconfig.initialize(
        [
            *(None, yml, *SETTINGS, *LAYOUTS[layout]),
            *(f"vocab_size={size.words}", f"num_vocab_tiling={tiles}", f"dtype={size.dtype}"),
            *(f"base_emb_dim={size.width}", f"base_mlp_dim={4 * size.width}"),
            *(f"base_num_{name}_heads={size.heads}" for name in ("query", "kv")),
            f"head_dim={size.width // size.heads}",
            f"max_target_length={size.length}",
            f"logits_dot_in_fp32={size.dtype == 'float32'}",
            f"matmul_precision={'highest' if size.dtype == 'float32' else 'default'}",
            f"per_device_batch_size={size.rows / len(devices)}",
            f"base_output_directory={tempfile.gettempdir()}",
        ]
    )


def placed_state(config, mesh, place):
    """The definition and the arrays of MaxText's train state, in its shardings."""
    create_model, _ = model_creation_utils.create_nnx_abstract_model(config, mesh)

    def create():
        model = create_model()
        return TrainStateNNX(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param))

    _, _, shardings = maxtext_utils.get_abstract_state(config, mesh, create, True)
    state = place(lambda: nnx.state(create()), shardings)
    return nnx.graphdef(nnx.eval_shape(create)), state


def batch_of(config, mesh, size, place):
    """Random tokens, the last eighth of each row padding."""
    rng = np.random.default_rng(0)
    shape = size.rows, size.length
    position, segment = np.zeros((2, *shape), np.int32)
    position += np.arange(shape[1])
    segment[:, : -shape[1] // 8] = 1
    batch = {}
    for name in "inputs", "targets":
        tokens = rng.integers(0, size.words, shape)
        batch |= {
            name: tokens.astype(np.int32),
            f"{name}_position": position,
            f"{name}_segmentation": segment,
        }
    return place(
        lambda: jax.tree.map(jnp.asarray, batch), sharding.get_input_data_sharding(config, mesh)
    )


def programs(layout: str, size: Size, devices: list[jax.Device], place: Callable):
    """As the package says."""
    logging.disable(logging.WARNING)

    def lowered(tiles, loss):
        config = settings_of(layout, size, tiles, devices)
        mesh = maxtext_utils.get_mesh_from_config(config, devices)
        rules = partitioning.axis_rules(config.logical_axis_rules)
        with jax.set_mesh(mesh), mesh, rules:
            definition, state = placed_state(config, mesh, place)
            batch = batch_of(config, mesh, size, place)

            def step(state, batch):
                model = nnx.merge(definition, state).model
                definition_of_model, params, rest = nnx.split(model, nnx.Param, ...)

                def loss_of(params):
                    model = nnx.merge(definition_of_model, params, rest, copy=True)
                    return train.loss_fn(model, config, dict(batch), None, None)[0]

                mean, gradients = jax.value_and_grad(loss_of)(params)
                return mean, jax.tree.map(
                    jax.lax.with_sharding_constraint, nnx.to_pure_dict(gradients), shardings
                )

            params = nnx.split(nnx.merge(definition, state).model, nnx.Param, ...)[1]
            shardings = jax.tree.map(lambda array: array.sharding, nnx.to_pure_dict(params))
            train.vocab_tiling_nnx_loss = loss
            return jax.jit(step).lower(state, batch), (state, batch)

    return {name: lowered(*loss) for name, loss in LOSSES.items()}
