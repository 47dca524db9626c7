"""A trained model, read from its workdir once and handed on."""

import copy
import dataclasses
import functools
import logging
from collections.abc import Callable
from pathlib import Path

import jax
from jax.sharding import Mesh

from adaptive_jax.config.keys import at, with_words, word_group
from adaptive_jax.data.vocabulary.lexicon import check_same_entries, coverage, lexicon, lexicon_of
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.model.language_model import LanguageModel, band_shapes, build, parameter_shapes
from adaptive_jax.parallel import accelerators, sharding
from adaptive_jax.planning.plan import choose_fsdp, devices_to_score
from adaptive_jax.runs.parameters import Parameters, read_parameters
from adaptive_jax.runs.settings import read_config, read_words, with_own_files

logger = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False, repr=False)
class Run:
    """A model with its parameters and words, on devices.

        Run.open(workdir)    # reads all of it
        Run.of(workdir)      # reads its config and words, and the rest when it is first used

    What was read stays, so a run whose workdir is gone can still score; attributes set by
    `with_parts` are never read from files. `dataclasses.replace` changes fields, for which the rest
    is read anew.

    Attributes:
        workdir: None for a run of which nothing is read.
        saved_config: config.json: the settings that the run was started with.
        trained_vocabulary: vocabulary.txt: the words that training knew.
        checkpoint: "best" by validation, "latest", or a step.
        vocabulary: the words to score over: those of training, and new ones after them, see
            `open_words`; by default those of training. A model whose parameters fit any vocabulary
            composes the vectors of new words from what the lexicon says of them; any other model
            has none.
        share: of the words that keep their entries in the lexicon; None: as the run was trained.
    """

    workdir: Path | None
    saved_config: dict
    trained_vocabulary: Vocabulary
    checkpoint: str = "best"
    vocabulary: Vocabulary | None = None
    share: float | None = None

    def __post_init__(self):
        self.vocabulary = self.vocabulary or self.trained_vocabulary

    @classmethod
    def of(cls, workdir: Path) -> "Run":
        """A run of train.py, or an exported model. Raises InputError: no run there, or a damaged
        one.
        """
        accelerators.keep_programs()
        return cls(workdir, read_config(workdir), read_words(workdir))

    @classmethod
    def open(cls, workdir: Path, checkpoint: str = "best") -> "Run":
        """As `of`, with all files read. Of its checkpoint, only the parameters are read, or their
        averages if the optimizer takes them.

        Raises:
            InputError: no run or checkpoint there, or one that cannot be read.
        """
        return dataclasses.replace(cls.of(workdir), checkpoint=checkpoint).read()

    def read(self) -> "Run":
        """Reads all files now; returns this run."""
        _ = self.params, self.step, self.identity, self.lexicon
        return self

    def with_parts(self, **parts) -> "Run":
        """A copy with these attributes; what was read stays."""
        run = copy.copy(self)
        vars(run).update(parts)
        return run

    @functools.cached_property
    def config(self) -> dict:
        """The settings as `build` takes them, whose lexicon is lexicon.jsonl of the workdir; for
        new words, which that lacks, the file that the run was trained with.

        Raises:
            InputError: a share without a lexicon, or new words and another lexicon in the place of
                the run's.
        """
        config = with_own_files(self.saved_config, self.workdir)
        if self._composes_new_words:
            path_of_copy = lexicon_of(config)
            config = with_own_files(self.saved_config, self.workdir, other_words=True)
            if (path := lexicon_of(self.saved_config)) != lexicon_of(config):
                logger.warning("input.lexicon=%r is not here: new words have no entries", path)
            elif path:
                check_same_entries(self.trained_vocabulary, path, path_of_copy)
        if self.share is None:
            return config
        if "share" not in at(config, word_group(config)):
            raise InputError(
                f"share={self.share} is for a run with a lexicon, and this one has none: leave it"
                " out"
            )
        return with_words(config, share=self.share)

    @functools.cached_property
    def model(self) -> LanguageModel:
        """The layers. Reads no file."""
        words = self.vocabulary if self._composes_new_words else self.trained_vocabulary
        return build(self.config, len(words))

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The devices that score. Reads no file."""
        if jax.device_count() == 1:
            return sharding.device_mesh()
        devices = devices_to_score(self.config, jax.device_count(), jax.process_count())
        fsdp = choose_fsdp(self.config, self.model, devices, accelerators.memory())
        return sharding.device_mesh(fsdp, count=devices)

    @functools.cached_property
    def lexicon(self) -> dict:
        """Arrays about the words on every device, see `adaptive_jax.data.vocabulary.lexicon`. Reads
        the lexicon of `config`.
        """
        words = self.vocabulary if self.predicts_new_words else self.trained_vocabulary
        return put_lexicon(self.model, words, self.mesh)

    @functools.cached_property
    def saved(self) -> Parameters:
        """The files of the checkpoint in checkpoints/, or model.safetensors.

        Raises:
            InputError: no such checkpoint, or one that cannot be read.
        """
        shapes = parameter_shapes(self.model)
        specs = sharding.parameter_specs(shapes, self.mesh, self.model)
        like = sharding.with_shardings(shapes, specs, self.mesh)
        return read_parameters(self.workdir, self.checkpoint, like)

    @functools.cached_property
    def params(self) -> dict:
        """The parameters, laid out on `mesh` as `sharding.parameter_specs` says; of `saved`."""
        return self.saved.values

    @functools.cached_property
    def step(self) -> int:
        """Updates that made the parameters; of `saved`."""
        return self.saved.step

    @functools.cached_property
    def identity(self) -> bytes:
        """The checksums of the checkpoint's files, which may be gone since; of `saved`."""
        return self.saved.identity

    @property
    def num_known_words(self) -> int:
        """Words that training knew; they come first in the vocabulary."""
        return len(self.trained_vocabulary)

    @property
    def predicts_new_words(self) -> bool:
        """True if the model gives probability to all words of the vocabulary."""
        return self.model.input.vocabulary_size == len(self.vocabulary)

    @functools.cached_property
    def _composes_new_words(self):
        """True if there are new words and a model that composes their vectors."""
        words = self.trained_vocabulary
        if self.vocabulary is words or self.saved_config["output"]["clusters"]:
            return False  # new words are in no cluster
        config = with_own_files(self.saved_config, self.workdir)
        return fits_any_vocabulary(config, len(words))


def fits_any_vocabulary(config: dict, words: int) -> bool:
    """True if a config's model of this many words has the parameters of a model of more words, and
    the same words in all bands but the last: not so where an output cuts all words evenly.
    """

    def shared(words):
        model = build(config, words)
        return parameter_shapes(model), [len(band.table) for band in band_shapes(model)[:-1]]

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
    if not (spec := model.lexicon_spec()):
        return {}
    arrays, replicated = lexicon(vocabulary, spec), sharding.replicated(mesh)
    if shares := coverage(arrays):
        text = ", ".join(f"{100 * share:.2f} % have {kind}" for kind, share in shares.items())
        show(f"lexicon      of {len(vocabulary):,} words, {text}")
    return jax.tree.map(lambda a: sharding.put(a, replicated), arrays)
