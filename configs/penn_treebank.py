r"""Penn Treebank (0.93M words, vocabulary 10,000): the eight rows of Baevski & Auli 2019, Table 3,
on the smallest published corpus here. The models are those of configs/wikitext2.py.

For the eight rows of Table 3, models of 5 to 8M parameters here, no numbers are published, and none
was trained to the end. The commands, with a download or with a local copy of the corpus:

    python train.py --config=configs/penn_treebank.py:adp_t --workdir=runs/ptb \
        [--config.data.path=DIR]
    python evaluate.py --workdir=runs/ptb --split=test --window=128 --context=64

`ngrams` is `adp_t` with pairs and triples of words at the input, docs/ngrams.md.

- `gcnn_sentences`, `lstm_sentences`: every sentence is read and scored alone, as by Dauphin et al.
  2017, section 5; sizes of our own.

The AWD-LSTM, see configs/wikitext2.py, has 24.2M parameters here:

- `awd_lstm`: as Merity et al. 2018 trained it, for 500 epochs, with dropout 0.4 and 0.25 in the
  places of 0.65 and 0.2. Their 60.0 / 57.3 is after finetuning, see configs/wikitext2.py; the
  public code's README gives 61.2 / 58.8 without it.
- `groc_…`: the output layers of Pappas et al. 2020 over an LSTM of 2 layers. `groc` reads WordNet,
  see docs/words.md:

      python train.py --config=configs/penn_treebank.py:groc --workdir=runs/groc \
          --config.input.lexicon=DIR

  It has the dropouts and penalties of the commands in the public code's README, `groc_sparse` all
  of what they set, see docs/rows.md. The other outputs have the code's defaults.

- `awd_sm`: as Apostoae 2019 did (Table 4.3). The 83 epochs are what it did in its 45 minutes on a
  GTX 1070. The other rows of that table are in docs/rows.md.

Trained here, one run each (benchmarks/RESULTS.md has commands and curves); test perplexity, with
the published one in brackets: `awd_sm` 64.15 (67.21), `groc_tied` 82.7 (86.2), `groc_adaptive` 78.7
(79.3), `groc_lookup` 87.5 (90.8), `gcnn_sentences` 109.3 (108.7), `lstm_sentences` 107.2 (109.3).
"""

from adaptive_jax.config import rows
from adaptive_jax.config.rows import Paper, Row
from configs import papers, wikitext2

SETTINGS = wikitext2.SETTINGS | {
    "data.corpus": "penn_treebank",
    "data.vocabulary_size": 10_000,
    "batches.sequence_length": 128,
}
LAYERS = papers.layers(
    cutoffs=(2_000, 5_000), width=128, narrow=64, tail_dropout=0.2, characters=wikitext2.CHARACTERS
)
LAYERS["ngrams"] = papers.with_ngrams(LAYERS["adp_t"], **papers.banded(30_000))
BPE = {"data.codes": 4_000, "data.vocabulary_size": 4_298}
LAYERS |= {"awd_lstm": papers.AWD_LSTM} | papers.thesis_layers((1_000, 4_000))
WORDS = 929_589
ROWS = {name: row for name, row in wikitext2.ROWS.items() if name not in wikitext2.GROC}
ROWS |= {
    "bpe": Row("bpe", BPE),
    "bpe_t": Row("bpe_t", BPE),
    "awd_lstm": Row(
        "awd_lstm",
        {
            **rows.streams(20, WORDS, epochs=500),
            "body.input_dropout": 0.4,
            "body.hidden_dropout": 0.25,
        },
        Paper(61.2, 58.8, 24.2, table="Merity et al. 2018, the public code"),
    ),
}
# The paper gives no sizes: these have 2.9M and 3.0M parameters, and adaptive inputs, a tied softmax
# and dropout, which it does not name. Dropout and epochs of the GCNN, 9.9, were chosen on the
# validation split (115.4; 115.7 with dropout 0.35 and 13 epochs).
SENTENCES = {
    "batches.layout": "packed",
    "batches.break_mode": "eos",
    "batches.sequence_length": 128,
    "tokens_per_update": 1_024,
    "tokens_per_device": 1_024,
}
DROPOUT = {"body.input_dropout": 0.3, "body.hidden_dropout": 0.3, "body.weight_drop": 0.3}
SMALL = wikitext2.small({"gcnn_small": 9_000, "awd_small": 12_000})
ROWS["gcnn_sentences"] = Row(
    "adp_t",
    SMALL["gcnn_small"].changes | SENTENCES | {"body.dropout": 0.3},
    Paper(None, 108.7, table="Dauphin et al. 2017, section 5"),
)
ROWS["lstm_sentences"] = Row(
    "adp_t",
    SMALL["awd_small"].changes | SENTENCES | DROPOUT | {"body.dropout": 0.4},
    Paper(None, 109.3, table="Dauphin et al. 2017, section 5"),
)
THESIS = {  # perplexity on valid and test, seconds an epoch and in all
    "awd_sm": (69.41, 67.21, 31.9, 2651),
    "hsm_weighted_kmeans_pretrained": (78.26, 75.25, 25.5, 1506),
    "hsm_weighted_kmeans_glove": (83.93, 80.69, 25.9, 1139),
    "hsm_kmeans_pretrained": (79.04, 75.06, 25.8, 1598),
    "hsm_kmeans_glove": (83.93, 80.75, 25.8, 1108),
    "hsm_mixture_pretrained": (80.64, 77.10, 25.7, 1438),
    "hsm_mixture_glove": (80.64, 77.89, 26.2, 1417),
    "hsm_frequency": (82.27, 79.57, 25.7, 1542),
    "awd_asm_autoencoder": (79.04, 76.44, 25.8, 1650),
    "awd_asm": (78.26, 74.91, 24.5, 1447),
    "awd_air_autoencoder": (91.84, 87.15, 25.3, 1541),
    "awd_air": (84.77, 80.47, 24.6, 1597),
}
SETUPS = {  # streams, rate, millions of parameters
    "awd_sm": (128, 0.003, 24.2),
    "awd_hsm": (256, 0.003, 24.7),
    "awd_asm": (256, 0.003, 24.9),
    "awd_air": (256, 0.003, 21.9),
}
ROWS |= papers.thesis_rows("penn_treebank", WORDS, SETUPS, "4.3", THESIS)

LAYERS |= papers.groc_layers(300, (2_000, 7_000))
LAYERS["groc"] |= {  # of the commands in the public code's README
    "body.input_dropout": 0.4,
    "body.hidden_dropout": 0.25,
    "body.ar": 2.0,
    "body.tar": 1.0,
}
NET = papers.output_network
GROC = {  # table, layers, changes of Table 8, perplexity on valid and test, millions of parameters
    "groc_lookup": (2, "groc_lookup", {"output.input_dropout": 0.1}, 93.5, 90.8, 13),
    "groc_convolutional": (
        2,
        "groc_convolutional",
        {"output.input_dropout": 0.1},
        104.0,
        101.6,
        13,
    ),
    "groc_tied": (2, "groc_tied", {}, 88.6, 86.2, 10),
    "groc_bilinear": (2, "groc_bilinear", {"output.table.layer_dropout": 0.5}, 87.0, 83.7, 10),
    "groc_deep_residual": (2, "groc_deep_residual", NET(4, 0.5), 84.0, 80.5, 10),
    "groc_adaptive": (2, "groc_adaptive", {"output.table.dropout": 0.3}, 84.0, 79.3, 8),
    "groc": (2, "groc", NET(0, 0.2), 72.5, 69.5, 9),
    "groc_no_relations": (3, "groc", NET(0, 0.3) | papers.NO_RELATIONS, 74.2, 70.8),
    "groc_no_definitions": (3, "groc", NET(0, 0.2) | papers.NO_DEFINITIONS, 74.4, 71.1),
    "groc_surface": (
        3,
        "groc",
        NET(0, 0.3) | papers.NO_RELATIONS | papers.NO_DEFINITIONS,
        76.3,
        73.2,
    ),
    "groc_out": (
        3,
        "groc",
        NET(1, 0.2),
        75.0,
        71.4,
    ),  # Table 8 has no k, activation and r of these four: our choice
    "groc_out_no_relations": (3, "groc", NET(1, 0.3) | papers.NO_RELATIONS, 77.1, 72.7),
    "groc_out_no_definitions": (3, "groc", NET(1, 0.2) | papers.NO_DEFINITIONS, 75.6, 72.0),
    "groc_out_surface": (
        3,
        "groc",
        NET(1, 0.3) | papers.NO_RELATIONS | papers.NO_DEFINITIONS,
        79.8,
        75.8,
    ),
}
GROC["groc_sparse"] = ("appendix B.4", "groc", NET(0, 0.2) | {"compose_share": 0.3}, None, 75.3)
# Table 4: test perplexity by coverage in percent
TRAINED = {0: 72.4, 16: 70.0, 32: 70.4, 48: 69.6, 64: 70.7}
GROC |= {
    f"groc_coverage_{n}": (4, "groc", NET(0, 0.2) | {"input.share": n / 100}, None, ppl)
    for n, ppl in TRAINED.items()
}
ROWS |= papers.groc_rows(WORDS, GROC)


def get_config(row="adp_t"):
    """The config of a row of `ROWS`."""
    return rows.config_of(row, __file__, ROWS, LAYERS, SETTINGS)
