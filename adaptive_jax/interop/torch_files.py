"""Reads files written by torch.save, without torch and without running any code in them.

Such a file is a pickle, and a pickle can name any function of any module and have it called. This
reader accepts only a short list of names, which covers what checkpoints contain, and replaces each
by a harmless function or class; any other name is an error. It imports no module, and it checks
that every tensor lies within its storage.

It reads both formats: the zip archive (torch 1.6 and later), with one member `data/N` for each
storage, and the older stream, which is several pickles followed by the storages.
"""

import pickle
import types
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np

from adaptive_jax.errors import InputError, one_line

# The unpickler represents a type of storage by its name: a str cannot be called or changed.
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
    """Returns a key of a dict or an entry of a set if it is a scalar: hashing a deeply nested tuple
    may never end.
    """
    if not isinstance(key, str | int | float | bytes | None):
        raise ValueError(f"a {type(key).__name__} as a key")
    return key


def _dict(items=()):
    return {_check_key(key): value for key, value in items}


def _set(entries=()):
    return set(map(_check_key, entries))


def _tensor(storage, offset, shape, strides, *_):
    # A file can pass any object as the storage, and NumPy integers, which overflow.
    if not isinstance(storage, np.ndarray):
        raise ValueError("a tensor without a storage")
    offset, shape, strides = int(offset), tuple(map(int, shape)), tuple(map(int, strides))
    if min(strides, default=0) < 0:
        raise ValueError("a tensor with a stride below 0")
    steps = [stride * storage.itemsize for stride in strides]
    content = storage.view(np.uint8)
    # NumPy checks that the tensor lies within its storage.
    tensor = np.ndarray(shape, storage.dtype, content, offset * storage.itemsize, steps)
    if tensor.size > storage.size:  # strides of 0 repeat a few bytes any number of times
        raise InputError(
            f"a tensor of shape {shape} repeats its {storage.size} numbers: save it by"
            " .contiguous()"
        )
    return tensor


def _return_first(argument, *_):
    return argument


def _return_none(*_):
    """Replaces a function whose result is not needed."""


# Functions and small classes that a file may name, and what replaces them.
NAMES = {
    "torch.Size": _return_first,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _return_first,
    "torch.nn.parameter.Parameter": _return_first,  # until 2018
    "torch.autograd.variable.Variable": _return_first,  # until 2018
    "collections.OrderedDict": _dict,
    "collections.defaultdict": lambda *_: {},
    "builtins.set": _set,
    "__builtin__.set": _set,
    # AWD-LSTM saves its model as it is, with defaults of dicts and methods as attributes.
    "torch.nn.backends.thnn._get_thnn_function_backend": _return_none,  # until 2019
    **{
        f"{module}.{name}": _return_none
        for module in ("builtins", "__builtin__")
        for name in ("dict", "list", "getattr")
    },
}
# Names with these prefixes become a `types.SimpleNamespace`: modules and optimizers of torch,
# options and counters of fairseq, and the classes of AWD-LSTM.
CLASSES = (
    "argparse.Namespace",
    "fairseq.meters.",
    "locked_dropout.LockedDropout",
    "model.RNNModel",
    "splitcross.SplitCrossEntropyLoss",
    "torch.backends.cudnn.rnn.Unserializable",  # in an LSTM trained on a GPU, until 2018
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
    """The object that `torch.save` wrote, with tensors as NumPy arrays of the same dtype, shape and
    strides.

    Tensors that shared a storage share memory. An `argparse.Namespace`, a module and an optimizer
    become a `types.SimpleNamespace` with the same attributes.

    Raises:
        InputError: the file is missing, truncated, damaged or not from torch.save, or it contains a
            name that no checkpoint needs.
    """
    try:
        with path.open("rb") as file:
            zipped, size = file.read(4) == b"PK\x03\x04", path.stat().st_size
            file.seek(0)
            return (_read_zip if zipped else _read_stream)(file, size)
    except Exception as error:  # damaged files raise errors of many types
        reason = getattr(error, "strerror", None) or one_line(error)[:300]
        reason = "damaged" if isinstance(error, LookupError) else reason
        cure = "" if isinstance(error, InputError) else "; it must be a whole file of torch.save"
        raise InputError(f"cannot read {path}: {reason}{cure}") from error


class _Unpickler(pickle._Unpickler):
    """Builds containers, numbers, strings and arrays, and nothing else.

    It extends the standard library's unpickler in Python. With the one in C, a few bytes can ask
    for any amount of memory, and a file can set attributes of everything it names.

    Args:
        size: bytes of the file, the limit for each value in it and for all its storages together.
        fill: `fill(key, array)` reads a storage; called once for each key.
    """

    dispatch = {
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if bytes([code]) not in REFUSED
    }

    def __init__(self, file, size, fill=None):
        def read(count):  # `file.read` allocates all `count` bytes, even if the file is shorter
            return file.read(min(count, size))

        super().__init__(types.SimpleNamespace(read=read, readline=file.readline), encoding="utf-8")
        self.fill, self.bytes_left, self.storages = fill, size, {}

    def find_class(self, module, name):
        path = f"{module}.{name}"
        if module in ("torch", "torch.cuda") and name in DTYPES:
            return name
        if path.startswith(CLASSES):
            return types.SimpleNamespace
        if path not in NAMES:
            raise InputError(
                f"it names {path[:100]!r}, which is not part of a checkpoint's weights and options:"
                " if you trust it, load it with torch and save its weights and options alone"
            )
        return NAMES[path]

    def persistent_load(self, pid):
        if pid[0] == "module" and pid[1] is types.SimpleNamespace:
            return pid[1]  # until 2020, a class was stored with its source code
        tag, kind, key, _, length, *view = pid
        if tag != "storage" or not isinstance(kind, str) or not isinstance(key, str | int):
            raise ValueError("a reference to something that is not a storage")
        key, dtype, length = str(key), DTYPES[kind], int(length)
        if key not in self.storages:
            self._reserve(length * dtype.itemsize)
            self.storages[key] = np.empty(length, dtype)
            self.fill(key, self.storages[key])
        array = self.storages[key]
        if (array.dtype, len(array)) != (dtype, length):
            raise ValueError("two types or lengths for one storage")
        if view and view[0] is not None:
            _, start, count = view[0]
            return array[start : start + count]
        return array

    def _reserve(self, size):
        """Limits storages and copies to the bytes of the file."""
        if not 0 <= size <= self.bytes_left:
            raise ValueError("its contents are longer than the file")
        self.bytes_left -= size

    def load_dict(self):
        items = self.pop_mark()
        self.append({})
        self._set(items)

    def load_setitem(self):
        *_, key, value = self.stack
        del self.stack[-2:]
        self._set([key, value])

    def load_setitems(self):
        self._set(self.pop_mark())

    def _set(self, items):
        if not isinstance(self.stack[-1], dict):  # a set would hash the value, an array copy it
            raise ValueError(f"entries of a {type(self.stack[-1]).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # A parameter is the key of its optimizer state, which is not needed.
            if not isinstance(key, np.ndarray):
                self.stack[-1][_check_key(key)] = value

    def load_reduce(self):
        arguments, function = self.stack.pop(), self.stack[-1]
        # A few bytes can copy a container that is in the file once.
        if function in (_dict, _set, types.SimpleNamespace):
            self._reserve(sum(map(len, arguments)))
        self.stack[-1] = function(*arguments)

    def load_build(self):
        state, instance = self.stack.pop(), self.stack[-1]
        if not isinstance(instance, types.SimpleNamespace | dict | np.ndarray):
            raise ValueError(f"attributes of a {type(instance).__name__}")
        # Not needed: the versions of a state dict's modules, the flags of a parameter until 2018,
        # and a text where torch could not save the state.
        if isinstance(instance, types.SimpleNamespace) and isinstance(state, dict):
            self._reserve(len(state))
            vars(instance).update(state)

    dispatch |= {
        pickle.DICT[0]: load_dict,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.REDUCE[0]: load_reduce,
        pickle.BUILD[0]: load_build,
    }


def _read_zip(file, size):
    with zipfile.ZipFile(file) as archive:
        if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
            raise ValueError("the archive is compressed, and torch.save never compresses")
        names = archive.namelist()
        [root] = [name.removesuffix("data.pkl") for name in names if name.endswith("/data.pkl")]
        if f"{root}byteorder" in names:
            _check_byte_order(archive.read(f"{root}byteorder") == b"little")

        def fill(key, array):
            with archive.open(f"{root}data/{key}") as source:
                _fill(source, array)
                if source.read(1):  # zipfile compares the checksum at the member's end
                    raise ValueError(f"storage {key[:50]} is too long")

        with archive.open(f"{root}data.pkl") as pickled:
            return _Unpickler(pickled, size, fill).load()


def _read_stream(file, size):
    magic, protocol, machine = (_Unpickler(file, size).load() for _ in range(3))
    if magic != STREAM_MAGIC or protocol != STREAM_PROTOCOL:
        raise ValueError("it does not begin like one")
    _check_byte_order(machine["little_endian"])
    # The storages follow after the pickles.
    unpickler = _Unpickler(file, size, lambda key, array: None)
    content, keys = unpickler.load(), _Unpickler(file, size).load()
    for key in keys:
        length, array = np.empty(1, "<i8"), unpickler.storages.pop(_check_key(key))
        _fill(file, length)
        if length[0] != len(array):
            raise ValueError(f"storage {key[:50]} is not as long as its tensors say")
        _fill(file, array)
    if unpickler.storages:
        raise ValueError("its storages are not those of its tensors")
    return content


def _fill(source, array):
    """Fills an array with the next bytes of a file, without a copy in between."""
    unread = memoryview(array.view(np.uint8))
    while len(unread):
        count = source.readinto(unread)
        if not count:
            raise ValueError("it ends within a storage")
        unread = unread[count:]


def _check_byte_order(little):
    if not little:
        raise InputError("it is from a big-endian machine: load it with torch, and save it here")
