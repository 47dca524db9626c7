"""Options for scoring lines of text; most are flags of the command."""

from typing import Annotated, NamedTuple

from adaptive_jax.config.options import NonNegativeInt, Option

CONTEXTS = "none", "previous"
DOCUMENTS = "none", "blank"


class ScoreConfig(NamedTuple):
    """Context of the lines, and the sizes of windows.

    Attributes:
        context_from: "none": each line stands alone. "previous": each follows the lines before it.
        given: text before the first line or, with "none", before every line. It is not scored. If
            it does not end with a line feed, each line of text continues its last line. In runs of
            sub-words it then also continues the last word, unless `given` ends in white space: both
            are segmented as one text, and units that lie within `given` are not scored.
        documents: "blank": a blank line ends a document and is not scored; the lines after it see
            nothing before it. "none": a blank line is a line like any other.
        window: tokens of a row; 0: the sequence length that the run was trained with. A run on
            streams carries its state, so a token sees all tokens before it, whatever the window.
        context: tokens that a window repeats from the previous one, if a text is longer than a
            window. None: half a window, but 0 if the run carries its state or its training examples
            saw nothing before them.
        eager: score each line when it arrives, instead of many together.
        rank_and_entropy: also compute ranks and entropies, from the probabilities of all words.
    """

    context_from: Annotated[str, Option(among=CONTEXTS)] = "none"
    given: str = ""
    documents: Annotated[str, Option(among=DOCUMENTS)] = "none"
    window: NonNegativeInt = 0
    context: Annotated[int | None, Option(within="[0, inf)")] = None
    eager: bool = False
    rank_and_entropy: bool = False
