"""Reads files that torch.save wrote, without torch and without running anything that is in them.

Such a file is a pickle, which may name any function of any module and have it called. Here a name is looked up in a short
list of what checkpoints are made of, and stands for something inert of this module or of the standard library; any other
name ends the reading. Nothing is imported, and no tensor is trusted to lie within its storage.

Both formats are read: the zip archive (torch 1.6 and later), whose storages are members `data/N`, and the older stream,
in which pickles follow each other and the storages come last.
"""

import collections
import pickle
import types
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np

from adaptive_jax.errors import InputError

# Types of storages, by name. They stay names in the unpickler's hands: a str cannot be called or changed.
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

# What else may be named. Classes with attributes become a bare namespace of them.
INERT = {
    "torch.Size": tuple,
    "argparse.Namespace": types.SimpleNamespace,
    # Counters of time and loss that checkpoints before 2019 carry along.
    "fairseq.meters.AverageMeter": types.SimpleNamespace,
    "fairseq.meters.StopwatchMeter": types.SimpleNamespace,
    "fairseq.meters.TimeMeter": types.SimpleNamespace,
}

# Codes of a pickle that torch does not write: registered extensions, old instances, buffers of any announced size.
NEEDLESS = {
    code[0]
    for code in (
        pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.INST, pickle.OBJ,
        pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER,
    )
}  # fmt: skip

STREAM_MAGIC = 0x1950A86A20F9469CFC6C
STREAM_PROTOCOL = 1001


def read(path: Path):
    """What `torch.save` was given, with tensors as NumPy arrays of their dtype, shape and strides.

    Tensors that shared a storage share memory. Objects of the classes `argparse.Namespace` come back as
    `types.SimpleNamespace`.

    Raises:
        InputError: a file that is missing, cut short, damaged, not of torch.save, or that names something else than the
            parts of a checkpoint.
    """
    try:
        with path.open("rb") as file:
            zipped = file.read(4) == b"PK\x03\x04"
            file.seek(0)
            return _read_zip(file) if zipped else _read_stream(file, path.stat().st_size)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}; give the path of a checkpoint") from None
    except Exception as error:  # bytes that are wrong fail in the unpickler and here in any of many ways
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        raise InputError(
            f"{path} cannot be read ({reason}): it is cut short, damaged, or no file of torch.save; copy or download it again"
        ) from None


class _Unpickler(pickle._Unpickler):
    """Builds containers, numbers, strings and arrays, and nothing else.

    The standard library's unpickler in Python, not in C: there a few bytes can ask for any amount of memory, and attributes
    can be set on whatever was named.
    """

    dispatch = {code: load for code, load in pickle._Unpickler.dispatch.items() if code not in NEEDLESS}  # noqa: RUF012

    def __init__(self, file, storage):
        def readline():
            line = file.readline()
            if not line.endswith(b"\n"):
                raise EOFError("it ends within a name")
            return line

        super().__init__(types.SimpleNamespace(read=file.read, readline=readline), encoding="utf-8")
        self.storage = storage

    def find_class(self, module, name):
        if module in ("torch", "torch.cuda") and name in DTYPES:
            return name
        whole = f"{module}.{name}"
        builders = {
            "torch._utils._rebuild_tensor": self.tensor,
            "torch._utils._rebuild_tensor_v2": self.tensor,
            "torch._utils._rebuild_parameter": self.parameter,
        }
        known = INERT | CONTAINERS | builders
        if whole not in known:
            raise InputError(
                f"it names {whole[:100]!r}, which is no part of a checkpoint's weights and options, so nothing of it was read: "
                "get the file from a source you trust, or save it again with plain dicts and tensors alone"
            )
        return known[whole]

    def persistent_load(self, pid):
        tag, type_name, key, _, length, *view = pid
        if tag != "storage" or not isinstance(type_name, str) or not isinstance(key, str | int):
            raise ValueError("a reference to something else than a storage")
        array = self.storage(str(key), DTYPES[type_name], int(length))
        if not view or view[0] is None:
            return array
        _, start, count = view[0]
        if not 0 <= start <= start + count <= len(array):
            raise ValueError("a storage reaches beyond another")
        return array[start : start + count]

    def tensor(self, storage, offset, shape, strides, *_):
        # `storage` is whatever the file gives; an array of storages has one axis, a tensor given again may have none.
        if not isinstance(storage, np.ndarray) or storage.ndim != 1:
            raise ValueError("a tensor without a storage")
        # Python's own integers: a file may give arrays, whose sums overflow.
        offset, shape, strides = int(offset), tuple(map(int, shape)), tuple(map(int, strides))
        if len(shape) != len(strides) or min((offset, *shape, *strides)) < 0:
            raise ValueError("a tensor of impossible shape")
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if 0 not in shape and last >= len(storage):
            raise ValueError("a tensor reaches beyond its storage")
        steps = [stride * storage.itemsize for stride in strides]
        return np.lib.stride_tricks.as_strided(storage[offset:], shape, steps)

    def parameter(self, data, *_):
        return data

    def load_dict(self):
        items = self.pop_mark()
        self.append(dict(zip(map(_plain, items[::2]), items[1::2], strict=True)))

    def load_setitem(self):
        value, key = self.stack.pop(), self.stack.pop()
        self.stack[-1][_plain(key)] = value

    def load_setitems(self):
        items = self.pop_mark()
        self.stack[-1].update(zip(map(_plain, items[::2]), items[1::2], strict=True))

    def load_additems(self):
        items = self.pop_mark()
        self.stack[-1].update(map(_plain, items))

    def load_frozenset(self):
        self.append(frozenset(map(_plain, self.pop_mark())))

    def load_build(self):
        state, instance = self.stack.pop(), self.stack[-1]
        if isinstance(instance, types.SimpleNamespace):
            vars(instance).update(state)
        elif not isinstance(
            instance, collections.OrderedDict
        ):  # of which torch keeps versions of modules, not needed here
            raise ValueError(f"attributes of a {type(instance).__name__}")

    dispatch |= {
        pickle.DICT[0]: load_dict,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.ADDITEMS[0]: load_additems,
        pickle.FROZENSET[0]: load_frozenset,
        pickle.BUILD[0]: load_build,
    }


def _plain(key):
    """A key of a dict or an entry of a set. A tuple may be nested so deep, or so often in itself, that its hash never ends."""
    if not isinstance(key, str | int | float | bytes | None):
        raise ValueError(f"a {type(key).__name__} as a key")
    return key


def _set(entries=()):
    return set(map(_plain, entries))


def _ordered(items=()):
    return collections.OrderedDict((_plain(key), value) for key, value in items)


CONTAINERS = {"collections.OrderedDict": _ordered, "builtins.set": _set, "__builtin__.set": _set}


def _read_zip(file):
    with zipfile.ZipFile(file) as archive:
        if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
            raise ValueError("torch.save compresses nothing, and this archive is compressed")
        roots = [name.removesuffix("data.pkl") for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(roots) != 1:
            raise ValueError(f"an archive with {len(roots)} members data.pkl")
        [root] = roots
        if root + "byteorder" in archive.namelist():
            _check_byte_order(archive.read(root + "byteorder") == b"little")
        storages = {}

        def storage(key, dtype, length):
            if key not in storages:
                member = archive.getinfo(f"{root}data/{key}")
                if member.file_size != length * dtype.itemsize:
                    raise ValueError(f"storage {key[:50]} has {member.file_size} bytes")
                storages[key] = np.empty(length, dtype)
                with archive.open(member) as source:
                    _fill(source, storages[key])
                    if source.read(1):  # to the end, where the checksum is compared
                        raise ValueError(f"storage {key[:50]} is too long")
            return _as_first_read(storages[key], dtype, length)

        with archive.open(root + "data.pkl") as pickled:
            return _Unpickler(pickled, storage).load()


def _read_stream(file, size):
    storages = {}

    def storage(key, dtype, length):
        if key not in storages:
            if not 0 <= length * dtype.itemsize <= size:
                raise ValueError(f"storage {key[:50]} is longer than the file")
            storages[key] = np.empty(length, dtype)  # filled below: in this format the numbers come after the pickle
        return _as_first_read(storages[key], dtype, length)

    def load():
        return _Unpickler(file, storage).load()

    if load() != STREAM_MAGIC or load() != STREAM_PROTOCOL:
        raise ValueError("it does not begin as one")
    _check_byte_order(load()["little_endian"])
    content, keys = load(), load()
    if set(keys) != set(storages):
        raise ValueError("its storages are not those of its tensors")
    for key in keys:
        length = np.empty(1, "<i8")
        _fill(file, length)
        if length[0] != len(storages[key]):
            raise ValueError(f"storage {key[:50]} has another length than its tensors")
        _fill(file, storages[key])
    return content


def _fill(source, array):
    """Reads bytes straight into an array, until it is full."""
    rest = memoryview(array.view(np.uint8))
    while len(rest):
        count = source.readinto(rest)
        if not count:
            raise ValueError("it ends within a storage")
        rest = rest[count:]


def _as_first_read(array, dtype, length):
    if (array.dtype, len(array)) != (dtype, length):
        raise ValueError("two types or lengths for one storage")
    return array


def _check_byte_order(little):
    if not little:
        raise InputError("it was written on a big-endian machine: load and save it again with torch on this one")
