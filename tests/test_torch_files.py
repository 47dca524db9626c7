"""Files of torch.save read without torch: every dtype and layout, both formats, and nothing in them is ever run."""

import argparse
import io
import os
import pickle
import random
import struct
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from adaptive_jax.errors import InputError
from adaptive_jax.fairseq import torch_files

FIXTURES = Path(__file__).parent / "fixtures"
BOTH = [FIXTURES / "torch_zip.pt", FIXTURES / "torch_stream.pt"]

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


def same(ours, theirs):
    """Equal in structure, dtype, shape and every bit; how many tensors there were."""
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        return sum(same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        return sum(map(same, ours, theirs))
    if isinstance(theirs, SimpleNamespace | argparse.Namespace):
        assert type(ours) is SimpleNamespace
        return same(vars(ours), vars(theirs))
    if isinstance(theirs, np.ndarray):
        assert (ours.dtype, ours.shape, ours.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())
        return 1
    assert ours == theirs
    return 0


@pytest.mark.parametrize("path", BOTH, ids=["zip", "stream"])
def test_what_was_saved_comes_back(path):
    """Every dtype, turned, cut and empty tensors, and what else a checkpoint holds."""
    assert same(torch_files.read(path), CONTENT) == 16


@pytest.mark.parametrize("path", BOTH, ids=["zip", "stream"])
def test_tensors_of_one_storage_share_memory(path):
    """A storage is read once, however many tensors lie in it."""
    content = torch_files.read(path)
    for one, other in ("turned", "again"), ("part", "again"):
        assert np.shares_memory(content[one], content[other])
    content["again"][1, 2, 0] = 7.0
    assert content["turned"][0, 1, 2] == content["part"][1, 1, 0] == 7.0
    assert not np.shares_memory(content["again"], content["parameter"])


@pytest.mark.parametrize("path", BOTH, ids=["zip", "stream"])
def test_torch_reads_the_same(path):
    """Against torch itself, where it is installed."""
    torch = pytest.importorskip("torch")

    def plain(value):
        if isinstance(value, torch.Tensor):
            bits = value.detach().view(torch.int16).numpy() if value.dtype == torch.bfloat16 else value.detach().numpy()
            return bits.view(ml_dtypes.bfloat16) if value.dtype == torch.bfloat16 else bits
        return {key: plain(v) for key, v in value.items()} if isinstance(value, dict) else value

    with torch.serialization.safe_globals([argparse.Namespace, set]):
        assert same(torch_files.read(path), plain(torch.load(path, weights_only=True))) == 16


@pytest.mark.parametrize("path", BOTH, ids=["zip", "stream"])
def test_a_file_cut_short_anywhere(path, tmp_path):
    """Whatever is missing from the end: one line with the path and the cure."""
    whole, cut = path.read_bytes(), tmp_path / "cut.pt"
    for length in (*range(0, len(whole) - 1, 97), len(whole) - 1):
        cut.write_bytes(whole[:length])
        assert "copy or download it again" in refused(cut)


@pytest.mark.parametrize("path", BOTH, ids=["zip", "stream"])
def test_any_byte_may_be_wrong(path, tmp_path):
    """A file with a wrong byte or some is read or refused in one line, and needs no more memory or time than a good one."""
    whole, bits = path.read_bytes(), random.Random(0)
    counts = {True: 0, False: 0}
    for _ in range(500):
        wrong = bytearray(whole)
        for _ in range(bits.choice((1, 1, 2, 8))):
            wrong[bits.randrange(len(wrong))] = bits.randrange(256)
        (tmp_path / "wrong.pt").write_bytes(wrong)
        try:
            torch_files.read(tmp_path / "wrong.pt")
        except InputError as error:
            counts[False] += 1
            assert "\n" not in str(error)
        else:
            counts[True] += 1
    assert min(counts.values()) > 50


@pytest.mark.parametrize("state", [
    pickle.EMPTY_DICT,  # attributes
    pickle.NONE + pickle.EMPTY_DICT + pickle.TUPLE2,  # and slots
], ids=["attributes", "slots"])
def test_attributes_of_what_is_named_are_not_set(state, tmp_path):
    """A class, a function or a tensor's type cannot be changed by a file, only a bare namespace be filled."""
    for name in "collections\nOrderedDict", "torch._utils\n_rebuild_tensor_v2", "torch\nFloatStorage", "argparse\nNamespace":
        as_zip(pickle.GLOBAL + name.encode() + b"\n" + state + pickle.BUILD + pickle.STOP, tmp_path / "bad.pt")
        assert "attributes of a " in refused(tmp_path / "bad.pt")


@pytest.mark.parametrize("content", [
    b"PK\x03\x04 is all that this has of an archive", b"\x80\x02}q\x00.", b"plain text\n", bytes(range(256)), b"\x89HDF\r\n" * 9])
def test_a_file_of_another_kind(content, tmp_path):
    """Neither an archive nor a stream of torch's."""
    (tmp_path / "other.pt").write_bytes(content)
    assert "no file of torch.save" in refused(tmp_path / "other.pt")


def test_a_file_that_is_not_there(tmp_path):
    """A path of nothing, and of a directory."""
    for path in tmp_path / "none.pt", tmp_path:
        assert "give the path of a checkpoint" in refused(path)


def test_bits_that_changed(tmp_path):
    """The archive's checksum sees a change in a tensor."""
    whole = bytearray(BOTH[0].read_bytes())
    at = whole.index(BLOCK.tobytes())
    whole[at + 5] ^= 1
    (tmp_path / "changed.pt").write_bytes(whole)
    assert "CRC" in refused(tmp_path / "changed.pt")


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call

    def __call__(self):
        """Never called: pickle wants what it writes as a function to be one."""


def as_zip(pickled, path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", np.arange(4, dtype=np.float32).tobytes())


def as_stream(pickled, path):
    head = (torch_files.STREAM_MAGIC, torch_files.STREAM_PROTOCOL, {"little_endian": True})
    path.write_bytes(b"".join(pickle.dumps(part, 2) for part in head) + pickled + pickle.dumps([], 2))


@pytest.mark.parametrize("write", [as_zip, as_stream])
@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("make, name", [
    (lambda mark: Call(os.system, f"touch {mark}"), "system"),
    (lambda mark: Call(eval, f"open({str(mark)!r}, 'w')"), "eval"),
    (lambda mark: Call(exec, f"open({str(mark)!r}, 'w')"), "exec"),
    (lambda mark: {"model": [1, Call(Call(getattr, Call(__import__, "os"), "system"), f"touch {mark}")]}, "getattr"),
    (lambda mark: {"args": Call(set, (Call(os.system, f"touch {mark}"),))}, "system"),
    (lambda mark: Call(io.open, str(mark), "w"), "open"),
    (lambda mark: Call(pickle.loads, f"cos\nsystem\n(S'touch {mark}'\ntR.".encode()), "loads"),
], ids=["system", "eval", "exec", "getattr", "nested", "open", "loads"])
def test_nothing_in_a_file_is_run(make, name, protocol, write, tmp_path):
    """A file that asks for a function is refused with the function's name. The standard unpickler does run it."""
    mark = tmp_path / "run"
    pickled = pickle.dumps(make(mark), protocol)
    pickle.loads(pickled)
    assert mark.exists()
    mark.unlink()
    write(pickled, tmp_path / "bad.pt")
    line = refused(tmp_path / "bad.pt")
    assert f".{name}'" in line
    assert "which is no part of a checkpoint" in line
    assert not mark.exists()


@pytest.mark.parametrize("module, name", [
    ("adaptive_jax.torch_files", "os"), ("torch._utils", "_rebuild_tensor_v2.__globals__"), ("torch", "load"),
    ("torch.storage", "_load_from_bytes"), ("builtins", "getattr"), ("collections", "OrderedDict.__init__"),
    ("no_such_module_anywhere", "x"), ("torch", "FloatStorage\nerror: two lines")])
def test_no_other_name_is_looked_up(module, name, tmp_path):
    """Dotted names, this project's own modules, torch's other functions; no module is imported on the way."""
    before = set(sys.modules)
    as_zip(pickled_name(module, name), tmp_path / "bad.pt")
    assert "which is no part of a checkpoint" in refused(tmp_path / "bad.pt")
    assert not set(sys.modules) - before


def pickled_name(module, name):
    """A pickle of protocol 4 that is this name and nothing else."""
    def text(value):
        return pickle.BINUNICODE + struct.pack("<I", len(value.encode())) + value.encode()

    return pickle.PROTO + b"\x04" + text(module) + text(name) + pickle.STACK_GLOBAL + pickle.STOP


class Reference:
    """Pickles as torch pickles a tensor: a call of its rebuilding function on a storage beside the pickle."""

    def __init__(self, offset, shape, strides, key="0", length=4, storage="FloatStorage"):
        self.arguments = offset, shape, strides, False, None
        self.storage = "storage", storage, key, "cpu", length


def tensor_file(path, reference):
    """A zip archive of one tensor on a storage of four numbers."""
    class Pickler(pickle._Pickler):
        def save(self, value, save_persistent_id=True):
            if isinstance(value, Reference):
                self.write(b"ctorch._utils\n_rebuild_tensor_v2\n" + pickle.MARK)
                self.write(pickle.MARK)
                tag, storage, *rest = value.storage
                self.save(tag)
                self.write(f"ctorch\n{storage}\n".encode())
                for part in rest:
                    self.save(part)
                self.write(pickle.TUPLE + pickle.BINPERSID)
                for argument in value.arguments:
                    self.save(argument)
                self.write(pickle.TUPLE + pickle.REDUCE)
            else:
                super().save(value, save_persistent_id)

    pickled = io.BytesIO()
    Pickler(pickled, 2).dump(reference)
    as_zip(pickled.getvalue(), path)


def test_a_tensor_within_its_storage(tmp_path):
    """The maker of the files below makes a good one too."""
    tensor_file(tmp_path / "good.pt", Reference(1, (3,), (1,)))
    np.testing.assert_array_equal(torch_files.read(tmp_path / "good.pt"), [1.0, 2.0, 3.0])


@pytest.mark.parametrize("reference", [
    Reference(0, (5,), (1,)), Reference(2, (3,), (1,)), Reference(0, (2, 2), (3, 1)), Reference(-1, (2,), (1,)),
    Reference(3, (2,), (-1,)), Reference(0, (-1,), (1,)), Reference(0, (2,), (1, 1)), Reference(0, (2,), (2**62,)),
    Reference(0, (4,), (1,), length=5), Reference(0, (4,), (1,), length=2**60), Reference(0, (4,), (1,), key="1"),
    Reference(0, (4,), (1,), key="../byteorder"), Reference(0, (4,), (1,), storage="DoubleStorage"),
], ids=range(13))
def test_a_tensor_beyond_its_storage(reference, tmp_path):
    """No memory outside a storage can be reached, and no storage that is not there."""
    tensor_file(tmp_path / "bad.pt", reference)
    assert "copy or download it again" in refused(tmp_path / "bad.pt")


def refused(path):
    """The one line that a bad file is answered with; it names the file."""
    with pytest.raises(InputError) as error:
        torch_files.read(path)
    line = str(error.value)
    assert "\n" not in line
    assert str(path) in line
    return line


def test_what_would_crash_or_fill_the_memory(tmp_path):
    """Keys whose hash recurses a million times, names that double with each byte, archives that inflate: one line each."""
    deep = b"\x80\x02}" + b")" + b"\x85" * 1_000_000 + b"K\x01s."
    doubled = b"\x80\x02(X\x07\0\0\0storageX\x0c\0\0\0FloatStorageK\x01" + b"2\x86" * 40 + b"X\x03\0\0\0cpuK\x01tQ."
    path = tmp_path / "bad.pt"
    for content, says in (deep, "a tuple as a key"), (doubled, "reference to something else"):
        path.write_bytes(content)
        with pytest.raises(InputError, match=says):
            torch_files.read(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps("a" * 1_000_000, 2))
    with pytest.raises(InputError, match="compresses nothing"):
        torch_files.read(path)
