"""GroC's public code as its reference numbers give it: words, parameters, dropout and tables."""

import re

import numpy as np
import pytest

from adaptive_jax.inputs import letters
from adaptive_jax.inputs.adaptive import AdaptiveInput
from adaptive_jax.inputs.char_cnn import CharacterCNN
from adaptive_jax.inputs.groc import GroC
from adaptive_jax.inputs.lookup import Lookup
from adaptive_jax.numerics import dropout
from adaptive_jax.outputs.computed import AssembledTable, ComposedTable, MappedTable
from tests.reference import sets

GROC = sets.code("groc")
STRIDES = (1, 1, 2, 3, 4, 5)
# What the public code's options are without a word in its command
DEFAULTS = {
    "max_rellen": 3,
    "max_deflen": 10,
    "char_emsize": 16,
    "max_charlen": 20,
    "char_activation": "selu",
    "hdepth": 1,
    "combine": "add",
    "init": 0.1,
    "alpha": 2.0,
    "beta": 1.0,
}


def option(command, name, default=None):
    """The value of an option in a command of the public code, of the type of its default."""
    default = DEFAULTS.get(name, default)
    match = re.search(rf"--{name}[ =](\S+)", command)
    return type(default)(match[1]) if match else default


def of_code(arrays):
    """Parameters of the public code's encoder, or their gradients, by our names."""
    plain = {"char_emb": "characters", "char_linear": "projection", "comb_lin": "map"}
    ours = {}
    for name, array in arrays.items():
        parts = name.strip("_").split(".")
        matrix = parts[-1] == "weight"
        if parts[0] == "char_network":
            ours[f"filter_{'' if matrix else 'bias_'}{parts[1]}"] = array.T
        elif parts[0] == "char_highways":
            ours[f"highway_{'' if matrix else 'bias_'}{parts[2]}"] = array.T
        elif parts[0] in plain:
            same = plain[parts[0]] + ("" if matrix else "_bias")
            ours[same] = array if same == "characters" else array.T
    return ours


def params_of(file, case):
    """The parameters of a case by the public code's names, which cases share."""
    homes, stored = GROC.settings(file, case)["param_from"], GROC.arrays(file)
    return {name: stored[f"{home}/param/{name}"] for name, home in homes.items()}


def filters_of(settings):
    """Filters, of which the files name the widths where they are not 1, 2, 3 …"""
    counts = settings["conv_counts"]
    widths = settings.get("conv_widths", range(1, len(counts) + 1))
    return tuple(zip(widths, counts, strict=True))


def encoder_settings(settings):
    """Arguments of the layer, by the settings of a case; lists are as long as the file's."""
    lists = GROC.arrays("encoder", "tables/")
    most = {name: lists[name].shape[1] for name in ("relations", "definitions")}
    return {
        "form": "code",
        "width": settings["char_emsize"],
        "filters": filters_of(settings),
        "strides": tuple(settings.get("conv_strides", STRIDES)),
        "length": settings["max_charlen"],
        "activation": settings["char_activation"],
        "highway_layers": 0 if settings.get("char_nohighways") else settings["hdepth"],
        "combine": "concat" if settings["combine"] == "concat" else "add",
        "relations": settings.get("max_rellen", most["relations"]) * settings["rel_emb"],
        "definition": settings.get("max_deflen", most["definitions"]) * settings["def_emb"],
    }


def settings_of_command(command, case):
    """The settings of a case that has a command: its options, and the public code's defaults."""
    settings = {name: option(command, name) for name in DEFAULTS}
    flags = ("rel_emb", "def_emb", "char_nohighways")
    return settings | {name: f"--{name}" in command for name in flags} | case


def encoder_of(words, settings):
    """The layer with the settings of a case."""
    return GroC(words, settings["emsize"], lexicon="given", **encoder_settings(settings))


def rows(table, chunk):
    """A table of word ids as ours: -1 for no word; the last of each chunk of words has none, as
    in the public code.
    """
    ids = np.where(table == len(table) - 1, -1, table).astype(np.int32)
    ids[[*range(chunk - 1, len(ids), chunk), -1]] = -1
    return {"words": ids[:-1]}


def misread(characters, read):
    """The input of the public code's convolutions, `[words, columns, width]`, in the place of
    `letters.letter_vectors`: it takes the numbers `[columns, width]` of a word's letters for
    `[width, columns]` ones, without transposing them.
    """
    words, columns, width = *read.shape, characters.shape[1]
    return characters[read].reshape(words, width, columns).transpose(0, 2, 1)


@pytest.fixture
def as_the_code(monkeypatch):
    """Filters see letters as in the public code, which puts padding in the middle."""
    monkeypatch.setattr(letters, "letter_vectors", misread)
    for layer in CharacterCNN, GroC:
        monkeypatch.setattr(layer, "on_cpu", layer.on_cpu._replace(short=()))


def spelt(ids):
    """Letters in the public code's order of words."""
    return {
        "letters": ids.astype(np.int16),
        "lengths": np.full(len(ids), ids.shape[1], np.int32),
        "row_of_word": np.arange(len(ids), dtype=np.int32),
    }


def lexicon_of(settings):
    """The words of `encoder`, spelt, and their lists, as a layer reads them."""
    tables, most = GROC.arrays("encoder", "tables/"), {"relations": "rel", "definitions": "def"}
    lists = {
        name: rows(tables[name][:, : settings.get(f"max_{short}len")], settings["div"])
        for name, short in most.items()
    }
    return {"spelling": spelt(tables["char_ids"][:-1])} | lists


def needed(given, model):
    """The part of a lexicon that the layer reads."""
    return {name: given[name] for name in model.lexicon_spec}


def is_ours(settings):
    """True if a layer of this project makes the vectors of a case."""
    whole = settings["call"].startswith("whole")
    return whole and not settings["defenc"] and settings["combine"] in ("add", "concat")


def masks_in(settings, arrays):
    """Masks in the order that a table asks for them, chunk by chunk of words; that of what predicts
    biases, or None. The public code draws those of its LSTM between.
    """
    kinds = [each["kind"] for each in settings["masks_in_call_order"]]
    masks = [arrays[f"mask_{i}"].squeeze() > 0 for i in range(len(kinds))]
    of_bias = masks.pop() if kinds and kinds[-1] == "bias_drop" else None
    first = int(bool(masks) and settings["output_dropout"] > 0)
    inner = settings["nlayers"] - 1
    between = sum(settings[name] > 0 for name in ("dropouti", "dropout"))
    between += inner * (settings["dropouth"] > 0)
    maps = masks[first + between :]
    depth = layers_of(settings)
    assert len(maps) % depth == 0 if depth else not maps
    chunks = [maps[i : i + depth] for i in range(0, len(maps), depth or 1)] or [[]]
    return [masks[:first] + chunk for chunk in chunks], of_bias


def layers_of(settings):
    """The number of maps of the output network."""
    if settings["bilinear"]:
        return 1
    return settings["joint_emb_depth"] if settings["joint_emb"] else 0


def table_of(settings, params, vectors):
    """Our table with the settings of a case, its parameters, and what it reads; `vectors` are those
    that the input makes of words.
    """
    train, width, words = settings["mode"] == "train", settings["emsize"], settings["vocabulary"]
    rate = settings["output_dropout"] if train else 0.0
    how = {"bias": "predicted" if settings["predict_bias"] else "own"}
    tables = [name for name in params if name.startswith("_decoder.") and name != "_decoder.bias"]
    home = "_decoder" if tables else "_lookup"
    if settings["adaptiveoutputs"] or settings["adaptiveoutputs_tied"]:
        cuts = map(int, re.findall(r"\d+", settings["adaptivecutoffs"]))
        cuts = tuple(cut for cut in cuts if cut < words)
        table = AssembledTable(AdaptiveInput(words, width, cuts), width, dropout=rate, **how)
        ours = {"source": adaptive_of(params, home)}
    elif settings["cnnsoftmax"]:
        names = "width", "filters", "highway_layers", "length", "strides", "activation"
        shape = encoder_settings(settings)
        shape = {name: shape[name] for name in names}
        cnn = CharacterCNN(words, width, letters="elmo", **shape)
        table = ComposedTable(cnn, width, correction=settings["cnncorr"] or 0, **how)
        ours = corrections_of(params)
    else:
        how |= {"form": "bilinear" if settings["bilinear"] else "residual", "dropout": rate}
        how |= {"depth": layers_of(settings)} if not settings["bilinear"] else {}
        how |= {"layer_dropout": settings["joint_dropout"] if train else 0.0}
        table = MappedTable(
            Lookup(words, width), width, activation=settings["joint_emb_activation"].lower(), **how
        )
        plain = params.get(f"{home}.weight") if vectors is None else vectors
        ours = {"source": {"table": plain}}
    return table, ours | outer_of(params)


def adaptive_of(params, home):
    """Bands of an adaptive embedding as `AdaptiveInput` has them."""
    ours = {}
    for name, array in params.items():
        if name.startswith(f"{home}.emb"):
            _, kind, band, *_ = name.split(".")
            ours[f"{'table' if kind == 'emb_layers' else 'projection'}_{band}"] = (
                array if kind == "emb_layers" else array.T
            )
    return ours


def corrections_of(params):
    """The CNN of a `ComposedTable`, and the corrections where there are any."""
    ours = {"cnn": of_code({name: a for name, a in params.items() if name.startswith("_char")})}
    if "_cnnsoftmax_M.weight" in params:
        ours["corrections"] = params["_cnnsoftmax_correction.weight"]
        ours["correction_map"] = params["_cnnsoftmax_M.weight"].T
    return ours


def outer_of(params):
    """Biases, and the maps of an output network."""
    ours = {}
    if "_bias.bias" in params:
        ours |= {"bias": params["_bias.bias"][0], "bias_weights": params["_bias.weight"].T}
    elif "_bias.weight" in params:
        ours |= {"bias": params["_bias.weight"][0]}
    elif "_decoder.bias" in params:
        ours |= {"bias": params["_decoder.bias"]}
    for name, array in params.items():
        if name.startswith("_output_network"):
            _, layer, kind = name.split(".")
            ours[f"kernel_{'' if kind == 'weight' else 'bias_'}{layer}"] = array.T
    return ours


def in_order(monkeypatch, chunks):
    """Dropout keeps what these masks say, in the order of the calls."""
    masks = iter([mask for chunk in chunks for mask in chunk])
    monkeypatch.setattr(dropout, "keep_mask", lambda *_: next(masks))
