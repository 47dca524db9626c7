"""Files of torch.save are read without torch: every dtype and layout, both formats, and nothing
in them is ever run.
"""

import io
import os
import pickle
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from adaptive_jax.interop import torch_files
from tests import refuses
from tests.interop.torch_writer import as_stream, as_zip, tensor, value

FIXTURES = Path(__file__).parents[1] / "fixtures"
ZIP, STREAM = FIXTURES / "torch_zip.pt", FIXTURES / "torch_stream.pt"
both = pytest.mark.parametrize("path", [ZIP, STREAM], ids=["zip", "stream"])

BLOCK = np.arange(24, dtype=np.float32).reshape(2, 3, 4) / 4
CONTENT = {
    "turned": BLOCK.transpose(2, 0, 1),
    "part": BLOCK[:, 1:, ::2],
    "again": BLOCK,
    "one": np.array(2.5),
    "none": np.zeros((0, 3), np.float32),
    "half": np.array([0.5, -1.5, 65504.0], np.float16),
    "brain": np.array([1.0, -2.5, 3.0e38], ml_dtypes.bfloat16),
    "long": np.array([2**40, -1]),
    "int": np.array([2**30, -7], np.int32),
    "short": np.array([-300], np.int16),
    "byte": np.array([0, 255], np.uint8),
    "char": np.array([-128, 127], np.int8),
    "bool": np.array([True, False]),
    "parameter": np.array([1.0, 2.0], np.float32),
    "options": SimpleNamespace(lr=[0.25], arch="x", nothing=None),
    "size": (2, 3, 4),
    "set": {1, 2},
    "text": "Ω",
    "pair": (1, 2.5),
    "ordered": {"a": np.arange(2.0, 5.0), "b": np.arange(10.0)},
}


def tensors_equal(ours, theirs):
    """Asserts that both are equal in structure, dtype, shape and every bit; returns the number
    of tensors.
    """
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        return sum(tensors_equal(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        return sum(map(tensors_equal, ours, theirs))
    if isinstance(theirs, SimpleNamespace):
        assert type(ours) is SimpleNamespace
        return tensors_equal(vars(ours), vars(theirs))
    if isinstance(theirs, np.ndarray):
        assert (ours.dtype, ours.shape, ours.tobytes()) == (
            theirs.dtype,
            theirs.shape,
            theirs.tobytes(),
        )
        return 1
    assert ours == theirs
    return 0


@both
def test_saved_objects_are_read_back(path):
    """Every dtype, transposed, sliced and empty tensors, and all else that a checkpoint
    contains.
    """
    assert tensors_equal(torch_files.read(path), CONTENT) == 16


@both
def test_tensors_of_one_storage_share_memory(path):
    """A storage is read once, however many tensors lie in it."""
    content = torch_files.read(path)
    for one, other in ("turned", "again"), ("part", "again"):
        assert np.shares_memory(content[one], content[other])
    content["again"][1, 2, 0] = 7.0
    assert content["turned"][0, 1, 2] == content["part"][1, 1, 0] == 7.0
    assert not np.shares_memory(content["again"], content["parameter"])


@both
def test_a_truncated_file(path, tmp_path):
    """Wherever the file ends: one line with the path."""
    content, cut = path.read_bytes(), tmp_path / "cut.pt"
    for length in (*range(0, len(content) - 1, 97), len(content) - 1):
        cut.write_bytes(content[:length])
        with refuses(str(cut)):
            torch_files.read(cut)


def wrong_bit():
    changed = bytearray(ZIP.read_bytes())
    changed[changed.index(BLOCK.tobytes()) + 5] ^= 1
    return bytes(changed)


@pytest.mark.parametrize(
    "content, says",
    [
        (wrong_bit(), "CRC"),
        (b"PK\x03\x04 is all that this has of an archive", "must be a whole file of torch.save"),
        *(
            (content, "must be a whole file of torch.save")
            for content in (b"\x80\x02}q\x00.", b"plain\n", bytes(range(256)), b"\x89HDF\r\n" * 9)
        ),
    ],
    ids=["wrong bit in a tensor", "archive", "pickle", "text", "bytes", "HDF5"],
)
def test_a_damaged_or_other_file(content, says, tmp_path):
    """An archive with a wrong checksum, and what is neither an archive nor a stream of
    torch.save.
    """
    (tmp_path / "other.pt").write_bytes(content)
    with refuses("other.pt", says):
        torch_files.read(tmp_path / "other.pt")


def test_a_missing_file(tmp_path):
    """A path to nothing, and one to a directory."""
    for path in tmp_path / "none.pt", tmp_path:
        with refuses("cannot read", str(path)):
            torch_files.read(path)


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call

    def __call__(self):
        """Never called: pickle requires that the function it writes is callable."""


@pytest.mark.parametrize("write", [as_zip, as_stream])
@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize(
    "make, name",
    [
        (lambda mark: Call(os.system, f"touch {mark}"), "system"),
        (lambda mark: Call(eval, f"open({str(mark)!r}, 'w')"), "eval"),
        (
            lambda mark: {
                "model": [1, Call(Call(getattr, Call(__import__, "os"), "system"), f"touch {mark}")]
            },
            "__import__",
        ),
        (lambda mark: {"args": Call(set, (Call(os.system, f"touch {mark}"),))}, "system"),
        (lambda mark: Call(io.open, str(mark), "w"), "open"),
        (lambda mark: Call(pickle.loads, f"cos\nsystem\n(S'touch {mark}'\ntR.".encode()), "loads"),
    ],
    ids=["system", "eval", "import", "nested", "open", "loads"],
)
def test_nothing_in_a_file_is_run(make, name, protocol, write, tmp_path):
    """A file that asks for a function is refused with the function's name. The standard
    unpickler does run it.
    """
    mark = tmp_path / "run"
    pickled = pickle.dumps(make(mark), protocol)
    pickle.loads(pickled)
    assert mark.exists()
    mark.unlink()
    write(pickled, tmp_path / "bad.pt")
    with refuses("bad.pt", f"{name}'", "which is not part of a checkpoint"):
        torch_files.read(tmp_path / "bad.pt")
    assert not mark.exists()


def test_a_tensor_within_its_storage(tmp_path):
    """The archives with tensors in the next test are refused for these alone. A parameter of
    2018 is its tensor, and so are those of 2017, which had flags: their files were refused.
    """
    of = tensor(1, (3,), (1,))
    flags = b"\x85R(\x88\x89Ntb."
    for pickled in (
        of,
        b"ctorch.nn.parameter\nParameter\n(" + of[:-1] + b"\x88tR.",
        b"ctorch.nn.parameter\nParameter\n" + of[:-1] + flags,
        b"ctorch.autograd.variable\nVariable\n" + of[:-1] + flags,
    ):
        as_zip(pickled, tmp_path / "good.pt")
        np.testing.assert_array_equal(torch_files.read(tmp_path / "good.pt"), [1.0, 2.0, 3.0])


def module(name, inner):
    """A pickled module with one attribute; until 2020 its class was written with the file and
    the source that define it.
    """
    old = b"(" + value("module") + name + value("model.py") + value("class Model: ...") + b"tQ"
    return [kind + b")\x81}" + value("inner") + inner + b"sb." for kind in (name, old)]


@pytest.mark.parametrize("kind", [0, 1], ids=["new", "old"])
@pytest.mark.parametrize("write", [as_zip, as_stream])
def test_a_module(kind, write, tmp_path):
    """Its attributes, of whatever class of torch's; methods among them are None, optimizer states
    of parameters are left out, and cuDNN's dropout state, which torch could not save, is empty.
    """
    method = b"cbuiltins\ngetattr\n(" + value({}) + value("flatten_parameters") + b"tR"
    memory = b"ccollections\ndefaultdict\n(cbuiltins\ndict\ntR"
    if write is as_zip:
        memory += tensor(0, (4,), (1,))[:-1] + value(1) + b"s"  # whose key is a parameter
    backend = b"ctorch.nn.backends.thnn\n_get_thnn_function_backend\n)R"
    cudnn = b"ctorch.backends.cudnn.rnn\nUnserializable\n)\x81" + value("<unserializable>") + b"b"
    pair = b"(" + method + memory + value("x") + value(2) + b"s" + backend + cudnn + b"t"
    write(
        pickle.PROTO + b"\x02" + module(b"ctorch.nn.modules.rnn\nLSTM\n", pair)[kind],
        tmp_path / "model.pt",
    )
    inner = None, {"x": 2}, None, SimpleNamespace()
    assert torch_files.read(tmp_path / "model.pt") == SimpleNamespace(inner=inner)


DEEP = b")" + b"\x85" * 300_000  # a tuple in a tuple in a tuple: its hash overflows the stack
DOUBLED = (
    value("x") + b"2\x86" * 40
)  # a pair of twice the same pair, 40 times: its hash and its text never end
HOSTILE = {
    # Dotted names, this project's own modules, torch's other functions: no other name is looked up.
    "which is not part of a checkpoint": [
        value(module) + value(name) + pickle.STACK_GLOBAL + b"."
        for module, name in (
            ("adaptive_jax.interop.torch_files", "zipfile"),
            ("torch._utils", "_rebuild_tensor_v2.__globals__"),
            ("torch.storage", "_load_from_bytes"),
            ("builtins", "setattr"),
            ("collections", "OrderedDict.__init__"),
            ("no_such_module_anywhere", "x"),
            ("torch", "load"),
            ("torch", "FloatStorage\nerror: two lines"),
        )
    ],
    # A file sets attributes of a namespace that it makes, never of a class, a function or a type of
    # storages.
    "attributes of a": [
        b"c" + name + b"\n" + state + b"b."
        for name in (
            b"collections\nOrderedDict",
            b"torch._utils\n_rebuild_tensor_v2",
            b"torch\nFloatStorage",
            b"argparse\nNamespace",
        )
        for state in (
            pickle.EMPTY_DICT,
            pickle.NONE + pickle.EMPTY_DICT + pickle.TUPLE2,
        )  # attributes, and slots
    ],
    # It reaches no memory outside its storages and no storage that it lacks, and cannot repeat one
    # without end, see the next entry.
    "must be a whole file of torch.save": [
        tensor(0, (5,), (1,)),
        tensor(2, (3,), (1,)),
        tensor(0, (2, 2), (3, 1)),
        tensor(-1, (2,), (1,)),
        tensor(3, (2,), (-1,)),
        tensor(0, (-1,), (1,)),
        tensor(0, (2,), (1, 1)),
        tensor(0, (2,), (2**62,)),
        tensor(0, (4,), (1,), length=5),
        tensor(0, (4,), (1,), length=2**60),
        tensor(0, (4,), (1,), key="1"),
        tensor(0, (4,), (1,), key="../byteorder"),
        tensor(0, (4,), (1,), storage="DoubleStorage"),
        module(b"ccollections\nOrderedDict\n", b"N")[1],
        module(value("x"), b"N")[1],
    ],
    "repeats its 4 numbers: save it by .contiguous()": [tensor(0, (2**40,), (0,))],
    # It cannot have values without end hashed or written out.
    "a tuple as a key": [b"}" + DEEP + b"K\x01s.", b"cbuiltins\nset\n](" + DEEP + b"e\x85R."],
    "entries of a set": [b"cbuiltins\nset\n)R(K\x01" + DEEP + b"u."],
    "reference to something that is not a storage": [
        b"(" + value("storage") + DOUBLED + value("0") + value("cpu") + b"K\x01tQ.",
    ],
}


@pytest.mark.parametrize(
    "says, number",
    [(says, number) for says, files in HOSTILE.items() for number in range(len(files))],
)
def test_a_hostile_file(says, number, tmp_path):
    """One line, without a crash, without filling the memory, and without importing a module."""
    before = set(sys.modules)
    as_zip(pickle.PROTO + b"\x04" + HOSTILE[says][number], tmp_path / "bad.pt")
    with refuses("bad.pt", says):
        torch_files.read(tmp_path / "bad.pt")
    assert set(sys.modules) - before <= {"encodings.cp437"}  # zipfile's, for names


def test_attributes_that_are_no_dict_are_left_out(tmp_path):
    """The pairs in their place could have a key whose hash never ends."""
    pairs = b"cargparse\nNamespace\n)\x81](" + DEEP + b"K\x01\x86eb."
    as_zip(pickle.PROTO + b"\x04" + pairs, tmp_path / "lm.pt")
    assert torch_files.read(tmp_path / "lm.pt") == SimpleNamespace()


def test_a_compressed_archive(tmp_path):
    """It could inflate to any size, and torch.save never compresses."""
    as_zip(pickle.dumps("a" * 10**6, 2), tmp_path / "bad.pt", method=zipfile.ZIP_DEFLATED)
    with refuses("bad.pt", "archive is compressed"):
        torch_files.read(tmp_path / "bad.pt")
