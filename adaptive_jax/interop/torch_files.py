"""Reads files written by torch.save, without torch and without running anything in them.

Such a file is a pickle, and a pickle can name any function of any module and have it called. This
reader accepts only the names in a short list, which covers what checkpoints contain, and replaces
each by something inert of this module or of the standard library; any other name is an error. It
imports no module, and it checks that every tensor lies within its storage.

It reads both formats: the zip archive (torch 1.6 and later), with one member `data/N` for each
storage, and the older stream, which is several pickles followed by the storages.
"""

import collections
import math
import pickle
import types
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np

from adaptive_jax.errors import InputError, one_line

# The unpickler passes types of storages on as these names: a str cannot be called or changed.
DTYPES = {
    "DoubleStorage": np.dtype("float64"),
    "FloatStorage": np.dtype("float32"),
    "HalfStorage": np.dtype("float16"),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype("int64"),
    "IntStorage": np.dtype("int32"),
    "ShortStorage": np.dtype("int16"),
    "CharStorage": np.dtype("int8"),
    "ByteStorage": np.dtype("uint8"),
    "BoolStorage": np.dtype("bool"),
}


def _check_key(key):
    """Returns a key of a dict or an entry of a set if it is a scalar: hashing a tuple may never
    end if it is nested deeply or repeats itself.
    """
    if not isinstance(key, str | int | float | bytes | None):
        raise ValueError(f"a {type(key).__name__} as a key")
    return key


def _nothing(*_):
    """Stands for a function whose result is not needed."""


# The names that a file may contain, besides storages and functions that rebuild tensors.
KNOWN = {
    "torch.Size": tuple,
    "collections.OrderedDict": lambda items=(): collections.OrderedDict(
        (_check_key(key), value) for key, value in items
    ),
    "builtins.set": lambda entries=(): set(map(_check_key, entries)),
    "__builtin__.set": lambda entries=(): set(map(_check_key, entries)),
    "collections.defaultdict": lambda *_: {},
    # AWD-LSTM saves its model as it is, with defaults of dicts and methods as attributes.
    "torch.nn.backends.thnn._get_thnn_function_backend": _nothing,  # until 2019
    **{
        f"{module}.{name}": _nothing
        for module in ("builtins", "__builtin__")
        for name in ("dict", "list", "getattr")
    },
}
# Names that begin so become a `types.SimpleNamespace`, whatever they are: modules and optimizers of
# torch, options and counters of fairseq, and the classes of AWD-LSTM.
CLASSES = (
    "argparse.Namespace",
    "fairseq.meters.",
    "locked_dropout.LockedDropout",
    "model.RNNModel",
    "splitcross.SplitCrossEntropyLoss",
    "torch.nn.modules.",
    "torch.optim.",
    "weight_drop.WeightDrop",
)

# Opcodes that torch does not write: registered extensions, instances in the oldest form, sets,
# buffers of a declared size.
REFUSED = (
    pickle.EXT1,
    pickle.EXT2,
    pickle.EXT4,
    pickle.INST,
    pickle.OBJ,
    pickle.EMPTY_SET,
    pickle.ADDITEMS,
    pickle.FROZENSET,
    pickle.BYTEARRAY8,
    pickle.NEXT_BUFFER,
    pickle.READONLY_BUFFER,
)

STREAM_MAGIC = 0x1950A86A20F9469CFC6C
STREAM_PROTOCOL = 1001


def read(path: Path):
    """The object that was given to `torch.save`, with tensors as NumPy arrays of the same dtype,
    shape and strides.

    Tensors that shared a storage share memory. An `argparse.Namespace`, a module and an optimizer
    become a `types.SimpleNamespace` with the same attributes.

    Raises:
        InputError: the file is missing, truncated, damaged or not from torch.save, or it contains a
            name that no checkpoint needs.
    """
    try:
        with path.open("rb") as file:
            zipped = file.read(4) == b"PK\x03\x04"
            file.seek(0)
            return (_read_zip if zipped else _read_stream)(file, _Allocator(path.stat().st_size))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror or error}; use the path of a checkpoint"
        ) from None
    except Exception as error:  # wrong bytes make the unpickler and this module fail in many ways
        # "list index out of range" says nothing to a user.
        reason = "" if isinstance(error, LookupError) else f" ({one_line(error)[:100]})"
        raise InputError(
            f"cannot read {path}{reason}: it is truncated, damaged or not a file of torch.save;"
            " copy or download it again"
        ) from None


class _Unpickler(pickle._Unpickler):
    """Builds containers, numbers, strings and arrays, and nothing else.

    It extends the unpickler that the standard library has in Python. With the one in C, a few bytes
    can ask for any amount of memory, and a file can set attributes of everything it names.

    Args:
        size: bytes of the file, and so the most that a value in it can have.
        make_storage: `make_storage(key, dtype, length)` makes the array of a storage; called once
            for each key.
    """

    dispatch = {
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if bytes([code]) not in REFUSED
    }

    def __init__(self, file, size, make_storage=None):
        def read(count):
            if count > size:  # the room is made before the file turns out to be shorter
                raise EOFError("it ends within a value")
            return file.read(count)

        def readline():
            line = file.readline()
            if not line.endswith(b"\n"):
                raise EOFError("it ends within a name")
            return line

        super().__init__(types.SimpleNamespace(read=read, readline=readline), encoding="utf-8")
        self.make_storage, self.storages = make_storage, {}

    def find_class(self, module, name):
        if module in ("torch", "torch.cuda") and name in DTYPES:
            return name
        path = f"{module}.{name}"
        classes = KNOWN | {
            "torch._utils._rebuild_tensor": self.tensor,
            "torch._utils._rebuild_tensor_v2": self.tensor,
            "torch._utils._rebuild_parameter": lambda data, *_: data,
            "torch.nn.parameter.Parameter": lambda data, *_: data,  # until 2018
        }
        if path.startswith(CLASSES):
            return types.SimpleNamespace
        if path not in classes:
            raise InputError(
                f"it names {path[:100]!r}, which is not part of a checkpoint's weights and options,"
                " so none of it was read: get the file from a source you trust, or save it again"
                " with only plain dicts and tensors, as model.state_dict()"
            )
        return classes[path]

    def persistent_load(self, pid):
        tag, *fields = pid
        if tag == "module" and len(fields) == 3 and fields[0] is types.SimpleNamespace:
            return fields[0]  # until 2020, classes came with their source
        if (
            tag != "storage"
            or len(fields) < 4
            or not isinstance(fields[0], str)
            or not isinstance(fields[1], str | int)
        ):
            raise ValueError("a reference to something that is not a storage")
        type_name, key, _, length, *view = fields
        key, dtype, length = str(key), DTYPES[type_name], int(length)
        if key not in self.storages:
            self.storages[key] = self.make_storage(key, dtype, length)
        array = self.storages[key]
        if (array.dtype, len(array)) != (dtype, length):
            raise ValueError("two types or lengths for one storage")
        if not view or view[0] is None:
            return array
        _, start, count = view[0]
        if not 0 <= start <= start + count <= length:
            raise ValueError("a storage extends beyond the one that contains it")
        return array[start : start + count]

    def tensor(self, storage, offset, shape, strides, *_):
        # A file may give anything as `storage`. A storage has one axis; a tensor in its place may
        # have none.
        if not isinstance(storage, np.ndarray) or storage.ndim != 1:
            raise ValueError("a tensor without a storage")
        # Python integers do not overflow; the file may give NumPy's.
        offset, shape, strides = int(offset), tuple(map(int, shape)), tuple(map(int, strides))
        if len(shape) != len(strides) or min((offset, *shape, *strides)) < 0:
            raise ValueError("a tensor of an impossible shape")
        last = offset + sum(
            (size - 1) * stride for size, stride in zip(shape, strides, strict=True)
        )
        if 0 not in shape and last >= len(storage):
            raise ValueError("a tensor extends beyond its storage")
        if 0 not in shape and math.prod(shape) > len(storage):  # a few bytes as any number of them
            raise InputError(
                f"a tensor of shape {shape} repeats its {len(storage)} numbers: save it by"
                " .contiguous()"
            )
        steps = [stride * storage.itemsize for stride in strides]
        return np.lib.stride_tricks.as_strided(storage[offset:], shape, steps)

    def load_dict(self):
        items = self.pop_mark()
        self.append({})
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._set(key, value)

    def load_setitem(self):
        self._set(self.stack.pop(-2), self.stack.pop())

    def load_setitems(self):
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._set(key, value)

    def _set(self, key, value):
        if not isinstance(self.stack[-1], dict):  # a set would hash the value, an array copy it
            raise ValueError(f"entries of a {type(self.stack[-1]).__name__}")
        # An optimizer's memory of a parameter, which is not needed.
        if not isinstance(key, np.ndarray):
            self.stack[-1][_check_key(key)] = value

    def load_build(self):
        state, instance = self.stack.pop(), self.stack[-1]
        if isinstance(instance, types.SimpleNamespace) and isinstance(state, dict):
            vars(instance).update(state)
        # An OrderedDict's attributes are the versions of torch's modules, which are not needed
        # here.
        elif not isinstance(instance, collections.OrderedDict):
            raise ValueError(f"attributes of a {type(instance).__name__}")

    dispatch |= {
        pickle.DICT[0]: load_dict,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.BUILD[0]: load_build,
    }


class _Allocator:
    """Makes arrays of at most as many bytes as the file has, all together, so that no file can
    ask for more memory.
    """

    def __init__(self, size):
        self.size = self.left = size

    def array(self, length, dtype):
        if not 0 <= length * dtype.itemsize <= self.left:
            raise ValueError("its storages are longer than the file")
        self.left -= length * dtype.itemsize
        return np.empty(length, dtype)


def _read_zip(file, allocator):
    with zipfile.ZipFile(file) as archive:
        if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
            raise ValueError("the archive is compressed, and torch.save never compresses")
        roots = [
            name.removesuffix("data.pkl")
            for name in archive.namelist()
            if name.endswith("/data.pkl")
        ]
        if len(roots) != 1:
            raise ValueError(f"the archive has {len(roots)} members data.pkl")
        [root] = roots
        if root + "byteorder" in archive.namelist():
            with archive.open(root + "byteorder") as order:
                _check_byte_order(order.read(7) == b"little")

        def make_storage(key, dtype, length):
            member = archive.getinfo(f"{root}data/{key}")
            if member.file_size != length * dtype.itemsize:
                raise ValueError(f"storage {key[:50]} has {member.file_size} bytes")
            array = allocator.array(length, dtype)
            with archive.open(member) as source:
                _fill(source, array)
                if source.read(1):  # zipfile compares the checksum at the member's end
                    raise ValueError(f"storage {key[:50]} is too long")
            return array

        with archive.open(root + "data.pkl") as pickled:
            return _Unpickler(pickled, allocator.size, make_storage).load()


def _read_stream(file, allocator):
    def make_storage(key, dtype, length):
        return allocator.array(length, dtype)  # filled below: the numbers follow after the pickles

    if (
        _Unpickler(file, allocator.size).load() != STREAM_MAGIC
        or _Unpickler(file, allocator.size).load() != STREAM_PROTOCOL
    ):
        raise ValueError("it does not begin like one")
    _check_byte_order(_Unpickler(file, allocator.size).load()["little_endian"])
    unpickler = _Unpickler(file, allocator.size, make_storage)
    content, keys = unpickler.load(), _Unpickler(file, allocator.size).load()
    if set(keys) != set(unpickler.storages):
        raise ValueError("its storages are not those of its tensors")
    for key in keys:
        length, array = np.empty(1, "<i8"), unpickler.storages[key]
        _fill(file, length)
        if length[0] != len(array):
            raise ValueError(f"storage {key[:50]} is not as long as its tensors say")
        _fill(file, array)
    return content


def _fill(source, array):
    """Fills an array with the next bytes of a file, without a copy in between."""
    rest = memoryview(array.view(np.uint8))
    while len(rest):
        count = source.readinto(rest)
        if not count:
            raise ValueError("it ends within a storage")
        rest = rest[count:]


def _check_byte_order(little):
    if not little:
        raise InputError(
            "it was written on a big-endian machine: load it with torch on this machine and save it"
            " again"
        )
