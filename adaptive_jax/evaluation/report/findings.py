"""What a report finds out about each run."""

from collections.abc import Sequence
from typing import NamedTuple

from adaptive_jax.evaluation.card import published
from adaptive_jax.evaluation.report import history
from adaptive_jax.evaluation.report.frequency import Bin, Words, by_frequency, words_of
from adaptive_jax.evaluation.report.history import Context, Curves
from adaptive_jax.evaluation.report.sample import Passage, Token, check_passage, passage_of
from adaptive_jax.evaluation.report.scores import Subject, scores_of
from adaptive_jax.evaluation.scoring import summary

Bins = dict[str, dict[str, list[Bin]]]  # by kind, see `bins_of`, and by run


class Finding(NamedTuple):
    """A run, scored.

    Attributes:
        subject: the run.
        words: losses and frequencies of the words of the text.
        result: as `summary`.
        curves, contexts: see `history`.
        sample: tokens of the passage; none where no passage is asked for.
        published: perplexities that a paper prints of the run's row, of the validation split and of
            this one; None where it does not.
        parameters, hours, speed: None where the run does not say.
    """

    subject: Subject
    words: Words
    result: dict
    curves: Curves
    contexts: list[Context]
    sample: list[Token]
    published: tuple[float | None, float | None]
    parameters: int | None
    hours: float | None
    speed: float | None

    @property
    def name(self) -> str:
        """As the report calls the run."""
        return self.subject.name

    @property
    def validation(self) -> float | None:
        """The validation loss at the checkpoint, in nats a word; None if the run did not log it."""
        return dict(self.curves.validation).get(self.subject.step)


def finding(run: Subject, split: str, passage: Passage) -> Finding:
    """Scores a run's text, unless its `eval/` has the scores, and reads what the run has logged.

    Raises:
        InputError: scores that are not finite, a passage that is no part of the text, or a training
            text that is missing.
    """
    nll = scores_of(run)
    words = words_of(run.ids, nll, run.vocabulary, run.config["data"])
    check_passage(passage, len(words.nll))
    result = summary(nll, run.ids, run.vocabulary)
    contexts = set(history.contexts(run.workdir, split, run.step))
    if run.own_text and run.windows.layout != "streams":
        contexts = {each for each in contexts if each[:2] != run.windows[:2]} | {
            Context(*run.windows[:2], result["perplexity"])
        }
    sample = passage_of(run, nll, passage) if passage.words else []
    run.open.cache_clear()  # the parameters of one run at a time
    return Finding(
        run,
        words,
        result,
        history.curves(run.workdir),
        sorted(contexts, key=lambda each: (each.context, each.window)),
        sample,
        tuple(
            (published(run.workdir, each) or {}).get("perplexity") for each in ("validation", split)
        ),
        history.parameters(run.workdir),
        history.hours(run.workdir, run.step),
        history.speed(run.workdir),
    )


def difference(run: Finding, reference: Finding, edges: Sequence[int]) -> list[Bin]:
    """How much more each word costs in a run than in the reference, by the reference's
    frequencies.
    """
    return by_frequency(run.words.nll - reference.words.nll, reference.words.counts, edges)


def bins_of(found: Sequence[Finding], edges: Sequence[int]) -> Bins:
    """Losses of each run by the frequency of the word ("word"), of the word before ("previous"),
    and differences from the first run ("difference"), where there are several.
    """
    bins = {
        "word": {
            each.name: by_frequency(each.words.nll, each.words.counts, edges) for each in found
        },
        "previous": {
            each.name: by_frequency(each.words.nll, each.words.before(), edges) for each in found
        },
    }
    if len(found) > 1:
        bins["difference"] = {each.name: difference(each, found[0], edges) for each in found[1:]}
    return bins
