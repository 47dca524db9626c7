r"""WikiText-2 (2.1M words, vocabulary 33,278): the eight rows of Baevski & Auli 2019, Table 3, on a
corpus that suits one small device.

No numbers are published for these models of 6 to 13M parameters, and none has been trained to the
end here yet. `python -m benchmarks.tables adaptive_inputs_3` compares all eight scaled down
(benchmarks/RESULTS.md). The commands, with a download or with a local copy of the corpus:

    python train.py --config=configs/wikitext2.py:adp_t --workdir=runs/wikitext2 \
        [--config.data.path=DIR]
    python evaluate.py --workdir=runs/wikitext2 --split=test --window=256 --context=128

`ngrams` is `adp_t` with pairs and triples of words at the input, docs/ngrams.md.

AWD-LSTM: 3 layers of 1150, 1150 and 400, tied words with a bias, streams in windows of about 70
words; 33.6M parameters.

- `awd_lstm`: as Merity et al. 2018 trained it, 750 epochs. Their 68.6 / 65.8 is after finetuning;
  the README of the public code has 68.7 / 65.6 without it. Finetuning is a second run, from the
  averages of the first, that takes averages from its first update:

      python train.py --config=configs/wikitext2.py:awd_lstm --workdir=runs/finetuned \
          --init_from=runs/awd_lstm --config.optimizer.name=asgd --config.early_stopping=5
- `awd_sm`: as Apostoae 2019 did, by Adam (Tables 4.1, 4.2 and 4.4). 45 epochs are what it did in
  its 1.5 hours on a GTX 1070. Its alpha is 1 and its beta 2, those of Merity et al. 2 and 1. It
  stops after some number of divisions of the rate; 3 is ours. The other rows of its Table 4.4 are
  in docs/rows.md.

- `groc_…`: the output layers of Pappas et al. 2020, see configs/penn_treebank.py.

Evaluation carries the state through the whole split:

    python train.py --config=configs/wikitext2.py:awd_sm --workdir=runs/awd_sm
    python evaluate.py --workdir=runs/awd_sm --split=test

`awd_small`, `gcnn_small` and `transformer_small` are for comparing bodies on 2 CPU cores in 8 to 12
minutes each: 2M parameters in each body, the same adaptive input and tied softmax. They see 3 to 5
times the text, and that of the Penn Treebank 7 to 10 times.
"""

from adaptive_jax.config import rows
from adaptive_jax.config.rows import Paper, Row
from configs import papers

SETTINGS = {
    "data.corpus": "wikitext2",
    "data.vocabulary_size": 33_278,
    "body.dropout": 0.3,
    "body.activation_dropout": 0.1,
    "optimizer.learning_rate": 0.5,
    "schedule.warmup_steps": 500,  # 500 + 1,000 (1 + 2 + 4) = 7,500 updates
}
CHARACTERS = {
    "width": 32,
    "filters": ((1, 32), (2, 64), (3, 96), (4, 128), (5, 128), (6, 128), (7, 128)),
}
LAYERS = papers.layers(
    cutoffs=(2_500, 10_000), width=128, narrow=64, tail_dropout=0.2, characters=CHARACTERS
)
BPE = {"data.codes": 8_000, "data.vocabulary_size": 8_389}
ROWS = {name: Row(name) for name in ("sm", "sm_t", "asm", "cnn", "adp", "adp_t")}
ROWS |= {"bpe": Row("bpe", BPE), "bpe_t": Row("bpe_t", BPE)}
LAYERS["ngrams"] = papers.with_ngrams(LAYERS["adp_t"], **papers.banded(60_000))
ROWS["ngrams"] = Row("ngrams")
LAYERS |= {"awd_lstm": papers.AWD_LSTM} | papers.thesis_layers((2_500, 10_000))
WORDS = 2_088_628
ROWS |= {
    "awd_lstm": Row(
        "awd_lstm",
        rows.streams(80, WORDS, epochs=750),
        Paper(68.7, 65.6, 33.6, table="Merity et al. 2018, the public code"),
    ),
}
THESIS = {  # perplexity on valid and test, seconds an epoch and in all
    "awd_sm": (82.27, 78.33, 119.3, 5366),
    "hsm_weighted_kmeans_pretrained": (90.92, 85.68, 75.2, 4209),
    "hsm_weighted_kmeans_glove": (94.63, 89.92, 75.7, 3253),
    "hsm_kmeans_pretrained": (92.76, 88.05, 75.1, 3678),
    "hsm_kmeans_glove": (90.92, 87.23, 76.9, 4611),
    "hsm_mixture_pretrained": (94.63, 89.27, 76.2, 3430),
    "hsm_mixture_glove": (90.92, 86.02, 79.3, 4676),
    "hsm_frequency": (90.92, 87.30, 76.4, 5425),
    "awd_asm_autoencoder": (92.76, 87.26, 65.6, 2888),
    "awd_asm": (87.36, 82.99, 64.3, 3793),
    "awd_air_autoencoder": (97.51, 91.41, 61.7, 3331),
    "awd_air": (92.76, 87.79, 62.1, 3103),
}
SETUPS = {  # streams, rate, millions of parameters
    "awd_sm": (64, 0.003, 33.6),
    "awd_hsm": (128, 0.003, 34),
    "awd_asm": (256, 0.003, 33.8),
    "awd_air": (256, 0.003, 24.5),
}
ROWS |= papers.thesis_rows("wikitext2", WORDS, SETUPS, "4.4", THESIS)

LAYERS |= papers.groc_layers(256, (6_000, 21_000))
NET = papers.output_network
CORRECTED = {"output.input_dropout": 0.1, "output.table.correction": 182}
GROC = {  # table, layers, changes of Table 8, perplexity on valid and test, millions of parameters
    "groc_lookup": (2, "groc_lookup", {"output.input_dropout": 0.2}, 113.8, 108.3, 23),
    "groc_convolutional": (2, "groc_convolutional", CORRECTED, 121.2, 116.6, 23),
    "groc_tied": (2, "groc_tied", {}, 101.0, 97.3, 15),
    "groc_bilinear": (2, "groc_bilinear", {"output.table.layer_dropout": 0.4}, 101.3, 95.9, 15),
    "groc_deep_residual": (2, "groc_deep_residual", NET(1, 0.6), 100.1, 94.7, 15),
    "groc_adaptive": (2, "groc_adaptive", {"output.table.dropout": 0.2}, 95.8, 90.7, 9),
    "groc": (2, "groc", NET(1, 0.2, "relu"), 87.0, 82.5, 9),
    "groc_no_relations": (3, "groc", NET(1, 0.3) | papers.NO_RELATIONS, 90.2, 85.3),
    "groc_no_definitions": (3, "groc", NET(2, 0.3, "relu") | papers.NO_DEFINITIONS, 88.6, 84.3),
    "groc_surface": (
        3,
        "groc",
        NET(1, 0.3) | papers.NO_RELATIONS | papers.NO_DEFINITIONS,
        94.3,
        89.8,
    ),
    "groc_plain": (
        3,
        "groc",
        NET(0, 0.2),
        88.7,
        84.1,
    ),  # without output network; Table 8 has no r of these four: our choice
    "groc_plain_no_relations": (3, "groc", NET(0, 0.3) | papers.NO_RELATIONS, 93.0, 88.0),
    "groc_plain_no_definitions": (3, "groc", NET(0, 0.3) | papers.NO_DEFINITIONS, 87.6, 83.1),
    "groc_plain_surface": (
        3,
        "groc",
        NET(0, 0.3) | papers.NO_RELATIONS | papers.NO_DEFINITIONS,
        94.5,
        89.5,
    ),
}
ROWS |= papers.groc_rows(WORDS, GROC)

WIDE_BANDS = {"input.factor": 2}  # of 200, 100 and 50: words of 50 / 4 would be too narrow
SMALL = {
    "awd_small": {
        "batches.layout": "streams",
        "batches.sequence_length": 70,
        "tokens_per_update": 1_400,
        "tokens_per_device": 1_400,
        "body.name": "awd_lstm",
        "body.features": 200,
        "body.widths": (500, 200),
        "body.input_dropout": 0.2,
        "body.hidden_dropout": 0.2,
        "body.dropout": 0.3,
        "body.weight_drop": 0.2,
        "optimizer.name": "adam",
        "optimizer.learning_rate": 0.003,
    },
    "gcnn_small": {
        "batches.sequence_length": 128,
        "tokens_per_update": 1_024,
        "tokens_per_device": 1_024,
        "body.name": "gated_conv",
        "body.features": 200,
        "body.blocks": ((6, 4, 200),),
        "body.dropout": 0.2,
        "optimizer.learning_rate": 1.0,
    },
    "transformer_small": {
        "batches.sequence_length": 128,
        "tokens_per_update": 1_024,
        "tokens_per_device": 1_024,
        "body.layers": 4,
        "body.features": 200,
        "body.heads": 4,
        "body.feed_forward": 800,
        "body.dropout": 0.2,
        "body.attention_dropout": 0.0,
        "body.activation_dropout": 0.0,
        "optimizer.learning_rate": 1.0,
        "optimizer.momentum": 0.9,
        "optimizer.clip_norm": 0.5,
    },
}


def small(steps: dict[str, int]) -> dict[str, Row]:
    """The rows `SMALL` with these numbers of updates: one cosine cycle, evaluated ten times."""
    return {
        name: Row(
            "adp_t",
            WIDE_BANDS
            | SMALL[name]
            | {
                "steps": steps[name],
                "evaluate_every": steps[name] // 10,
                "checkpoint_every": steps[name] // 10,
                "schedule.warmup_steps": steps[name] // 20,
                "schedule.cycle_steps": steps[name] - steps[name] // 20,
                "schedule.cycles": 1,
            },
        )
        for name in steps
    }


ROWS |= small({"awd_small": 5_000, "gcnn_small": 9_000, "transformer_small": 7_000})


def get_config(row="adp_t"):
    """The config of a row of `ROWS`."""
    return rows.config_of(row, __file__, ROWS, LAYERS, SETTINGS)
