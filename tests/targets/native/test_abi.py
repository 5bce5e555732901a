"""Python and the kernels mean the same by structs, constants and numbers of kinds: those of `kernels/abi.h`."""

from __future__ import annotations

import ctypes
import re
from ctypes import sizeof

import pytest
import torch

from eyas.cache.folder import cache_directory
from eyas.targets.native import abi, library
from eyas.targets.native.packed import WeightFormat

STRUCT = """
struct Inner { int64_t size; };
struct Outer {
    const float *x, *in;      // two pointers; a keyword
    const Inner* parts;
    char* const* keys;
    float a, b;
    Inner whole;
};
"""


def numbers(name: str) -> dict[str, int]:
    """The enumerators of the header."""
    found = re.search(rf"^enum {name} : int64_t \{{(.*?)\}};", abi.header(), re.MULTILINE | re.DOTALL)
    assert found is not None
    parts = [re.sub(r"int64_t\{1\}", "1", part).split("=") for part in found[1].split(",")]
    return {part[0].strip(): eval(part[1]) if len(part) > 1 else at for at, part in enumerate(parts)}


@pytest.mark.parametrize(
    ("name", "mine"),
    [
        ("Mode", {mode.name: mode.value for mode in library.Mode}),
        ("Activation", {kind.name: kind.value for kind in library.Activation}),
        ("Microkernel", {way.name: way.value for way in library.Microkernel if way is not library.Microkernel.PAIRS}),
        ("Kind", {"FLOAT32": library.KINDS[torch.float32], "BFLOAT16": library.KINDS[torch.bfloat16]}
                 | {kind.name: kind.value for kind in WeightFormat}),
    ],
)  # fmt: skip
def test_kinds_have_the_kernels_numbers(name: str, mine: dict[str, int]) -> None:
    assert numbers(name) == mine


def test_fields_are_read_from_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abi, "header", lambda: re.sub(r"//[^\n]*", "", STRUCT.replace("; };", ";\n};")))
    monkeypatch.setattr(abi, "_described", {})

    @abi.described("Inner")
    class Inner(ctypes.Structure):
        pass

    @abi.described("Outer")
    class Outer(ctypes.Structure):
        pass

    pointer = ctypes.POINTER(Inner)
    assert Outer._fields_ == [
        ("x", ctypes.c_void_p), ("in_", ctypes.c_void_p), ("parts", pointer), ("keys", ctypes.c_void_p),
        ("a", ctypes.c_float), ("b", ctypes.c_float), ("whole", Inner),
    ]  # fmt: skip
    assert sizeof(Outer) == 4 * 8 + 2 * 4 + 8


@pytest.mark.skipif(library.kernels() is None, reason="no compiler, or neither AVX2 nor AVX-512")
def test_a_library_whose_structs_are_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Larger(library.Linear):
        _fields_ = (("more", ctypes.c_int64),)

    made = ctypes.CDLL(
        str(library._compiled(library.compiler() or "", library.processor_flags(), cache_directory() / "native"))
    )
    sizes = library._function(made.eyas_sizes, (ctypes.c_void_p,), ctypes.c_int64)
    abi.check_sizes(sizes)
    monkeypatch.setitem(abi._described, "Linear", Larger)
    with pytest.raises(RuntimeError, match=r"structs Linear, .* take \[48, "):
        abi.check_sizes(sizes)
