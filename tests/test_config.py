"""Strict configurations: what is read, overridden, and refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field, ValidationError, model_validator

from eyas.config import StrictModel, differences, load_config, validated
from eyas.errors import ConfigError, EyasError, UsageError


class Inner(StrictModel):
    rate: float = Field(default=0.1, gt=0)
    names: tuple[str, ...] = ()


class Outer(StrictModel):
    steps: int
    inner: Inner = Inner()
    note: str | None = None


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text("steps: 3\ninner:\n  rate: 0.5\n")
    return file


def test_a_file_is_read(path: Path) -> None:
    assert load_config(Outer, path) == Outer(steps=3, inner=Inner(rate=0.5))


def test_overrides_are_yaml_values_at_dotted_keys(path: Path) -> None:
    overrides = ["steps=7", "inner.names=[a, b]", "note=x=y", "inner.rate=1e-3"]
    config = load_config(Outer, path, overrides)
    assert (config.steps, config.inner.names, config.note) == (7, ("a", "b"), "x=y")
    assert config.inner.rate == 0.001
    assert load_config(Outer, path, ["note=null"]).note is None


def test_an_override_makes_a_section_that_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("steps: 3\n")
    assert load_config(Outer, file, ["inner.rate=0.25"]).inner.rate == 0.25


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("stepz=3", r"(?s)run\.yaml is not a valid Outer:.*stepz: there is no such key"),
        ("inner.rat=3", r"inner\.rat: there is no such key"),
        ("inner.rate=-1", r"inner\.rate: Input should be greater than 0"),
        ("steps=many", "steps: Input should be a valid integer"),
        ("steps", "must look like key=value"),
        ("steps.deep=3", "steps is not a section"),
        ("note=[", r"'\[' is not a YAML value"),
    ],
)
def test_mistakes_are_named(path: Path, override: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config(Outer, path, [override])


class Pair(StrictModel):
    low: int
    high: int

    @model_validator(mode="after")
    def _in_order(self) -> Pair:
        if self.low > self.high:
            raise ValueError("low is above high")
        return self


def test_a_mistake_of_several_keys_is_told_in_its_own_words() -> None:
    with pytest.raises(ConfigError) as caught:
        validated(Pair, {"low": 2, "high": 1}, "here")
    assert str(caught.value) == "here is not a valid Pair:\n  low is above high"


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        validated(Outer, {"inner": {"rate": 0, "x": 1}}, "here")
    for part in ("here is not a valid Outer", "steps: it is missing", "inner.rate", "inner.x"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("[1, 2]", "must be a YAML mapping"), ("", "must be a YAML mapping"), ("a: [", "not valid YAML")],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        load_config(Outer, file)
    with pytest.raises(ConfigError, match="can't read the configuration"):
        load_config(Outer, tmp_path / "absent.yaml")


def test_configurations_are_frozen_and_errors_are_usage_errors() -> None:
    config = Outer(steps=1)
    with pytest.raises(ValidationError, match="frozen"):
        config.steps = 2  # type: ignore[misc]
    assert issubclass(ConfigError, UsageError)
    assert issubclass(UsageError, EyasError)


def test_differences_name_the_key_and_what_sets_it() -> None:
    before = {"sampling": {"seed": 1, "top_p": 1.0}, "turns": "last", "gone": {}}
    assert differences(before, dict(before)) == []
    now = {"sampling": {"seed": 2, "top_p": 1.0}, "turns": "last", "gone": {}, "max_length": 9}
    parameters = {"sampling.seed": "seed"}
    assert differences(before, now, parameters.get) == [
        "sampling.seed was 1, is 2 (`seed=`)",
        "max_length was None, is 9",
    ]


class Part(StrictModel):
    value: int = 0


class Whole(StrictModel):
    maybe: Inner | None = None
    parts: dict[str, Part] = Field(default_factory=dict)
    rows: tuple[Part, ...] = ()


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"mayb": None}, "mayb: there is no such key, did you mean maybe?"),
        ({"maybe": {"raet": 1}}, "maybe.raet: there is no such key, did you mean rate?"),
        ({"parts": {"first": {"valeu": 1}}}, "parts.first.valeu: there is no such key, did you mean value?"),
        ({"rows": [{"vlaue": 1}]}, "rows.0.vlaue: there is no such key, did you mean value?"),
        ({"maybe": {"swirl": 1}}, "maybe.swirl: there is no such key"),
    ],
)
def test_a_mistyped_key_is_answered_with_the_nearest(values: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validated(Whole, values, "a file")
    assert str(caught.value).splitlines()[-1].strip() == line
