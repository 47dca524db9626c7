"""The peer of the trainer: the same language model in PyTorch, as its users would write it.

Adaptive input by nn.Embedding and nn.Linear for each band, blocks with normalisation first around
scaled_dot_product_attention, torch.nn.AdaptiveLogSoftmaxWithLoss on top, SGD with Nesterov momentum. Sizes are those of one of this
project's configs; its output has tables of its own, as that layer cannot share them.
"""

import itertools
import math

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Causal self-attention, then feed-forward, each normalised at its entrance."""

    def __init__(self, body):
        super().__init__()
        width = body["features"]
        self.heads, self.attention_dropout = body["heads"], body["attention_dropout"]
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.query_key_value, self.attended = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner, self.outer = nn.Linear(width, body["feed_forward"]), nn.Linear(body["feed_forward"], width)
        self.dropout, self.activation_dropout = nn.Dropout(body["dropout"]), nn.Dropout(body["activation_dropout"])

    def forward(self, x):
        """`[batch, time, features]` to the same."""
        batch, time, width = x.shape
        parts = self.query_key_value(self.norms[0](x)).view(batch, time, 3, self.heads, width // self.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        rate = self.attention_dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, dropout_p=rate)
        x = x + self.dropout(self.attended(mixed.transpose(1, 2).reshape(batch, time, width)))
        inner = self.activation_dropout(functional.relu(self.inner(self.norms[1](x))))
        return x + self.dropout(self.outer(inner))


class TorchModel(nn.Module):
    """The model of a config of adaptive input, transformer and adaptive softmax, over `vocabulary_size` words."""

    def __init__(self, config, vocabulary_size):
        super().__init__()
        body, cutoffs, factor = config["body"], config["input"]["cutoffs"], config["input"]["factor"]
        width = body["features"]
        ends = [0, *cutoffs, vocabulary_size]
        self.firsts = ends[:-1]
        self.tables = nn.ModuleList(
            nn.Embedding(after - before, width // factor**i) for i, (before, after) in enumerate(itertools.pairwise(ends))
        )
        self.projections = nn.ModuleList(nn.Linear(table.embedding_dim, width, bias=False) for table in self.tables)
        for table in self.tables:
            nn.init.normal_(table.weight, std=table.embedding_dim**-0.5)
        self.blocks = nn.ModuleList(Block(body) for _ in range(body["layers"]))
        self.dropout = nn.Dropout(body["dropout"])
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(width, vocabulary_size, list(cutoffs), div_value=float(factor))
        half = width // 2
        frequencies = torch.exp(torch.arange(half) * (-math.log(10_000.0) / (half - 1)))
        angles = torch.arange(config["data"]["block"])[:, None] * frequencies
        self.register_buffer("positions", torch.cat([angles.sin(), angles.cos()], dim=1))

    def forward(self, tokens, targets):
        """Mean loss in nats of ids `[batch, time]`; the softmax in float32, as its layer knows no autocast."""
        vectors = 0.0
        for first, table, projection in zip(self.firsts, self.tables, self.projections, strict=True):
            place = tokens - first
            inside = (place >= 0) & (place < table.num_embeddings)
            vectors = vectors + projection(table(place.clamp(0, table.num_embeddings - 1)) * inside[..., None])
        width = vectors.shape[-1]
        x = self.dropout(vectors * width**0.5 + self.positions[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        with torch.autocast(x.device.type, enabled=False):
            return self.softmax(x.float().reshape(-1, width), targets.reshape(-1)).loss


def torch_update(config, vocabulary_size, inputs, targets, *, device, bfloat16=False, compiled=False):
    """A function that makes one update of the batch `[rows, time]` and returns its loss as a tensor.

    bfloat16: compute in it by autocast, parameters in float32. compiled: by torch.compile.
    """
    torch.manual_seed(0)
    if bfloat16:
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32
    model = TorchModel(config, vocabulary_size).to(device)
    settings = config["optimizer"]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=settings["momentum"], nesterov=True)
    inputs, targets = (torch.tensor(a, dtype=torch.long, device=device) for a in (inputs, targets))
    forward = torch.compile(model) if compiled else model

    def update():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=bfloat16):
            loss = forward(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings["clip_norm"])
        optimizer.step()
        return loss

    return update
