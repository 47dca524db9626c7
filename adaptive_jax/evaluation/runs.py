"""A trained model, read from its workdir once and handed on."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from adaptive_jax.data.vocabulary.lexicon import check_same_entries, coverage, lexicon, lexicon_of
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.model.language_model import (
    LanguageModel,
    build,
    parameter_shapes,
    variable_shapes,
)
from adaptive_jax.parallel import accelerators, sharding
from adaptive_jax.planning.plan import choose_fsdp, devices_to_score
from adaptive_jax.workdir.parameters import read_parameters
from adaptive_jax.workdir.settings import read_config, read_words, with_own_files

logger = logging.getLogger(__name__)


class Run(NamedTuple):
    """A model with its parameters and words, on devices; `Run.open(workdir)` reads one.

    Attributes:
        params: laid out on `mesh` as `sharding.parameter_specs` says.
        lexicon: arrays about the words, replicated; see `adaptive_jax.data.vocabulary.lexicon`.
        config: as `build` takes it, with the paths of the run's own files.
        step: updates that made the parameters.
        num_new_words: words at the end of the vocabulary that training did not know.
        identity: the checksums of the checkpoint's files, which may have been deleted since.
    """

    model: LanguageModel
    params: dict
    lexicon: dict
    mesh: Mesh
    vocabulary: Vocabulary
    config: dict
    step: int
    num_new_words: int = 0
    identity: bytes = b""

    @classmethod
    def open(cls, workdir: Path, checkpoint: str = "best") -> "Run":
        """Opens a run of train.py, or an exported model. Of its checkpoint, only the parameters
        are read, or their averages if the optimizer takes them.

        checkpoint: "best" by validation, "latest", or a step.

        Raises:
            InputError: no run or checkpoint there, or one that cannot be read.
        """
        return SavedRun.read(workdir).load(checkpoint)

    @property
    def num_known_words(self) -> int:
        """Words that training knew; they come first in the vocabulary."""
        return len(self.vocabulary) - self.num_new_words

    @property
    def predicts_new_words(self) -> bool:
        """True if the model gives probability to all words of the vocabulary."""
        return self.model.input.vocabulary_size == len(self.vocabulary)


class SavedRun(NamedTuple):
    """Run as its workdir describes it, before its parameters are read.

    config: the config that the run was started with.
    """

    workdir: Path
    config: dict
    vocabulary: Vocabulary

    @classmethod
    def read(cls, workdir: Path) -> "SavedRun":
        """Reads the config and the words. Raises InputError: no run there, or a damaged one."""
        return cls(workdir, read_config(workdir), read_words(workdir))

    def model(self) -> LanguageModel:
        """The model that the run trains."""
        return build(with_own_files(self.config, self.workdir), len(self.vocabulary))

    def load(
        self,
        checkpoint: str = "best",
        vocabulary: Vocabulary | None = None,
        share: float | None = None,
    ) -> Run:
        """Reads the parameters onto the devices.

        Args:
            checkpoint: "best" by validation, "latest", or a step.
            vocabulary: the run's words with new ones after them, see `open_words`. A model whose
                parameters fit any vocabulary composes the vectors of new words from what the
                lexicon says of them; any other model has none.
            share: of the words, those that keep their entries in the lexicon; None: as the run
                was trained.

        Raises:
            InputError: no such checkpoint, one that cannot be read, a share without a lexicon, or
                new words and another lexicon in the place of the run's.
        """
        config, words = with_own_files(self.config, self.workdir), self.vocabulary
        vocabulary = vocabulary or words
        num_new_words = len(vocabulary) - len(words)
        # New words are in no cluster.
        if (
            num_new_words
            and not self.config["output"]["clusters"]
            and fits_any_vocabulary(config, len(words))
        ):
            words, config = vocabulary, with_own_files(self.config, self.workdir, other_words=True)
            if (lexicon := lexicon_of(self.config)) != lexicon_of(config):
                logger.warning("input.lexicon=%r is not here: new words have no entries", lexicon)
            elif lexicon:
                kept = lexicon_of(with_own_files(self.config, self.workdir))
                check_same_entries(self.vocabulary, lexicon, kept)
        if share is not None:
            if "share" not in config["input"]:
                raise InputError(
                    f"share={share} is for a run with a lexicon, and this one has none: leave it"
                    " out"
                )
            config = config | {"input": config["input"] | {"share": share}}
        accelerators.keep_programs()
        model = build(config, len(words))
        devices = devices_to_score(config, jax.device_count(), jax.process_count())
        fsdp = choose_fsdp(config, len(words), devices, accelerators.memory())
        mesh = sharding.device_mesh(fsdp, count=devices)
        shapes = parameter_shapes(model)
        like = jax.tree.map(
            lambda a, spec: jax.ShapeDtypeStruct(
                a.shape, a.dtype, sharding=NamedSharding(mesh, spec)
            ),
            shapes,
            sharding.parameter_specs(shapes, mesh, model),
        )
        step, params, identity = read_parameters(self.workdir, checkpoint, like)
        arrays = put_lexicon(model, words, mesh)
        return Run(model, params, arrays, mesh, vocabulary, config, step, num_new_words, identity)


def fits_any_vocabulary(config: dict, words: int) -> bool:
    """True if a config's model of so many words has the parameters of a model of more words, and
    all bands but the last have the same words: not so where an output cuts all words evenly.
    """

    def shared(words):
        model = build(config, words)
        shapes = variable_shapes(model)
        bands = jax.eval_shape(lambda v: model.apply(v, method=lambda m: m.output.bands()), shapes)
        return shapes["params"], [len(band.table) for band in bands[:-1]]

    return shared(words) == shared(2 * words)


def put_lexicon(
    model: LanguageModel,
    vocabulary: Vocabulary,
    mesh: Mesh,
    show: Callable[[str], None] = lambda line: None,
) -> dict:
    """The arrays about words that a model wants, on every device.

    show: called with a line that says how many words have entries in a lexicon, if there is one.
    """
    arrays, replicated = lexicon(vocabulary, model.lexicon_spec()), sharding.replicated(mesh)
    if shares := coverage(arrays):
        said = ", ".join(f"{100 * share:.2f} % have {kind}" for kind, share in shares.items())
        show(f"lexicon      of {len(vocabulary):,} words, {said}")
    return jax.tree.map(lambda a: sharding.put(a, replicated), arrays)
