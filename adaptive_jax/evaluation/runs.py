"""A trained model, opened for evaluation."""

import logging
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from adaptive_jax.data.vocabulary.entries import lexicon_of
from adaptive_jax.data.vocabulary.lexicon import coverage, lexicon
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.model.language_model import LanguageModel, build, parameter_shapes
from adaptive_jax.parallel import accelerators, hosts, sharding
from adaptive_jax.planning.plan import choose_fsdp
from adaptive_jax.workdir.parameters import read_parameters
from adaptive_jax.workdir.settings import read_config, read_words, with_own_files

logger = logging.getLogger(__name__)


class Run(NamedTuple):
    """A model with its parameters and words, on devices.

    Attributes:
        params: laid out on `mesh` as `sharding.parameter_specs` says.
        lexicon: arrays about the words, replicated; see `adaptive_jax.data.vocabulary.lexicon`.
        step: updates that made the parameters.
        more: words at the end of the vocabulary that training did not know.
    """

    model: LanguageModel
    params: dict
    lexicon: dict
    mesh: Mesh
    vocabulary: Vocabulary
    config: dict
    step: int
    more: int = 0

    @property
    def known(self) -> int:
        """Words that training knew; they come first in the vocabulary."""
        return len(self.vocabulary) - self.more


def open_run(
    workdir: Path,
    checkpoint: str = "best",
    vocabulary: Vocabulary | None = None,
    share: float | None = None,
) -> Run:
    """Opens a run of train.py, or an exported model: reads its parameters, or their averages, and
    nothing else.

    Args:
        checkpoint: "best" by validation, "latest", or a step.
        vocabulary: score over these words instead of the run's own; the model must compose its
            vectors from what the lexicon says of a word, so that its parameters fit any vocabulary.
        share: of the words, those that keep their entries in the lexicon; None: as the run was
            trained.

    Raises:
        InputError: no run or checkpoint there, or a vocabulary that the parameters do not fit.
    """
    own = read_words(workdir)
    vocabulary = vocabulary or own
    given, other_words = read_config(workdir), not own.index.keys() >= vocabulary.index.keys()
    config = with_own_files(given, workdir, other_words)
    if other_words and lexicon_of(config) != lexicon_of(given):
        logger.warning(
            "there is no input.lexicon=%r any more: new words have no entries", lexicon_of(given)
        )
    if share is not None:
        if "share" not in config["input"]:
            raise InputError(
                f"share={share} is for a run with a lexicon, and this one has none: leave it out"
            )
        config = config | {"input": config["input"] | {"share": share}}
    accelerators.keep_programs(config["data"]["cache"])
    model = build(config, len(vocabulary))
    mesh = sharding.device_mesh(
        choose_fsdp(config, len(vocabulary), jax.device_count(), accelerators.memory())
    )
    shapes = parameter_shapes(model)
    like = jax.tree.map(
        lambda a, spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec)),
        shapes,
        sharding.parameter_specs(shapes, mesh),
    )
    step, params = read_parameters(workdir, checkpoint, like)
    return Run(
        model,
        params,
        put_lexicon(model, vocabulary, mesh, config["data"]["cache"]),
        mesh,
        vocabulary,
        config,
        step,
    )


def put_lexicon(model: LanguageModel, vocabulary: Vocabulary, mesh: Mesh, cache: str = "") -> dict:
    """The arrays about words that a model wants, on every device. Says how many words have entries
    in a lexicon.

    cache: as `lexicon` takes it.
    """
    arrays, whole = lexicon(vocabulary, model.wants(), cache), sharding.replicated(mesh)
    if shares := coverage(arrays):
        said = ", ".join(f"{100 * share:.2f} % have {kind}" for kind, share in shares.items())
        hosts.say(f"lexicon      of {len(vocabulary):,} words, {said}")
    # Not device_put, by which several hosts send each other every array to check that they are
    # equal.
    return jax.tree.map(
        lambda a: jax.make_array_from_callback(a.shape, whole, lambda index: a[index]), arrays
    )
