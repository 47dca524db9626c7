"""The peer of the trainer: the same language model in PyTorch, written as its users would write it.

Its adaptive input is an nn.Embedding and an nn.Linear for each band; its blocks normalise first and
use scaled_dot_product_attention; its output is torch.nn.AdaptiveLogSoftmaxWithLoss, which has
tables of its own; its optimizer is SGD with Nesterov momentum. Sizes come from one of this
project's configs.
"""

import itertools
import math

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Causal self-attention, then feed-forward; the input of each is normalised."""

    def __init__(self, body):
        super().__init__()
        width = body["features"]
        self.heads, self.attention_dropout = body["heads"], body["attention_dropout"]
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.query_key_value, self.attended = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Linear(width, body["feed_forward"])
        self.outer = nn.Linear(body["feed_forward"], width)
        self.dropout = nn.Dropout(body["dropout"])
        self.activation_dropout = nn.Dropout(body["activation_dropout"])

    def forward(self, x):
        """`[batch, time, features]` to the same."""
        batch, time, width = x.shape
        parts = self.query_key_value(self.norms[0](x)).view(
            batch, time, 3, self.heads, width // self.heads
        )
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        rate = self.attention_dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, dropout_p=rate
        )
        x = x + self.dropout(self.attended(mixed.transpose(1, 2).reshape(batch, time, width)))
        inner = self.activation_dropout(functional.relu(self.inner(self.norms[1](x))))
        return x + self.dropout(self.outer(inner))


class TorchModel(nn.Module):
    """The model of a config with adaptive input, transformer and adaptive softmax."""

    def __init__(self, config):
        super().__init__()
        body = config["body"]
        cutoffs, factor = config["input"]["cutoffs"], config["input"]["factor"]
        width, words = body["features"], config["data"]["vocabulary_size"]
        ends = [0, *cutoffs, words]
        self.firsts = ends[:-1]
        self.tables = nn.ModuleList(
            nn.Embedding(after - before, width // factor**i)
            for i, (before, after) in enumerate(itertools.pairwise(ends))
        )
        self.projections = nn.ModuleList(
            nn.Linear(table.embedding_dim, width, bias=False) for table in self.tables
        )
        for table in self.tables:
            nn.init.normal_(table.weight, std=table.embedding_dim**-0.5)
        self.blocks = nn.ModuleList(Block(body) for _ in range(body["layers"]))
        self.dropout = nn.Dropout(body["dropout"])
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(
            width, words, list(cutoffs), div_value=float(factor)
        )
        half = width // 2
        frequencies = torch.exp(torch.arange(half) * (-math.log(10_000.0) / (half - 1)))
        angles = torch.arange(config["batches"]["sequence_length"])[:, None] * frequencies
        self.register_buffer("positions", torch.cat([angles.sin(), angles.cos()], dim=1))

    def forward(self, tokens, targets):
        """Mean loss in nats of ids `[batch, time]`. The softmax runs in float32, because its
        layer does not support autocast.
        """
        vectors = 0.0
        for first, table, projection in zip(
            self.firsts, self.tables, self.projections, strict=True
        ):
            place = tokens - first
            inside = (place >= 0) & (place < table.num_embeddings)
            vectors = vectors + projection(
                table(place.clamp(0, table.num_embeddings - 1)) * inside[..., None]
            )
        width = vectors.shape[-1]
        x = self.dropout(vectors * width**0.5 + self.positions[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        with torch.autocast(x.device.type, enabled=False):
            return self.softmax(x.float().reshape(-1, width), targets.reshape(-1)).loss


def torch_update(config, ids, device, *, compiled=False):
    """A function that makes one update on ids `[rows, time + 1]` and returns its loss.

    With dtype "bfloat16" it computes by autocast, and parameters stay in float32. compiled: use
    torch.compile.
    """
    torch.manual_seed(0)
    bfloat16, settings = config["dtype"] == "bfloat16", config["optimizer"]
    if bfloat16:
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32
    model = TorchModel(config).to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=1e-4, momentum=settings["momentum"], nesterov=True
    )
    inputs, targets = (
        torch.tensor(part, dtype=torch.long, device=device) for part in (ids[:, :-1], ids[:, 1:])
    )
    forward = torch.compile(model) if compiled else model

    def update():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=bfloat16):
            loss = forward(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings["clip_norm"] or math.inf)
        optimizer.step()
        return loss.item()

    return update
