"""Hostile clients beside a well-behaved one: no 5xx, clear 4xx, no stall of others.

    python -m benchmarks.torture.serve_hostile [--seconds 5] [--output FILE.json] [-- options of eyas serve]

The well-behaved client asks for short answers one after the other, first alone, then for as long as each attack lasts;
its slowest answer under attack is set against its slowest alone. Fails if any answer to anybody is a 5xx, if an attack
that must be refused isn't, or if a well-behaved answer takes longer than `--patience` seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import httpx

from benchmarks.harness import Output, script
from benchmarks.torture.attacks import MAY_BE_ANSWERED, MUST_BE_REFUSED, body
from benchmarks.torture.verdict import conclude
from eyas.bench.serving.servers import ServerProcess, eyas_server
from tests.toy.pair import TOY_PAIR


async def behave(http: httpx.AsyncClient, until: Callable[[], bool]) -> list[float]:
    """Ask, wait, ask again; the seconds each answer took. Raises on anything but 200."""
    taken = []
    while not until() or len(taken) < 2:
        began = time.monotonic()
        (await http.post("/v1/completions", json=body())).raise_for_status()
        taken.append(time.monotonic() - began)
    return taken


async def attack_all(server: ServerProcess, seconds: float) -> dict[str, Any]:
    """Every attack, with the well-behaved client beside it."""
    limits = httpx.Limits(max_connections=None)
    results: dict[str, Any] = {}
    async with (
        httpx.AsyncClient(base_url=server.root, timeout=120, limits=limits) as hostile,
        httpx.AsyncClient(base_url=server.root, timeout=120) as polite,
    ):
        await behave(polite, lambda: True)
        end = time.monotonic() + seconds
        alone = await behave(polite, lambda: time.monotonic() > end)
        results["alone"] = {"answers": len(alone), "slowest_seconds": round(max(alone), 3)}
        for name, attack in (MUST_BE_REFUSED | MAY_BE_ANSWERED).items():
            running = asyncio.ensure_future(attack(server, hostile))
            taken = await behave(polite, running.done)
            results[name] = {
                "statuses": dict(await running),
                "answers": len(taken),
                "slowest_seconds": round(max(taken), 3),
            }
        results["afterwards"] = {"slowest_seconds": round(max(await behave(polite, lambda: True)), 3)}
    return results


@script
def main(
    serve: Annotated[Sequence[str], "options of eyas serve"] = TOY_PAIR,
    *,
    seconds: float = 5.0,
    patience: float = 5.0,
    output: Output = None,
) -> None:
    with eyas_server("hostile", [*serve, "--served-model-name", "m"]) as server:
        results = asyncio.run(attack_all(server, seconds))
    statuses = {name: result.get("statuses", {}) for name, result in results.items()}
    slowest = max(result["slowest_seconds"] for result in results.values())
    held = {
        "no 5xx": not any(status.startswith("5") for seen in statuses.values() for status in seen),
        "what must be refused is": not any(
            status.startswith("2") for name in MUST_BE_REFUSED for status in statuses[name]
        ),
        f"nobody waits {patience:g} s": slowest < patience,
    }
    conclude({"attacks": results}, held, output)


if __name__ == "__main__":
    raise SystemExit(main())
