"""A kind that only its own file describes: registering it is all that load, inspect, export and the doctor need."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eyas.doctor.measure import Reading
from eyas.doctor.search import other_readings
from eyas.drafters.checkpoint import open_checkpoint, save_network
from eyas.drafters.config import FeatureConfig
from eyas.drafters.formats.fields import Fields
from eyas.drafters.kind import Kind
from eyas.drafters.kinds import KINDS
from eyas.drafters.kinds.eagle1 import Eagle1Config
from eyas.drafters.loading import load_drafter
from eyas.drafters.network import Attend, DraftNetwork, set_vocabulary
from eyas.drafters.registry import kind_for, kind_name
from eyas.errors import CheckpointError, ExportError, UsageError
from eyas.interop.export.consumers import CONSUMERS
from eyas.interop.export.drafter import DrafterToExport
from eyas.interop.export.export import export
from eyas.interop.inspect.report import report_drafter
from eyas.tree import parse_tree
from eyas.types import SamplingParams
from eyas.verify import Sampler

from .. import tiny

SOURCE = Path(__file__).parents[2] / "src" / "eyas"


class SumConfig(FeatureConfig):
    """Settings of a network of one matrix."""

    bias: bool = False
    scale: float = 1.0


class SumNetwork(DraftNetwork):
    """Mixes embedding and state by one matrix."""

    config: SumConfig

    def __init__(self, config: SumConfig) -> None:
        super().__init__(config)
        self.mix = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)

    def step(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,  # noqa: ARG002
        attend: Attend,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        mixed = self.config.scale * self.mix(torch.cat((self.embed(tokens), hidden), dim=-1))
        return mixed, mixed


def read(fields: Fields) -> SumConfig:
    fields.values["target_hidden_size"] = fields.values.get("hidden_size")
    return fields.finish(SumConfig)


def write(config: SumConfig) -> dict[str, Any]:
    values = config.model_dump(mode="json", exclude={"target_hidden_size"}, exclude_none=True)
    return {"model_type": "test_sum", "architectures": ["SumDrafter"], **values}


KIND = Kind(
    "sum",
    SumConfig,
    SumNetwork,
    read,
    write,
    architectures=frozenset({"SumDrafter"}),
    model_type="test_sum",
    paired_inputs=("mix.weight",),
)


class TwinConfig(Eagle1Config):
    """EAGLE-1's configuration under another name."""


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a drafter of the kind, which is registered."""
    monkeypatch.setitem(KINDS, "sum", KIND)
    size = {"hidden_size": tiny.HIDDEN, "vocab_size": tiny.VOCAB}
    torch.manual_seed(0)
    network = SumNetwork(SumConfig(**size, draft_vocab_size=tiny.VOCAB, target_hidden_size=tiny.HIDDEN))
    set_vocabulary(network, torch.arange(tiny.VOCAB))
    save_network(network, tmp_path / "drafter")
    return tmp_path / "drafter"


def test_it_is_recognized_loaded_and_drafts(saved: Path) -> None:
    drafter = load_drafter(saved, tiny.target(), method="sum")
    assert type(drafter.network) is SumNetwork
    assert kind_for(drafter.network.config).name == "sum"
    assert drafter.taps == (tiny.target().final_boundary,)
    drafter.pairs.resize(1)
    drafter.observe(range(1), torch.tensor([[5, 6]]), torch.randn(1, 2, 1, tiny.HIDDEN), [2])
    sampler = Sampler(1, tiny.VOCAB, torch.device("cpu"))
    sampler.admit(0, SamplingParams(), [3] * 8, ())
    tree = drafter.draft(range(1), parse_tree("chain:3"), sampler.coupling(range(1), False))
    assert bool(tree.valid.all())
    assert tree.size == 3
    with pytest.raises(UsageError, match="is of the kind sum, not eagle3"):
        load_drafter(saved, tiny.target(), method="eagle3")


def test_it_needs_no_tensor_besides_its_matrices(saved: Path) -> None:
    target = tiny.target()
    assert load_drafter(saved, target, quantize="int4").network.dtype == target.dtype


def test_unregistered_it_is_refused(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(KINDS, "sum")
    with pytest.raises(CheckpointError, match=r"unknown architecture SumDrafter|no drafter that eyas loads"):
        open_checkpoint(saved)


def test_inspect_reports_it(saved: Path) -> None:
    report = report_drafter(saved)
    assert (report.kind, report.problems, report.missing, report.extra) == ("sum", [], [], [])
    assert report.config["bias"] is False
    assert kind_name({"model_type": "test_sum"}, ()) == "sum"


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_a_kind_of_no_family_is_exported_to_nobody(consumer: str, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"(?s)kind: it doesn't support drafters of kind sum|target: "):
        export(saved, consumer, tmp_path / "out")


def test_rules_are_about_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another kind of the EAGLE-1 network meets and breaks the same rules."""
    monkeypatch.setitem(KINDS, "twin", replace(KINDS["eagle1"], name="twin", config=TwinConfig))
    original = tiny.network("eagle1", embedding="shared", head="shared")
    config = TwinConfig(**original.config.model_dump())
    assert kind_for(config).name == "twin"
    tensors = original.state_dict()
    broken = 0
    for consumer in CONSUMERS.values():
        expected = consumer.prepare(DrafterToExport(original.config, tensors))[1]
        found = consumer.prepare(DrafterToExport(config, tensors))[1]
        assert [each.field for each in found] == [each.field for each in expected]
        if found and found[0].field == "kind":
            assert found[0].reason == "it doesn't support drafters of kind twin"
        else:
            assert found == expected
            broken += len(found)
    assert broken


def test_the_doctor_tries_its_inputs_and_taps(saved: Path) -> None:
    target = tiny.target()
    reading = Reading.of(open_checkpoint(saved, layers=target.num_layers), target)
    found = {(change.aspect, change.written) for change in other_readings(reading, target)}
    assert {("taps", True), ("input order", True)} <= found
    swapped = next(change for change in other_readings(reading, target) if change.aspect == "input order")
    mixed = swapped.apply(reading).tensors["mix.weight"]
    assert torch.equal(mixed, reading.tensors["mix.weight"].roll(tiny.HIDDEN, dims=1))


def test_nobody_imports_a_kind_by_its_file() -> None:
    importing = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("eyas.drafters.kinds.")
    }
    of_networks = ("drafters/kinds/", "drafters/in_target/", "labs/kinds/")  # which may build on a kind's network
    assert not {path for path in importing if not path.startswith(of_networks)}
