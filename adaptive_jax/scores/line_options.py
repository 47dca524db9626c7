"""Options of scoring lines of text, most of which are flags of the command."""

from typing import Annotated, NamedTuple

from adaptive_jax.config.options import NonNegativeInt, Option

CONTEXTS = "none", "previous"
DOCUMENTS = "none", "blank"


class ScoreConfig(NamedTuple):
    """Context of a line, and sizes of what the model reads at once.

    Attributes:
        context_from: "none": each line stands alone. "previous": each follows the lines before it.
        given: text that the first line follows; with "none", every line follows it. It is not
            scored. If it ends with a line feed, it is whole lines; otherwise each line of text
            continues its last line, and in runs of sub-words its last word, unless it ends in white
            space: both are segmented as one text, and units that lie in `given` are not scored.
        documents: "blank": a blank line ends a document and is not scored; what follows sees
            nothing before it. "none": a blank line is a line like others.
        window: tokens of a row; 0: the sequence length that the run was trained with. A run on
            streams carries its state, so a token sees all before it, whatever the window.
        context: tokens that a window repeats from the one before, where a text is longer than a
            window. None: half a window, but 0 where examples of the run's training saw nothing
            before them, or the run carries its state.
        eager: score each line as it comes, instead of many together.
        rank_and_entropy: also compute these two, from the probabilities of all words.
    """

    context_from: Annotated[str, Option(among=CONTEXTS)] = "none"
    given: str = ""
    documents: Annotated[str, Option(among=DOCUMENTS)] = "none"
    window: NonNegativeInt = 0
    context: Annotated[int | None, Option(within="[0, inf)")] = None
    eager: bool = False
    rank_and_entropy: bool = False
