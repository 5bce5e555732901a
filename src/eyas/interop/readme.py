"""The README of an exported directory: what it drafts for, how it was read and written, what is known of it."""

from __future__ import annotations

import json

from eyas.interop.consumers import Consumer
from eyas.interop.subject import Subject


def accept_length(subject: Subject) -> float | None:
    """As measured by decoding when the drafter was trained, if its card says so."""
    for place in (subject.provenance.get("validation"), subject.provenance):
        found = place.get("decoded_accept_length") if isinstance(place, dict) else None
        if isinstance(found, int | float):
            return float(found)
    return None


def readme(subject: Subject, consumer: Consumer, command: str) -> str:
    """Markdown."""
    provenance, measured = subject.provenance, accept_length(subject)
    target = provenance.get("target", "not recorded") if subject.serving is None else subject.serving.name
    fingerprint = provenance.get("target_fingerprint")
    taps = subject.config.taps
    rows = [
        ("target", f"`{target}`" + (f", weights {fingerprint}" if fingerprint else "")),
        ("drafter", f"{subject.kind.name}, {sum(t.numel() for t in subject.tensors.values()):,} numbers, "
                    f"{str(subject.dtype).removeprefix('torch.')}"),
        ("taps", "the consumer's default" if taps is None else
         f"boundaries {list(taps)} (k = the residual entering target layer k); {consumer.title} numbers: "
         f"{consumer.convention}"),
        ("draft vocabulary", f"{subject.config.draft_vocab_size:,} of {subject.config.vocab_size:,}"),
        ("embedding, head", f"{subject.config.embedding}, {subject.config.head} (shared = the target's)"),
        ("accept length", "not measured" if measured is None else
         f"{measured:.2f} tokens a target pass, decoded by eyas with `{subject.config.default_tree or 'its tree'}` "
         "while training"),
        ("written for", f"{consumer.title} {consumer.version}, by `eyas export --to {consumer.name}`"),
        ("changed on the way", "; ".join(subject.changes) or "nothing"),
    ]  # fmt: skip
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    text = f"# A drafter for {target}\n\n| | |\n|---|---|\n{table}\n\nServe it:\n\n```bash\n{command}\n```\n"
    if provenance:
        text += f"\nProvenance:\n\n```json\n{json.dumps(dict(provenance), indent=2)}\n```\n"
    return text
