"""Every shipped config: it states what the paper states, and a tiny copy of it takes a step."""

import dataclasses
import functools
import importlib
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from optax.tree_utils import tree_get

from adaptive_jax.config.keys import resolve
from adaptive_jax.data.vocabulary.clusters import with_clusters
from adaptive_jax.data.vocabulary.lexicon import lexicon
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.model.language_model import build, parameter_shapes
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.optimizers import optim
from adaptive_jax.parallel import sharding
from adaptive_jax.training.state import shape_of_state
from adaptive_jax.training.update import make_update
from benchmarks import lines
from configs import wikitext103
from tests import refuses
from tests.toys import NoBody

NAMES = [
    path.stem
    for path in sorted((Path(__file__).parents[1] / "configs").glob("*.py"))
    if path.stem not in ("papers", "own_text")
]  # which chooses its sizes: tests/training/test_own_text.py
FILES = {name: importlib.import_module(f"configs.{name}") for name in NAMES}
EIGHT = {"sm", "sm_t", "bpe", "bpe_t", "asm", "cnn", "adp", "adp_t"}
SMALL = {"awd_small", "gcnn_small", "transformer_small"}
CONFIGS = {
    f"{name}:{row}": resolve(file.get_config(row))
    for name, file in FILES.items()
    for row in file.ROWS
}
VOCABULARIES = {  # published sizes
    "penn_treebank": 10_000,
    "wikitext2": 33_278,
    "wikitext103": 267_735,
    "billion_word": 793_471,
}
CLUSTERS = {
    name: config["output"].pop("clusters") for name, config in CONFIGS.items()
}  # files that users make
PUBLISHED = {
    f"{name}:{row}": paper.parameters
    for name, file in FILES.items()
    for row, (_, _, paper) in file.ROWS.items()
    if paper.parameters
}
# Published for a vocabulary padded to a multiple of 8, of 267,744 words; ours has 267,735, and
# 476.75 is rounded the other way.
PADDED = {"wikitext103:sm", "wikitext103:sm_dropout_40"}
# Table 5.1 prints 33.8 and counts an own head everywhere else, here 2,500 words of 400:
# docs/rows.md.
MISPRINTED = {"wikitext2:awd_asm": 34.8, "wikitext2:awd_asm_autoencoder": 34.8}
GCNN, GROC = "Dauphin et al. 2017", "Pappas et al. 2020"
CUT = {
    f"{name}:{row}"
    for name, file in FILES.items()
    for row in file.ROWS
    if GROC in str(file.ROWS[row].paper.table)
}
# The optimizer and schedule of tiny copies, whatever the config has: its momentum is the gradient.
NAG = {name: resolve({})[name] for name in ("optimizer", "schedule")}
WORDS = Vocabulary.build(
    {"<eos>": 3, "<unk>": 2} | {chr(97 + n % 26) * (n % 5) + str(n): 1 for n in range(95)}
)


def tiny(config):
    """The same config with 97 words and narrow layers; what is switched on stays on."""
    source, table = dict(config["input"]), dict(config["output"]["table"])
    if "words" in source:  # of n-grams that are counted no text is here
        source |= {"kind": "hashed", "rows": 11, "row_width": 12, "row_cutoffs": ()}
        source["words"] = dict(source["words"])
    for group in (source.get("words", source), table):
        if group.get("cutoffs"):
            group["cutoffs"] = tuple(11 + 30 * i for i in range(len(group["cutoffs"])))
        if group.get("width"):
            group["width"] = 12
    if table.get("own_head"):
        # Only the input knows the vector of a word of the head; if it is dropped, nothing moves it
        source["word_dropout"] = 0.0
    for group in (source, table):
        if "filters" in group:
            group |= {"filters": ((1, 16), (3, 24)), "length": 10}
            group["strides"] = (1, 2) if group["strides"] else ()
        # One mask an update: some parts do not move.
        group |= {key: 0.0 for key in ("dropout", "layer_dropout") if group.get(key)}
    if table.get("depth") and table.get("form") != "bilinear":
        table |= {"depth": 2, "activation": "selu"}
    if "lexicon" in source:
        source["share"] = 1.0
    if "correction" in table:
        table["correction"] = 12
    rates = {name: 0.2 if rate else 0.0 for name, rate in config["body"].items() if "drop" in name}
    body = config["body"] | rates | {"features": 64} | tiny_sizes(config["body"])
    output = config["output"] | {"table": table}
    if output["input_dropout"]:
        output["input_dropout"] = 0.2
    return config | {"dtype": "float32", "input": source, "body": body, "output": output, **NAG}


def tiny_sizes(body):
    """Few and narrow layers, as wide at the end as at the start; of a gated_conv's blocks, one
    of each shape.
    """
    if "blocks" in body:
        last = body["blocks"][-1][-1]
        widths = sorted({n for block in body["blocks"] for n in block[2::2]})
        narrow = {wide: 64 if wide == last else 12 + 4 * i for i, wide in enumerate(widths)}
        return {
            "blocks": tuple(
                (1, *(narrow[n] if i % 2 else min(n, 2) for i, n in enumerate(sizes)))
                for _, *sizes in body["blocks"]
            )
        }
    if "widths" in body:
        return {"widths": (24,) * (len(body["widths"]) - 1) + (64,)}
    # The rows of test_tiny_copy_takes_a_step have 97 words.
    return {"layers": 2, "heads": 4, "feed_forward": 48, "max_positions": 97}


def tiny_models():
    """Tiny copies by the name of a row: bodies of every kind, and every input with every output,
    for which any body will do.
    """
    configs = {name: tiny(config) for name, config in CONFIGS.items()}

    def kind(body):
        return body["name"], body.get("form"), body.get("positions")

    def layers_of(config):
        """Their classes; tests/test_contracts.py has their settings."""
        return config["input"]["name"], config["output"]["name"], config["output"]["table"]["name"]

    whole = {
        repr(kind(config["body"])): name for name, config in reversed(configs.items())
    }.values()
    layers = {repr(layers_of(configs[name])): name for name in (*reversed(configs), *whole)}
    return [
        pytest.param(configs[name], name in whole, id=name) for name in {*whole, *layers.values()}
    ]


@functools.cache
def millions(model):
    return sum(leaf.size for leaf in jax.tree.leaves(parameter_shapes(model))) / 1e6


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name):
    """To the last digit that the paper gives."""
    config, published = CONFIGS[name], MISPRINTED.get(name, PUBLISHED[name])
    if name in PADDED:
        assert round(millions(build(config, 267_735)), 2) == round(published - 0.05, 2)
    words = 267_744 if name in PADDED else config["data"]["vocabulary_size"]
    if name in CUT:
        return check_cut(build(config, words), published)
    assert (
        round(millions(build(config, words)), 1 if isinstance(published, float) else 0) == published
    )


def check_cut(model, published):
    """GroC's tables cut 13.8 to 13."""
    assert int(millions(model)) == published


def test_every_row_of_the_papers_tables_is_there():
    """Rows by table; a row prints what its table prints. The rows of the small corpora without
    published numbers have no table.
    """
    tables = {}
    for name, file in FILES.items():
        for row, (_, _, paper) in file.ROWS.items():
            tables.setdefault((name, paper.table), {})[row] = paper._replace(table=None)
    thesis, corpora = "Apostoae 2019, Table", ("wikitext103", "billion_word", "news_crawl")
    assert {key: len(rows) for key, rows in tables.items() if key[1] or key[0] in corpora} == {
        ("wikitext103", "Table 2"): 1,
        ("wikitext103", "Table 3"): 8,
        ("wikitext103", "Table 5"): 1,
        ("wikitext103", "Table 6"): 1,
        ("wikitext103", "Table 7"): 11,
        ("wikitext103", "Table 8"): 5,
        ("wikitext103", f"{GCNN}, Table 3"): 3,
        ("wikitext103", f"{thesis} 4.6"): 5,
        ("wikitext103", None): 7,
        ("billion_word", "Table 1"): 4,
        ("billion_word", "Table 4"): 6,
        ("billion_word", f"{GCNN}, Table 2"): 4,
        ("billion_word", f"{GCNN}, Table 4"): 2,
        ("billion_word", None): 2,  # SM and SM-T, which section 5.2 defines
        ("penn_treebank", "Merity et al. 2018, the public code"): 1,
        ("penn_treebank", f"{GCNN}, section 5"): 2,
        ("wikitext2", "Merity et al. 2018, the public code"): 1,
        ("penn_treebank", f"{thesis} 4.3"): 12,
        ("wikitext2", f"{thesis} 4.4"): 12,
        ("europarl", f"{thesis} 4.5"): 7,
        ("europarl", f"{thesis} 5.1"): 5,
        **{
            (name, "Apostoae 2019, section 3.2"): 2
            for name in ("penn_treebank", "wikitext2", "europarl", "wikitext103")
        },
        ("penn_treebank", f"{GROC}, Table 2"): 7,
        ("penn_treebank", f"{GROC}, Table 3"): 7,
        ("penn_treebank", f"{GROC}, Table 4"): 5,
        ("penn_treebank", f"{GROC}, appendix B.4"): 1,
        ("wikitext2", f"{GROC}, Table 2"): 7,
        ("wikitext2", f"{GROC}, Table 3"): 7,
        ("news_crawl", f"{GROC}, Table 5"): 3,
    }
    assert set(tables["wikitext103", "Table 3"]) == EIGHT
    for name in "wikitext2", "penn_treebank":
        assert set(tables[name, None]) == EIGHT | SMALL | {"ngrams"}
    for (name, table), of_table in tables.items():
        number = (table or "").rpartition(" ")[2]
        for paper in of_table.values():
            if (name, table) in {("wikitext103", f"Table {n}") for n in (2, 3, 6, 7, 8)}:
                assert paper.valid and bool(paper.parameters) == (number not in "68")
            if GCNN in str(table) or (name == "billion_word" and table in ("Table 1", "Table 4")):
                assert paper.test and (GCNN in table or paper.hours)
    assert {
        name: rows["awd_sm"][:4]
        for (name, table), rows in tables.items()
        if f"{thesis} 4" in str(table)
    } == {
        "penn_treebank": (69.41, 67.21, 24.2, 0.7),
        "wikitext2": (82.27, 78.33, 33.6, 1.5),
        "europarl": (41.26, 41.58, 45.5, 3.4),
        "wikitext103": (115.58, 115.87, 127.6, 6.0),
    }
    groc = [tables[name, f"{GROC}, Table 2"]["groc"] for name in ("penn_treebank", "wikitext2")]
    assert groc == [(72.5, 69.5, 9, None, None), (87.0, 82.5, 9, None, None)]
    files = [path for path in CLUSTERS.values() if path]
    assert len(files) == len(set(files)) == 4 * 8


def test_counts_of_table_5_1():
    """The definition that gives all of them but one: no biases, an own head, tails that are
    tied, every class of HSM projected.
    """
    body, counts = 20_211_600, {"awd_hsm": {}, "awd_asm": {}, "awd_air": {}}
    for name in ("penn_treebank", "wikitext2", "europarl", "wikitext103"):
        words = FILES[name].SETTINGS["data.vocabulary_size"]
        first, second = FILES[name].LAYERS["awd_air"]["input.cutoffs"]
        counts["awd_hsm"][f"{name}:hsm_frequency"] = 400 * words + 3 * 400 * 400 + 3 * 400
        counts["awd_asm"][f"{name}:awd_asm"] = 400 * words + 2 * 400 * 400 + 2 * 400 + 400 * first
        bands = 400 * first + 133 * (second - first) + 44 * (words - second)
        counts["awd_air"][f"{name}:awd_air"] = (
            bands + 400 * (400 + 133 + 44) + 2 * 400 + 400 * first
        )
    for layers in counts.values():
        for name, count in layers.items():
            assert (
                round(
                    1e6 * millions(build(CONFIGS[name], CONFIGS[name]["data"]["vocabulary_size"]))
                )
                == body + count
            ), name


@pytest.mark.parametrize(
    "row, treebank, wikitext",
    [  # ../shared/reference/groc/param_counts.json, "all_elements"
        ("groc_lookup", 13_032_496, 23_635_454),
        ("groc_convolutional", 13_844_944, 23_668_466),
        ("groc_tied", 10_032_496, 15_116_286),
        ("groc_bilinear", 10_122_796, 15_182_078),
        ("groc_deep_residual", 10_393_696, 15_182_078),
        ("groc_adaptive", 8_179_396, 9_375_582),
        ("groc", 9_787_145, 9_275_745),
        ("groc_surface", 9_516_845, 9_078_881),
    ],
)
def test_counts_of_the_public_code_of_groc(row, treebank, wikitext):
    """To the last one; those of `groc` are of its options concat and predict_bias, without and
    with one layer of output network.
    """
    for name, count in ("penn_treebank", treebank), ("wikitext2", wikitext):
        config = CONFIGS[f"{name}:{row}"]
        assert round(1e6 * millions(build(config, config["data"]["vocabulary_size"]))) == count


def test_a_row_whose_clusters_are_missing():
    """One line names the file and the command that makes it."""
    config = resolve(FILES["penn_treebank"].get_config("hsm_kmeans_glove"))
    with refuses("clusters/penn_treebank_hsm_kmeans_glove.txt", "python -m adaptive_jax clusters"):
        with_clusters(config)


def test_counts_that_two_papers_define():
    """With the vocabularies of fairseq, the released GCNN-14 and GCNN-14B have the counts of
    its code, to the last one.
    """
    for name, words, count in (
        ("wikitext103:gcnn_14", 267_744, 229_305_428),
        ("billion_word:gcnn_14b", 793_480, 428_383_744),
    ):
        assert round(1e6 * millions(build(CONFIGS[name], words))) == count


def test_small_rows_have_the_same_size():
    """They are compared: within 5 % of each other."""
    for name in ("wikitext2", "penn_treebank"):
        sizes = [
            millions(build(CONFIGS[f"{name}:{row}"], FILES[name].SETTINGS["data.vocabulary_size"]))
            for row in SMALL
        ]
        assert max(sizes) < 1.05 * min(sizes)


def test_rows_of_europarl_are_those_of_wikitext103():
    """Over 154,571 words: the same body and layers, and as often read."""
    counts = {"adp_t": 239.69, "sm_t": 281.73, "cnn": 259.10, "adp_t_ngrams": 245.64}
    for row, count in counts.items():
        ours = CONFIGS[f"europarl:{row}"]
        theirs = CONFIGS[f"wikitext103:{row.removesuffix('_ngrams')}"]
        assert round(millions(build(ours, 154_571)), 2) == count
        assert ours["output"] == theirs["output"] and ours["body"] == theirs["body"]
        assert ours["input"].get("words", ours["input"]) == theirs["input"]
        epochs = [
            lines.epochs(config, config["steps"], words)
            for config, words in ((ours, 52_383_095), (theirs, wikitext103.WORDS))
        ]
        assert epochs[0] == pytest.approx(epochs[1], rel=0.03)


def test_settings_agree_with_each_other():
    """Cycles are as long as the run, and the vocabulary is the published one."""
    for name, config in CONFIGS.items():
        schedule, data = config["schedule"], config["data"]
        if "cycles" in schedule:
            cycles = schedule["cycle_steps"] * (2 ** schedule["cycles"] - 1)
            assert config["steps"] == schedule["warmup_steps"] + cycles, name
        published = VOCABULARIES.get(data["corpus"])
        assert data["codes"] or published in (None, data["vocabulary_size"]), name


def test_every_field_of_a_layer_is_a_key():
    """So that what a run does can be read in one place: one row of each choice of classes."""
    groups = "input", "body", "output"
    choices = {}
    for config in CONFIGS.values():
        names = [config[group]["name"] for group in groups]
        choices[*names, config["output"]["table"]["name"]] = config
    given = {"parent", "name", "dtype", "vocabulary_size", "features", "table", "source"}
    given |= {"gather", "word_axes"}
    for config in choices.values():
        model = build(config, config["data"]["vocabulary_size"])
        layers = [(getattr(model, group), config[group]) for group in groups]
        table, settings = model.output.table, config["output"]["table"]
        layers.append((table, settings))
        layers += [(table.cnn, settings["cnn"])] if "cnn" in settings else []
        for layer, settings in layers:
            fields = {
                field.name
                for field in dataclasses.fields(layer)
                if not callable(field.default)  # an initializer is no key
            }
            assert fields - given == set(settings) - given


@pytest.fixture(scope="module")
def own_lexicon(tmp_path_factory):
    """The path of a lexicon of most of `WORDS`."""
    path, words = tmp_path_factory.mktemp("lexicon") / "own.jsonl", WORDS.words
    entries = [
        (word, words[i - 2 : i], " ".join(words[i // 2 : i])) for i, word in enumerate(words)
    ]
    path.write_text(
        "\n".join(
            json.dumps(dict(zip(("word", "relations", "definition"), entry, strict=True)))
            for entry in entries
        )
    )
    return str(path)


def one_update(config, whole, devices):
    """The first update of a config's model over all words, with every dropout on: the gradients,
    which are the optimizer's first momentum, and the metrics.
    """
    mesh, model, optimizer = (
        sharding.device_mesh(devices=devices),
        build(config, len(WORDS)),
        optim.from_config(config),
    )
    if not whole:
        model = model.clone(body=NoBody())  # to compile a body again would show nothing new
    random, layout = np.random.default_rng(0), shape_of_state(model, optimizer, mesh)

    def start(path, a):
        name = jax.tree_util.keystr(path).replace(
            "bias_weights", "weights"
        )  # of a bias that is predicted
        matrix = "params" in name and "bias" not in name
        values = random.normal(0, a.shape[-1] ** -0.5, a.shape) if matrix else np.zeros(a.shape)
        return jax.device_put(values.astype(a.dtype), a.sharding)

    state = jax.tree_util.tree_map_with_path(
        start, layout
    )  # layers' own initialisation would have to be compiled
    ids = np.stack([random.permutation(97) for _ in range(12)]).astype(np.int32).reshape(2, 6, 97)
    batch = Batch(
        ids,
        ids[..., ::-1],
        np.ones(ids.shape, np.float32),
        np.arange(12, dtype=np.int32).reshape(2, 6),
    )
    words = jax.device_put(lexicon(WORDS, model.lexicon_spec()), sharding.replicated(mesh))
    arguments = state, words, sharding.put_batch(mesh, batch, axis=1)
    # Compiled in a hurry: each of these programs runs once.
    update = make_update(model, optimizer, mesh, 0, layout).lower(*arguments)
    state, metrics = update.compile()(*arguments)
    return jax.device_get((tree_get(state.optimizer, "trace"), metrics))


@pytest.mark.parametrize("config, whole", sorted(tiny_models(), key=lambda param: param.id))
def test_tiny_copy_takes_a_step_that_moves_every_parameter(config, whole, own_lexicon):
    """One update gives every entry of every parameter but the keys' bias a momentum. On a GPU or
    TPU, where `make test-device` runs this, it is that of a CPU.
    """
    if "lexicon" in config["input"]:
        config = config | {"input": config["input"] | {"lexicon": own_lexicon}}
    gradients, metrics = one_update(config, whole, jax.devices()[:1])
    if jax.default_backend() != "cpu":
        exact = one_update(config, whole, jax.devices("cpu")[:1])
        largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(exact[0]))

        def equal(a, b):  # what is 0 but for rounding, see `kernel_bias` below, stays that
            atol = max(1e-3 * np.abs(b).max(), 1e-6 * largest)
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=atol)

        jax.tree.map(equal, (gradients, metrics), exact)
    assert all(np.isfinite(value).all() for value in metrics.values())
    # Momentum, not the parameters, shows the gradient: the first rate of a warm-up is 1e-7.
    for path, leaf in jax.tree.leaves_with_path(gradients):
        name = jax.tree_util.keystr(path)
        assert np.isfinite(leaf).all(), name
        if "query_key_value" in name and "bias" in name:
            # A bias of the keys adds the same to all scores of a query, and softmax does not see
            # it.
            leaf = np.delete(leaf.reshape(len(leaf), 3, -1), 1, axis=1)
        if "kernel_bias" in name and config["output"]["table"].get("form") == "bilinear":
            continue  # it, too, adds the same to all logits of a token: the rest is rounding
        if "characters" in name:
            read = {byte for word in WORDS.words for byte in word.encode()[:8]} - set(b"<eosunk>")
            leaf = leaf[
                sorted({byte + 1 for byte in read} if len(leaf) > 256 else read)
            ]  # ELMo's letters count from 1
        leaf = np.atleast_1d(leaf)
        silent = np.abs(leaf).reshape(leaf.shape[0], -1) == 0
        # A unit behind a ReLU may be off for all words, and weight_drop drops weights; everything
        # else must move.
        off = {
            "inner": 0.05,
            "outer": 0.05,
            "highway": 0.6,
            "filter": 0.6,
        }  # narrow filters often start below 0
        # Logits are large, so a word's probability may be 1 as often as the word is the target:
        # 4 or 5 of 97 words, by the version of XLA.
        off["['output']['table']['bias']"] = 0.1
        off |= dict.fromkeys(("recurrent_0", "recurrent_1", "recurrent_2"), 0.3)
        assert silent.mean() < next((most for part, most in off.items() if part in name), 1e-9), (
            name
        )
