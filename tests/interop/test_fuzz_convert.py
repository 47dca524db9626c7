"""Any list of words, options and torch file: read, or refused in one line, in little memory and
time.
"""

import functools
import pickle
import struct
import time
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive_jax.data.vocabulary.on_disk import read_vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.interop import torch_files
from adaptive_jax.interop.convert import convert
from adaptive_jax.interop.fconv import MAX_LAYERS, blocks_of, layers_of
from adaptive_jax.interop.words import awd_lstm_words, read_corpus, read_dictionary
from tests.interop.torch_writer import STORAGE, Module, as_stream, as_zip, reference, save

FIXTURES = Path(__file__).parents[1] / "fixtures"
ZIP, STREAM = FIXTURES / "torch_zip.pt", FIXTURES / "torch_stream.pt"
fuzz = settings(max_examples=50)
MEMORY, SECONDS = 16 << 20, 5


def bounded(read, path):
    """The contents of a file, or the one line that refuses it; either within memory and time."""
    tracemalloc.start()
    start = time.perf_counter()
    try:
        return read(path)
    except InputError as error:
        assert "\n" not in str(error) and str(path) in str(error)
        return str(error)
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < MEMORY and time.perf_counter() - start < SECONDS
        assert list(path.parent.iterdir()) == [path]


LINE = st.tuples(
    st.text(max_size=4),
    st.sampled_from([" ", "  ", "\t", ""]),
    st.integers(-2, 10**20),
    st.sampled_from(["", " #fairseq:overwrite", "\r"]),
)


@fuzz
@given(
    content=st.binary(max_size=60)
    | st.lists(LINE, max_size=6).map(
        lambda lines: "".join(f"{w}{s}{n}{o}\n" for w, s, n, o in lines).encode(
            "utf-8", "surrogatepass"
        )
    )
)
def test_dictionaries(content, tmp_path_factory):
    """A dictionary that is read has fairseq's special words first and can be used."""
    path = tmp_path_factory.mktemp("dict") / "dict.txt"
    path.write_bytes(content)
    words = bounded(read_dictionary, path)
    if not isinstance(words, str):
        assert words.words[:4] == ("<s>", "<pad>", "<eos>", "<unk>") and len(words.index) == len(
            words
        ) == len(words.counts)


@fuzz
@given(
    content=st.binary(max_size=60)
    | st.lists(st.sampled_from(["a", "b c", "<eos>", "\x85", "\r", "é", ""]), max_size=6).map(
        lambda lines: "\n".join(lines).encode()
    ),
    whole=st.booleans(),
)
def test_word_lists(content, whole, tmp_path_factory):
    """Of a corpus or of a file with one word a line: what is read can be encoded and written."""
    path = tmp_path_factory.mktemp("words") / ("corpus" if whole else "words.txt")
    if whole:
        path.mkdir()
        for split in "train", "valid", "test":
            (path / f"{split}.txt").write_bytes(content)
    else:
        path.write_bytes(content)
    words = bounded(read_corpus, path)
    if not isinstance(words, str):
        state = {"encoder.weight": np.zeros((len(words), 1))}
        vocabulary, _ = awd_lstm_words(path, state)
        vocabulary.write(path.parent / "vocabulary.txt")
        assert read_vocabulary(path.parent / "vocabulary.txt").words == vocabulary.words


LAYERS = "[(16, 4)]", "[(8, 1, 0), (16, 4, 2)]", "[(16, 4, 1)]", "[]"
TOKENS = "[", "]", "(", ")", ",", "*", "+", "-", "4", "16", "0", "x", "'a'", *LAYERS
NUMBERS = "1", "3", "-2", "999", "999999999"
SUMS = st.lists(
    st.tuples(st.sampled_from(LAYERS), st.sampled_from(NUMBERS)).map(" * ".join), max_size=4
)


@fuzz
@given(
    text=SUMS.map(" + ".join)
    | st.lists(st.sampled_from(TOKENS), max_size=12).map(" ".join)
    | st.text(max_size=12)
)
def test_layers(text):
    """An expression of layers is read as fairseq reads it, or refused; none takes long or makes
    more layers than its limit.
    """
    start = time.perf_counter()
    try:
        blocks = blocks_of(layers_of(text))
    except InputError as error:
        assert "\n" not in str(error)
    else:
        layers = eval(text, {"__builtins__": {}})
        assert (
            sum(repeat * len(sizes) // 2 for repeat, *sizes in blocks) == len(layers) <= MAX_LAYERS
        )
    assert time.perf_counter() - start < SECONDS


VALUE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
OPCODES = [bytes([code]) for code in pickle._Unpickler.dispatch]
CALLED = (
    "torch._utils _rebuild_tensor_v2, torch._utils _rebuild_parameter, torch FloatStorage,"
    " torch Size, collections OrderedDict, argparse Namespace, builtins set, builtins exec,"
    " torch.nn.modules.linear Linear, collections defaultdict, __builtin__ getattr,"
    " __builtin__ dict"
)
NAMES = ["c{}\n{}\n".format(*name.split()).encode() for name in CALLED.split(",")]
PART = (
    st.sampled_from(OPCODES)
    | st.sampled_from(NAMES)
    | VALUE.map(lambda v: pickle.dumps(v, 2)[2:-1])
    | st.binary(max_size=3)
)


@fuzz
@given(parts=st.lists(PART, max_size=25), zipped=st.booleans())
def test_pickles(parts, zipped, tmp_path_factory):
    """Any opcodes with any arguments."""
    path = tmp_path_factory.mktemp("torch") / "lm.pt"
    write = as_zip if zipped else as_stream
    write(b"\x80\x02" + b"".join(parts) + b".", path, storages=[STORAGE])
    bounded(torch_files.read, path)


KEYS = st.sampled_from(
    [
        "model",
        "args",
        "cfg",
        "arch",
        "_name",
        "_modules",
        "_parameters",
        "_buffers",
        "encoder.weight",
        "rnns.0.weight_hh_l0",
        "rnns.0.module.weight_hh_l0_raw",
        "extra_state",
        "val_loss",
        "optimizer_history",
    ]
)
INNER = (
    st.none()
    | st.integers(0, 3)
    | st.sampled_from(["fconv_lm", "x"])
    | st.just(np.ones((2, 3), np.float32))
)
CONTENT = st.recursive(
    INNER,
    lambda inner: (
        st.dictionaries(KEYS, inner, max_size=4)
        | st.lists(inner, max_size=3)
        | st.builds(
            lambda parameters, modules: Module("torch.nn.modules.rnn\nLSTM", parameters, modules),
            st.dictionaries(KEYS, INNER, max_size=3),
            st.dictionaries(KEYS, inner, max_size=2),
        )
    ),
    max_leaves=12,
)


@fuzz
@given(content=CONTENT)
def test_checkpoints(content, tmp_path_factory):
    """Any dicts, lists, modules and tensors in a file: one line, and nothing written."""
    path = save(content, tmp_path_factory.mktemp("torch") / "lm.pt")
    with pytest.raises(InputError) as error:
        convert(path, path.parent / "words.txt", path.parent / "run")
    assert "\n" not in str(error.value)
    assert list(path.parent.iterdir()) == [path]


@fuzz
@given(data=st.data(), path=st.sampled_from([ZIP, STREAM]))
def test_torch_files(data, path, tmp_path_factory):
    """Cut, lengthened, or with a range of bytes replaced, so that lengths and offsets are wrong
    by much.
    """
    content = path.read_bytes()
    begin, end = sorted(data.draw(st.tuples(*[st.integers(0, len(content))] * 2)))
    changed = (
        content[:begin]
        + data.draw(st.binary(max_size=12))
        + content[data.draw(st.sampled_from([begin, begin + 4, end])) :]
    )
    copy = tmp_path_factory.mktemp("torch") / "lm.pt"
    copy.write_bytes(changed)
    bounded(torch_files.read, copy)


MANY = b"".join(reference(str(key), 100_000) for key in range(500))


def huge_member(path):
    """An archive whose list of members declares 2 GiB, where the file has 16 bytes."""
    size = (1 << 31) - 4
    as_zip(b"\x80\x02" + reference("0", size // 4) + b".", path)
    content = bytearray(path.read_bytes())
    last = content.rindex(b"PK\x01\x02")
    content[last + 20 : last + 28] = struct.pack("<II", size, size)
    path.write_bytes(content)


def many_members(path):
    """An archive whose members all lie on the same bytes: 500 storages of 400 kB in a file of
    500 kB.
    """
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02](" + MANY + b"e.")
        archive.writestr("archive/data/0", bytes(400_000))
        (first,) = [info for info in archive.infolist() if info.filename.endswith("data/0")]
        for key in range(1, 500):
            other = zipfile.ZipInfo(f"archive/data/{key}")
            for field in "header_offset", "CRC", "file_size", "compress_size", "compress_type":
                setattr(other, field, getattr(first, field))
            archive.filelist.append(other)
            archive.NameToInfo[other.filename] = other


def many_storages(path):
    """A stream that declares 500 storages of as many bytes as the file has."""
    as_stream(b"\x80\x02](" + MANY + b"e.", path, padding=bytes(400_000))


COPIES = {
    "set": (b"cbuiltins\nset\nq\x00]", b"e", b"h\x00h\x01\x85R"),
    "dict": (b"ccollections\nOrderedDict\nq\x00]", b"e", b"h\x00h\x01\x85R"),
    "attributes": (b"cargparse\nNamespace\nq\x00}", b"u", b"h\x00)\x81h\x01b"),
}


def many_copies(kind, path):
    """An archive with one container of 3,000 entries, which its opcodes copy 2,000 times."""
    begin, end, copy = COPIES[kind]
    entry = b"M%sN\x86" if kind == "dict" else b"M%sN" if kind == "attributes" else b"M%s"
    entries = b"".join(entry % struct.pack("<H", number) for number in range(3_000))
    content = begin + b"(" + entries + end + b"q\x010](" + copy * 2_000 + b"e."
    as_zip(b"\x80\x02" + content, path)


@pytest.mark.parametrize(
    "make",
    [huge_member, many_members, many_storages]
    + [functools.partial(many_copies, kind) for kind in COPIES],
)
def test_no_file_asks_for_more_memory_than_it_has(make, tmp_path):
    """Storages that are larger than the file, alone or together, are refused before there is
    room for them; so are copies, of which a file of 120 kB made 5 GB.
    """
    make(tmp_path / "lm.pt")
    assert "contents are longer than the file" in bounded(torch_files.read, tmp_path / "lm.pt")
