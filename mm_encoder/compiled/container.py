"""A loaded package, called through the C interface of Torch's AOTInductor (`aoti_runtime/interface.h`)."""

from __future__ import annotations

import ctypes
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, Structure, byref, c_bool, c_char_p, c_int32, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import _native
from ..errors import RuntimeMismatchError

_TORCH = (2, 14)
_PREFIX = "AOTInductorModelContainer"
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "CreateWithDevice": (POINTER(c_void_p), c_size_t, c_char_p, c_char_p),
    "Delete": (c_void_p,),
    "GetNumConstants": (c_void_p, POINTER(c_size_t)),
    "GetConstantName": (c_void_p, c_size_t, POINTER(c_char_p)),
    "GetConstantOriginalFQN": (c_void_p, c_size_t, POINTER(c_char_p)),
    "GetConstantFromFolded": (c_void_p, c_size_t, POINTER(c_bool)),
    "GetConstantDtype": (c_void_p, c_size_t, POINTER(c_int32)),
    "GetConstantDataSize": (c_void_p, c_size_t, POINTER(c_size_t)),
    "UpdateUserManagedConstantBufferPairs": (c_void_p, c_void_p, c_size_t, c_bool, c_bool),
    "ExtractConstantsMapEntries": (c_void_p, c_void_p, POINTER(c_size_t), c_bool),
    "Run": (c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p, c_void_p),
}


class _Entry(Structure):
    _fields_ = (("name", c_char_p), ("tensor", c_void_p))


def require_usable() -> None:
    """Raise RuntimeMismatchError without the native kernels, which do a compiled tower's attention, and with
    releases of Torch whose interface lacks what is called here.
    """
    if _native.kernels is None:
        raise RuntimeMismatchError("compiled towers need the native kernels, which are not installed here")
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < _TORCH:
        raise RuntimeMismatchError(f"compiled towers need Torch 2.14 or later, this is {torch.__version__}")


class Library:
    """A package's shared library. Raises RuntimeMismatchError if it cannot be loaded."""

    def __init__(self, path: Path) -> None:
        require_usable()
        try:
            # Its symbols must be visible to the package, which calls `aoti_torch_cpu_packed_attention`.
            ctypes.CDLL(str(_native.LIBRARY), mode=ctypes.RTLD_GLOBAL)
            self._library = ctypes.CDLL(str(path))  # whose functions run without the GIL
            for name, arguments in _ARGUMENTS.items():
                function = getattr(self._library, _PREFIX + name)
                function.argtypes, function.restype = arguments, c_int32
            last_error = self._library.AOTInductorGetLastError
            last_error.argtypes, last_error.restype = (POINTER(c_char_p),), c_int32
            self.delete_tensor = self._library.aoti_torch_delete_tensor_object  # Torch's own
            self.delete_tensor.argtypes = (c_void_p,)
        except (OSError, AttributeError) as error:  # AttributeError: of a Torch before 2.14
            raise RuntimeMismatchError(f"{path} cannot be loaded: {error}") from None

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the interface. Raises RuntimeError with Torch's message."""
        if getattr(self._library, _PREFIX + name)(*arguments) != 0:
            raise RuntimeError(f"{name} of the compiled tower failed: {self._last_error()}")

    def _last_error(self) -> str:
        message = c_char_p()
        self._library.AOTInductorGetLastError(byref(message))
        return (message.value or b"no reason given").decode(errors="replace")


class Container:
    """One instance of a compiled tower on weights of the caller; for one thread at a time."""

    def __init__(self, library: Library, weights: Mapping[str, Tensor]) -> None:
        """`weights` has every constant of the package by its name in the Python tower.

        Raises RuntimeMismatchError unless they have the dtypes and sizes that the code was compiled for.
        """
        self._library, self._parts = library, _Parts()
        weakref.finalize(self, _delete, library, self._parts).atexit = False
        self._fill(weights)

    def run(self, inputs: Sequence[Tensor]) -> Tensor:
        """Run in one native call, without the GIL. Nothing checks the inputs, see `signature`."""
        given = (c_void_p * len(inputs))(*_handles(inputs))  # which the call takes over
        out = (c_void_p * 1)()
        self._library.call("Run", self._parts.container, given, len(inputs), out, 1, None, None)
        return _take(out)

    def _fill(self, weights: Mapping[str, Tensor]) -> None:
        parts, call = self._parts, self._library.call
        call("CreateWithDevice", byref(parts.container), 1, b"cpu", None)
        names, tensors = _match(self._library, parts.container, weights)
        parts.held += _handles(tensors)
        pairs = (_Entry * len(names))(*map(_Entry, names, parts.held))
        call("UpdateUserManagedConstantBufferPairs", parts.container, pairs, len(names), False, True)
        entries, count = POINTER(_Entry)(), c_size_t()
        call("ExtractConstantsMapEntries", parts.container, byref(entries), byref(count), False)
        parts.copies += [entries[index].tensor for index in range(count.value)]
        parts.probe = weakref.ref(tensors[0])


class _Parts:
    """What must be deleted with a container."""

    def __init__(self) -> None:
        self.container = c_void_p()
        self.held: list[int] = []
        """Our handles of its constants, which it does not copy."""
        self.copies: list[int] = []
        """Its own handles of them."""
        self.probe: Callable[[], object] = lambda: None
        """Returns one of the constants as long as a handle of it exists."""


def _delete(library: Library, parts: _Parts) -> None:
    if parts.container:
        library.call("Delete", parts.container)
    for handle in parts.held:
        library.delete_tensor(handle)
    # Torch 2.14 forgets its own handles (`MaybeOwningAtenTensorHandle`), which would keep the weights for
    # ever; with a release that deletes them, deleting them again would crash.
    if parts.probe() is not None:
        for handle in parts.copies:
            library.delete_tensor(handle)


def _match(
    library: Library, container: c_void_p, weights: Mapping[str, Tensor]
) -> tuple[list[bytes], list[Tensor]]:
    """Return the names and the tensors of the container's constants."""
    count = c_size_t()
    library.call("GetNumConstants", container, byref(count))
    names, tensors = [], []
    for index in range(count.value):
        name, theirs = c_char_p(), c_char_p()
        folded, dtype, size = c_bool(), c_int32(), c_size_t()
        for function, value in (
            ("GetConstantName", name),
            ("GetConstantOriginalFQN", theirs),
            ("GetConstantFromFolded", folded),
            ("GetConstantDtype", dtype),
            ("GetConstantDataSize", size),
        ):
            library.call(function, container, index, byref(value))
        ours = (theirs.value or b"?").decode().removeprefix("tower.")
        tensor = weights.get(ours)
        if folded.value or tensor is None:
            raise RuntimeMismatchError(f"the package has a constant {ours}, which is no weight here")
        if _DTYPES.get(dtype.value) != tensor.dtype or _aligned(size.value) != _aligned(tensor.nbytes):
            raise RuntimeMismatchError(f"{ours} has another dtype or size in the package")
        names.append(name.value or b"")
        tensors.append(tensor.detach().contiguous())  # other strides would be read wrongly
    return names, tensors


# The codes of Torch's ScalarType, which its C shim returns.
_DTYPES = {0: torch.uint8, 4: torch.int64, 5: torch.float16, 6: torch.float32, 15: torch.bfloat16}

_get_name = ctypes.pythonapi.PyCapsule_GetName
_get_name.argtypes, _get_name.restype = (ctypes.py_object,), c_char_p
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.argtypes, _get_pointer.restype = (ctypes.py_object, c_char_p), c_void_p
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.argtypes, _new_capsule.restype = (c_void_p, c_char_p, c_void_p), ctypes.py_object


def _aligned(nbytes: int) -> int:
    """Round up as the package does, where constants begin at multiples of 64 bytes."""
    return -(-nbytes // 64) * 64


def _handles(tensors: Sequence[Tensor]) -> list[int]:
    """Make a new handle (AtenTensorHandle) of each tensor, to be deleted or handed over."""
    capsules = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))
    return [_get_pointer(capsule, _get_name(capsule)) for capsule in capsules]


def _take(out: ctypes.Array[c_void_p]) -> Tensor:
    """Return the tensor of the only handle in `out`, which is used up."""
    capsule = _new_capsule(out[0], None, None)
    return torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(capsule)
