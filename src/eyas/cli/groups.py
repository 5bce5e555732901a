"""Option groups: a dataclass of `Annotated` fields stands for its options, so verbs share them without copies.

    def generate(target: TargetOptions, json: bool = False) -> None: ...

becomes a command with every option of `TargetOptions`, and is called with the group put together again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints


class Given(frozenset[str]):
    """The names of the options that were given, and not left at their defaults. A verb that takes it is told."""


class Spread:
    """A function's signature with its groups taken apart, and the way back."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._groups: dict[str, type[Any]] = {}
        self._given: str | None = None
        parameters: list[Parameter] = []
        hints = get_type_hints(function, include_extras=True)
        for name, parameter in signature(function).parameters.items():
            hint = hints[name]
            if hint is Given:
                self._given = name
            elif isinstance(hint, type) and is_dataclass(hint):
                self._groups[name] = hint
                parameters += _options(hint)
            else:
                parameters.append(_keyword(name, parameter.default, hint))
        self.signature = Signature(parameters)

    def gather(self, values: dict[str, Any], given: Given | None = None) -> dict[str, Any]:
        """The function's arguments from the options' values, and the names of those that were given."""
        rest = dict(values) | ({} if self._given is None else {self._given: given or Given()})
        groups = {
            name: group(**{field.name: rest.pop(field.name) for field in fields(group)})
            for name, group in self._groups.items()
        }
        return rest | groups


def _options(group: type[Any]) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [_keyword(field.name, _default(field), hints[field.name]) for field in fields(group)]


def _default(field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    return Parameter.empty if field.default_factory is MISSING else field.default_factory()


def _keyword(name: str, default: Any, hint: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)
