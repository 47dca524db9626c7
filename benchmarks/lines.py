"""Lines of the papers' tables: what is trained, what is scored, and the published numbers."""

from collections.abc import Mapping
from typing import NamedTuple

from adaptive_jax.config.keys import complete
from adaptive_jax.config.rows import Paper, Row, mean_window, streams
from adaptive_jax.scores.evaluate import Request
from configs import billion_word, europarl, news_crawl, penn_treebank, wikitext2, wikitext103

CORPORA = {
    "penn_treebank": penn_treebank,
    "wikitext2": wikitext2,
    "europarl": europarl,
    "wikitext103": wikitext103,
    "billion_word": billion_word,
}
# The first two million words of News Crawl 2007, and of Europarl, as Pappas et al. 2020, section
# C.2, cut them: docs/corpora.md.
CORPORA |= {"news_crawl": news_crawl, "europarl_2m": news_crawl}
WORDS = {name: file.WORDS for name, file in CORPORA.items()}
TUNED_EPOCHS = 3  # of the target's train text, section 5.1


class Line(NamedTuple):
    """A line of a table.

    Attributes:
        corpus: the config file of its model.
        row: what is trained; lines of one corpus and row share a run.
        paper: published numbers.
        epoch: published seconds an epoch.
        context: tokens that an evaluation gives before those that it scores.
        clusters: how words are clustered, such as ("kmeans", "pretrained"); (): not.
        memory: published megabytes.
        target: text of another domain that is scored, with the words that training never saw; "":
            the corpus itself.
        tuned: words of the target's train text, if the model is finetuned on it before it is
            scored; 0: it is not.
        cache: kind of the cache that the model is mixed with, such as "unigram"; "": none.
        down_weight: factor of the probabilities of new words.
        share: of the vocabulary's words, those that keep their entries in the lexicon when the
            trained model is scored; None: those of the training.
    """

    corpus: str
    row: str
    paper: Paper = Paper()
    epoch: float | None = None
    context: int = 0
    clusters: tuple[str, ...] = ()
    memory: int | None = None
    target: str = ""
    tuned: int = 0
    cache: str = ""
    down_weight: float = 1.0
    share: float | None = None

    @property
    def trained(self) -> str:
        """Name of the run of its corpus and row, from which the finetuned one starts, if there
        is one.
        """
        return f"{self.corpus}-{self.row}"

    @property
    def run(self) -> str:
        """Name of its run."""
        return f"{self.trained}-{self.target}" if self.tuned else self.trained

    @property
    def scored(self) -> str:
        """Kind of a line's score: the context, the share, or the target and
        the cache.
        """
        if self.share is not None:
            return f"share {self.share:g}"
        return f"{self.target} {self.cache}".strip() if self.target else str(self.context)

    def request(self, directory: str | None) -> Request:
        """Text that is scored. directory: that of the target's text; None: the text that the model
        was trained on.
        """
        if not self.target:
            return Request(split="test", context=self.context, share=self.share)
        method = {"method": "cache", "options": {"cache": self.cache}} if self.cache else {}
        return Request(
            "test", data_path=directory, vocabulary="union", down_weight=self.down_weight, **method
        )


class Table(NamedTuple):
    """A table of a paper.

    Attributes:
        title: what it compares, and where it is printed.
        lines: by size: "cpu" scaled down, "full" as published.
        settings: by size, beside those of the rows.
        rows: by size and corpus, rows that its config file does not have, and their layers.
        tuned: scaled down, settings of finetuning beside these.
        operations: whether its figure shows losses by operations of training, not by updates.
    """

    title: str
    lines: Mapping[str, tuple[Line, ...]]
    settings: Mapping[str, dict] = {}
    rows: Mapping[tuple[str, str], tuple[Mapping[str, Row], Mapping[str, dict]]] = {}
    tuned: Mapping[str, object] = {}
    operations: bool = False


def one_cycle(steps: int, every: int, tokens: int, warmup: int) -> dict:
    """Settings of a run of `steps` updates of `tokens`, evaluated and saved after `every` updates,
    whose rate rises for `warmup` updates and then falls once.
    """
    return {
        "steps": steps,
        "evaluate_every": every,
        "checkpoint_every": every,
        "tokens_per_update": tokens,
        "tokens_per_device": tokens,
        "schedule.name": "cosine_cycles",
        "schedule.warmup_steps": warmup,
        "schedule.cycle_steps": steps - warmup,
        "schedule.cycles": 1,
    }


# What a size decides rather than a row.
BUDGET = {
    "steps",
    "evaluate_every",
    "checkpoint_every",
    "tokens_per_update",
    "tokens_per_device",
    "optimizer.learning_rate",
}


def config_of(table: Table, line: Line, size: str) -> dict:
    """The config of a line's model.

    Raises:
        InputError: as `adaptive_jax.config.rows.config_of`.
    """
    file = CORPORA[line.corpus]
    rows, layers = table.rows.get((size, line.corpus), (file.ROWS, file.LAYERS))
    row, settings = rows[line.row], table.settings.get(size, {})
    changes = {
        key: value for key, value in row.changes.items() if key not in BUDGET or key not in settings
    }
    return complete(
        file.SETTINGS, layers[row.layers], settings | changes | tuning(table, line, size)
    )


def epochs(config: Mapping, updates: int, words: int) -> float:
    """Number of times that a config's updates read a text of so many words, `<eos>` included."""
    tokens, window = config["tokens_per_update"], config["batches"]["sequence_length"]
    if config["batches"]["layout"] == "streams":
        tokens *= mean_window(window) / window
    return updates * tokens / words


def tuning(table: Table, line: Line, size: str) -> dict:
    """Changes of finetuning in the config of a line's model."""
    if not line.tuned:
        return {}
    settings = table.settings.get(size)
    if not settings:
        return streams(20, line.tuned, TUNED_EPOCHS, window=35) | {"init_words": "both"}
    steps = TUNED_EPOCHS * line.tuned // settings["tokens_per_update"]
    often = dict.fromkeys(("evaluate_every", "checkpoint_every"), max(1, steps // TUNED_EPOCHS))
    schedule = {"schedule.cycle_steps": steps - settings["schedule.warmup_steps"]}
    return {"steps": steps, "init_words": "both"} | often | schedule | table.tuned
