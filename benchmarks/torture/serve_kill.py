"""kill -9 of a server at random moments under load: what clients see, and how soon it is back.

    python -m benchmarks.torture.serve_kill [--kills 5] [--clients 8] [--ready 20] [--output F.json]
        [-- options of eyas serve]

Fails unless every client of a killed server gets a connection error at once, a new server is ready within `--ready`
seconds, the same question is answered the same before and after, and the model's files are untouched.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import httpx

from benchmarks.harness import Output, script
from benchmarks.torture.verdict import conclude
from eyas.bench.serving.servers import ServerProcess, eyas_server
from tests.toy.pair import TOY_DRAFTER, TOY_PAIR, TOY_TARGET

QUESTION = {"prompt": "def add(a, b):", "max_tokens": 24, "temperature": 0.7, "seed": 5}


def digest(*folders: Path) -> str:
    """A hash over all files of the folders."""
    found = hashlib.sha256()
    for folder in folders:
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


def answer(server: ServerProcess, model: str) -> str:
    """The server's answer to `QUESTION`, which is seeded."""
    response = httpx.post(f"{server.url}/completions", json={"model": model, **QUESTION}, timeout=60, trust_env=False)
    return str(response.raise_for_status().json()["choices"][0]["text"])


async def under_load(server: ServerProcess, model: str, clients: int, moment: float) -> tuple[Counter[str], float]:
    """Clients that stream until the server is killed; how they ended, and how long the last one took to notice."""
    endings: Counter[str] = Counter()
    killed = 0.0

    async def client(number: int) -> None:
        body = {"model": model, **QUESTION, "max_tokens": 200, "seed": number, "ignore_eos": True, "stream": True}
        while True:
            async with httpx.AsyncClient(timeout=30, trust_env=False) as http:
                try:
                    async with http.stream("POST", f"{server.url}/completions", json=body) as response:
                        response.raise_for_status()
                        async for _ in response.aiter_bytes():
                            pass
                except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
                    endings[type(error).__name__] += 1
                    return
                except httpx.HTTPError as error:
                    endings[f"wrong: {type(error).__name__}"] += 1
                    return

    async def killer() -> None:
        nonlocal killed
        await asyncio.sleep(moment)
        killed = time.monotonic()
        server.kill()

    await asyncio.gather(killer(), *(client(number) for number in range(clients)))
    return endings, time.monotonic() - killed


@script
def main(
    serve: Annotated[Sequence[str], "options of eyas serve"] = TOY_PAIR,
    *,
    kills: int = 5,
    clients: int = 8,
    ready: Annotated[float, "seconds until a new server must be ready"] = 20.0,
    seed: int = 0,
    output: Output = None,
) -> None:
    chance = random.Random(seed)
    server = eyas_server("killed", [*serve, "--served-model-name", "m"])
    files = digest(TOY_TARGET, TOY_DRAFTER)
    found: list[dict[str, Any]] = []
    with server:
        first = answer(server, "m")
        for _ in range(kills):
            moment = chance.uniform(0.2, 3.0)
            endings, noticed = asyncio.run(under_load(server, "m", clients, moment))
            started = server.start()
            found.append(
                {
                    "after_seconds": round(moment, 2),
                    "clients": dict(endings),
                    "noticed_seconds": round(noticed, 3),
                    "ready_seconds": round(started, 2),
                    "same_answer": answer(server, "m") == first,
                }
            )
    held = {
        "clients get a connection error": not any(end.startswith("wrong") for kill in found for end in kill["clients"]),
        "at once": all(kill["noticed_seconds"] < 5 for kill in found),
        f"ready again within {ready:g} s": all(kill["ready_seconds"] < ready for kill in found),
        "the same answer after": all(kill["same_answer"] for kill in found),
        "files untouched": digest(TOY_TARGET, TOY_DRAFTER) == files,
    }
    conclude({"kills": found}, held, output)


if __name__ == "__main__":
    raise SystemExit(main())
