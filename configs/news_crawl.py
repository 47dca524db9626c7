r"""News Crawl 2007, 2 million words as Pappas et al. 2020, section C.2, cut them (vocabulary 81K):
the models of their Table 5.

They are scored on texts of other domains.

docs/corpora.md says how to make `DIR` and the directories of the other texts. The paper names no
settings of these models, so they are those of the Penn Treebank in Table 8; the output network of
`groc_out` is that of WikiText-2, whose vocabulary is nearer in size. The paper's vocabulary has all
words, 81K; here the rarest become `<unk>`, which stands for unseen words in validation, so that
80,000 entries are left. Published are test perplexities of 158.6 (`groc`) and 184.3 (`groc_tied`)
on News Crawl 2007; no row has been trained to the end here yet.

    python train.py --config=configs/news_crawl.py:groc --workdir=runs/news \
        --config.data.path=DIR --config.input.lexicon=DIR
    python evaluate.py --workdir=runs/news --split=test --data_path=OTHER --vocabulary=union
    python evaluate.py --workdir=runs/news --split=test --data_path=OTHER --vocabulary=union \
        --method=cache --down_weight=0.1
"""

from adaptive_jax.config import rows
from configs import papers

SETTINGS = {
    "data.corpus": "text_files",
    "data.tokeniser": "moses",
    "data.lower": True,
    "data.limit": 80_000,
    "data.vocabulary_size": 80_000,
}
LAYERS = papers.groc_layers(300, (16_000, 57_000))
GROC = {  # table, layers, changes, perplexity on valid and test of News Crawl 2007
    "groc_tied": (5, "groc_tied", {}, None, 184.3),
    "groc": (5, "groc", papers.output_network(0, 0.2), None, 158.6),
    "groc_out": (5, "groc", papers.output_network(1, 0.2, "relu")),
}
WORDS = 2_000_000
ROWS = papers.groc_rows(WORDS, GROC)


def get_config(row="groc"):
    """The config of a row of `ROWS`."""
    return rows.config_of(row, __file__, ROWS, LAYERS, SETTINGS)
