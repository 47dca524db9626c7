"""A trained model as an object: `adaptive_jax.load("runs/quickstart")`."""

import functools
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from adaptive_jax.config import keys
from adaptive_jax.data.vocabulary.lines import Lines
from adaptive_jax.data.vocabulary.words import UNKNOWN
from adaptive_jax.errors import InputError, check_known
from adaptive_jax.files import path_of
from adaptive_jax.generation.decoding import Decoder
from adaptive_jax.generation.generate import Continuation, Writer, next_words
from adaptive_jax.generation.options import Options
from adaptive_jax.runs.checkpoints import quietly
from adaptive_jax.runs.run import Run
from adaptive_jax.scores.line_options import ScoreConfig
from adaptive_jax.scores.scores import perplexity
from adaptive_jax.scores.scoring import composed
from adaptive_jax.scores.surprisal import LineScorer, ScoredLine


def by_name(kind: type, values: Mapping[str, object]) -> tuple:
    """`kind(**values)` of `ScoreConfig` or `Options`. Raises InputError for an unknown name."""
    for name, value in values.items():
        check_known(f"option {name}={value!r}", name, kind._fields)
    return kind(**values)


class LoadedModel:
    """A trained model with its words, ready for text.

    Attributes:
        run: the model, its parameters on the devices, its vocabulary, its config and its step.
        lines: converts text to tokens of this model, and back.
    """

    def __init__(self, run: Run):
        self.run = run
        self.lines = Lines.of(run.config["data"], run.vocabulary)

    def encode(self, text: str) -> np.ndarray:
        """Tokens of text, int32 `[tokens]`: words split as in the run's corpus, and an `<eos>` for
        each line feed.

        Raises:
            InputError: text that is not UTF-8, or an unknown word in a run without `<unk>`.
        """
        return self.lines.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens, with a line feed for each `<eos>`; detokenised if the corpus has a
        detokeniser.
        """
        return self.lines.decode(ids)

    def score(
        self, texts: Iterable[str], context_from: str = "none", **options: object
    ) -> Iterator[ScoredLine]:
        """Yields the scores of lines of text, in order. Lines are read as results are consumed, so
        texts may be larger than memory.

            for line in model.score(open("text.txt")):
                print(line.log_prob, line.words, line.log_probs)
            first = next(model.score(["In the beginning God created the heavens and the earth."]))

        Args:
            context_from: "none": each line stands alone. "previous": each follows the lines before
                it.
            options: see `adaptive_jax.scores.line_options.ScoreConfig`.

        Raises:
            InputError: settings that do not fit the run, or an unknown word in a run without
                `<unk>`.
        """
        config = by_name(ScoreConfig, options | {"context_from": context_from})
        return LineScorer(self.run, self.tables, self.lines, config)(texts)

    def perplexity(
        self, lines: Iterable[str], context_from: str = "previous", **options: object
    ) -> float:
        """Perplexity per word of lines of text, `<eos>` included, or per token of a tokenizer. With
        context_from="previous" and the `window` and `context` of an evaluation, it equals that of
        evaluate.py.

        Arguments are those of `score`. Raises InputError as `score`, and if there are no words.
        """
        total, words = 0.0, 0
        for line in self.score(lines, context_from, **options):
            total, words = total + line.log_prob, words + len(line.words)
        if not words:
            raise InputError("lines must have at least one word to score, got none")
        return perplexity(-total / words)

    def embeddings(self, words: Sequence[str]) -> np.ndarray:
        """The input vectors of words, as the body reads them: float32 `[words, features]`.

        Raises:
            InputError: an unknown word, or one that consists of several sub-words.
        """
        if isinstance(words, str):
            raise InputError(f"words must be a list of strings, got {words!r:.40}: use [word]")
        ids, lengths = self.lines.tokens(words)
        for word, token, length in itertools.zip_longest(words, ids, lengths):
            if length != 1 or (self.run.vocabulary.words[token] == UNKNOWN != word):
                vocabulary_text = f"not one of the {len(self.run.vocabulary):,} words"
                fault = f"is {'several units' if length > 1 else vocabulary_text} of this run"
                raise InputError(f"{str(word)[:60]!r} {fault}, and so has no vector: leave it out")
        variables = {"params": self.run.params, "lexicon": self.run.lexicon, "tables": self.tables}
        vectors = self.run.model.apply(variables, ids[:, None], method="vectors")
        return np.asarray(vectors[:, 0], np.float32)

    def generate(self, prompt: str = "", **options: object) -> str:
        """Text that the model writes after a prompt, with the space between them; the first one of
        several samples.

            model.generate("In the beginning", words=20, temperature=0.8, top_p=0.9, seed=1)
            model.generate("In the beginning", lines=1, beams=5)

        Args:
            prompt: begins at the start of a line. Empty: the model begins a line. In runs of
                sub-words, the text may continue its last word, unless it ends in white space.
            options: see `adaptive_jax.generation.options.Options`.

        Raises:
            InputError: an unknown option, a value out of range, and as `encode`.
        """
        return self.continuations(prompt, **options)[0].text

    def continuations(self, prompt: str = "", **options: object) -> list[Continuation]:
        """All samples, or the best of a beam search, with their tokens and log-probabilities in
        nats; as `generate`.
        """
        return Writer(self.decoder, self.lines, prompt, by_name(Options, options)).continuations()

    def stream(self, prompt: str = "", **options: object) -> Iterator[str]:
        """Yields the text of `generate` word by word: `for piece in model.stream("And"):
        print(piece, end="", flush=True)`.
        """
        return Writer(self.decoder, self.lines, prompt, by_name(Options, options)).stream()

    def next_words(self, text: str = "", k: int = 10) -> list[tuple[str, float]]:
        """The k most probable words after a text and their probabilities, the most probable first.

        The result is exact, although tails of the softmax that cannot hold these words are not
        computed. A run of sub-words searches for words with 2 k beams, which may miss some; if the
        text does not end in white space, it finds continuations of the last word, "" for its end.
        For a tokenizer's run, words are tokens and keep their space. Raises InputError as `encode`.
        """
        return next_words(self.decoder, self.lines, text, k)

    @functools.cached_property
    def tables(self) -> dict:
        """Composed vectors of all words, computed once; {} for a model that composes none."""
        return composed(self.run, np.arange(self.run.model.input.vocabulary_size))[0]

    @functools.cached_property
    def decoder(self) -> Decoder:
        """The decoder, which reads and predicts token by token; made once."""
        return Decoder(self.run, self.tables)

    def __repr__(self) -> str:
        config = self.run.config
        layers = " → ".join(config[group]["name"] for group in ("input", "body", "output"))
        return f"<LoadedModel {layers}, {len(self.run.vocabulary):,} words, step {self.run.step:,}>"


def load(
    workdir: str | os.PathLike, checkpoint: str | int = "best", *, allow: Iterable[str] = ()
) -> LoadedModel:
    """Opens a run of train.py, or a converted model, for text.

    Args:
        workdir: the run's directory, or gs://BUCKET/NAME.
        checkpoint: "best" by validation, "latest", or a step.
        allow: modules of other packages whose classes its config may name, such as
            "my_package.layers": they are imported, so their code runs.

    Raises:
        InputError: no run or checkpoint there, or classes of another module.
    """
    keys.allow([allow] if isinstance(allow, str) else allow)
    with quietly():
        return LoadedModel(Run.open(path_of(workdir), str(checkpoint)))
