"""The interface between Python and the kernels, as `kernels/abi.h` describes it: constants and structs.

The header is the only description. Fields of structs are read from it, and the compiled library reports the size of
each struct, which must equal its size in ctypes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from ctypes import POINTER, Structure, c_double, c_float, c_int64, c_void_p, sizeof
from functools import cache
from keyword import iskeyword
from typing import Any, TypeVar

from eyas.targets.native.builds import SOURCES

_STRUCT = re.compile(r"^struct (\w+) \{(.*?)^\};", re.MULTILINE | re.DOTALL)
_NUMBERS = {"int64_t": c_int64, "float": c_float, "double": c_double}

S = TypeVar("S", bound=Structure)
_described: dict[str, type[Structure]] = {}


@cache
def header() -> str:
    """The header without its comments."""
    return re.sub(r"//[^\n]*", "", (SOURCES / "abi.h").read_text(encoding="utf-8"))


def constant(name: str) -> int:
    """The value of a constant in the header."""
    found = re.search(rf"^constexpr \w+ {name} = (\d+);", header(), re.MULTILINE)
    assert found is not None, name
    return int(found[1])


def described(name: str) -> Callable[[type[S]], type[S]]:
    """Give a class the fields of the header's struct `name`; structs among the fields must be described before it.

    A field named like a Python keyword gets an underscore: `in_`.
    """

    def decorated(cls: type[S]) -> type[S]:
        cls._fields_ = list(_fields(dict(_STRUCT.findall(header()))[name]))
        _described[name] = cls
        return cls

    return decorated


def _fields(body: str) -> Iterator[tuple[str, Any]]:
    for declaration in re.sub(r"\bconst\b", "", body).split(";")[:-1]:
        kind, names = re.fullmatch(r"\s*(\w+)(.*)", declaration, re.DOTALL).groups()  # type: ignore[union-attr]
        for name in names.split(","):
            bare = name.replace("*", "").strip()
            yield f"{bare}_" if iskeyword(bare) else bare, _field_type(kind, name.count("*"))


def _field_type(kind: str, stars: int) -> Any:
    if stars:
        return POINTER(_described[kind]) if stars == 1 and kind in _described else c_void_p
    return _NUMBERS.get(kind) or _described[kind]


def check_sizes(sizes: Callable[[Any], int]) -> None:
    """Compare the structs' sizes with those of a library, in the header's order. RuntimeError if they differ."""
    names = [name for name, _ in _STRUCT.findall(header())]
    found = (c_int64 * len(names))()
    count = sizes(found)
    expected = [sizeof(_described[name]) for name in names]
    if count != len(names) or list(found) != expected:
        raise RuntimeError(f"the kernels' structs {', '.join(names)} take {list(found)} bytes instead of {expected}")
