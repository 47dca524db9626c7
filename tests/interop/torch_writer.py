"""Files as torch.save writes them, made without torch."""

import pickle
import zipfile

import numpy as np

from adaptive_jax.interop import torch_files

STORAGE = np.arange(4, dtype="<f4").tobytes()  # the storage that files have unless told otherwise


def as_zip(pickled, path, storages=(STORAGE,), method=zipfile.ZIP_STORED):
    """An archive with a pickle and storages that are numbered from 0."""
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", "little")
        for number, storage in enumerate(storages):
            archive.writestr(f"archive/data/{number}", storage)
    return path


def as_stream(pickled, path, storages=(), padding=b""):
    """The older format: pickles, followed by storages of float32."""
    head = (torch_files.STREAM_MAGIC, torch_files.STREAM_PROTOCOL, {"little_endian": True})
    keys = [str(number) for number in range(len(storages))]
    parts = [*(pickle.dumps(part, 2) for part in head), pickled, pickle.dumps(keys, 2)]
    for storage in storages:
        parts += [np.int64(len(storage) // 4).tobytes(), storage]
    path.write_bytes(b"".join(parts) + padding)
    return path


def value(content):
    """The opcodes that push a value."""
    return pickle.dumps(content, 2)[2:-1]


def reference(key, length, storage="FloatStorage"):
    """A pickled reference to a storage outside the pickle."""
    kind = f"ctorch\n{storage}\n".encode()
    return b"(" + value("storage") + kind + value(key) + value("cpu") + value(length) + b"tQ"


def tensor(offset, shape, strides, key="0", length=4, storage="FloatStorage"):
    """A pickled tensor: a call of the function that rebuilds it from a storage."""
    arguments = b"".join(map(value, (offset, shape, strides, False, None)))
    rebuild = b"ctorch._utils\n_rebuild_tensor_v2\n("
    return rebuild + reference(key, length, storage) + arguments + b"tR."


class Module:
    """A module of torch: its class, parameters, inner modules and other attributes."""

    def __init__(self, path, parameters=(), modules=(), **attributes):
        self.path = path
        inner = {"_parameters": dict(parameters), "_modules": dict(modules)}
        self.attributes = inner | attributes


def save(content, path):
    """Writes an archive of dicts, lists, numbers, tensors and `Module`s."""
    storages = []

    def opcodes(content):
        if isinstance(content, np.ndarray):
            storages.append(content.astype("<f4").tobytes())
            strides = tuple(stride // content.itemsize for stride in content.strides)
            key = str(len(storages) - 1)
            return tensor(0, content.shape, strides, key, content.size).removesuffix(b".")
        if isinstance(content, dict):
            pairs = (value(key) + opcodes(inner) for key, inner in content.items())
            return b"}(" + b"".join(pairs) + b"u"
        if isinstance(content, list):
            return b"](" + b"".join(map(opcodes, content)) + b"e"
        if isinstance(content, Module):
            return f"c{content.path}\n)\x81".encode("latin-1") + opcodes(content.attributes) + b"b"
        return value(content)

    return as_zip(b"\x80\x02" + opcodes(content) + b".", path, storages)
