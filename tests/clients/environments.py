"""Environments of client libraries, one each under .clients: `make clients` makes the missing ones.

    python tests/clients/environments.py [CLIENT ...]

Packages are pinned in versions.yaml, npm's as `npm:NAME@VERSION`; an environment with other pins is rebuilt.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / ".clients"
VERSIONS: dict[str, list[str]] = yaml.safe_load((HERE / "versions.yaml").read_text(encoding="utf-8"))
"""Client -> the packages that are installed for it."""
NPM = "npm:"
PYTEST, UV = "pytest==9.2.0", "uv==0.13.9"
"""Runs a client's cases in its environment, and installs it, in seconds where pip takes minutes."""


def python_of(client: str) -> Path | None:
    """The Python of a client's environment; None if it doesn't exist or has other versions."""
    made = FOLDER / client / "made.json"
    if not made.exists() or json.loads(made.read_text(encoding="utf-8")) != [PYTEST, *VERSIONS[client]]:
        return None
    return FOLDER / client / "bin" / "python"


def make(client: str) -> None:
    """Make a client's environment; a file with its versions is written last."""
    folder = FOLDER / client
    packages = [PYTEST, *VERSIONS[client]]
    python, uv = folder / "bin" / "python", FOLDER / "uv" / "bin" / "uv"
    if not uv.exists():
        run(sys.executable, "-m", "pip", "install", "--quiet", "--target", FOLDER / "uv", UV)
    if folder.exists():  # incomplete, or with other versions
        shutil.rmtree(folder)
    run(uv, "venv", "--quiet", "--python", sys.executable, folder)
    for torch in [package for package in packages if package.startswith("torch==")]:
        run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", torch)
    from_npm = [package.removeprefix(NPM) for package in packages if package.startswith(NPM)]
    run(uv, "pip", "install", "--quiet", "--python", python, *(each for each in packages if not each.startswith(NPM)))
    if from_npm:  # by the environment's own Node.js
        npm = folder / "bin" / "npm"
        run(npm, "install", "--no-audit", "--no-fund", "--loglevel=error", "--prefix", folder, *from_npm)
    (folder / "made.json").write_text(json.dumps(packages), encoding="utf-8")


def run(*command: str | Path) -> None:
    """Run a command; its failure ends the program."""
    subprocess.run([str(part) for part in command], check=True)


def main() -> None:
    """Make the missing environments, one after another."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(VERSIONS)} (default: all)")
    for client in parser.parse_args().clients or VERSIONS:
        if python_of(client) is None:
            print(f"making {FOLDER / client}", flush=True)
            make(client)


if __name__ == "__main__":
    main()
