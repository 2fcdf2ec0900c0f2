"""Writes deploy/requirements.lock: every package that a node needs, with its version and the hashes of its wheels.

    python deploy/lock.py            from the root of the repository, in an environment with '.[network]' installed

Versions are those of constraints.txt, or of this environment where that has none. Hashes are those that PyPI lists for
wheels of CPython 3.11 to 3.13 on Linux, x86_64 and aarch64. torch is the build without GPU packages, which PyTorch
publishes in an index of its own: its hashes are in TORCH below.
"""

from __future__ import annotations

import re
import tomllib
import urllib.request
from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "deploy" / "requirements.lock"
INDEX = "https://pypi.org/simple"
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
# Of https://download.pytorch.org/whl/cpu/torch/, as two public projects have recorded them. Only "cp311 x86_64" was
# compared with the file itself; the index could not be reached. Compare them with the index before you rely on them.
TORCH = {
    "2.13.0+cpu": {
        "cp311 aarch64": "84453b69508ec79902f899c5ed9495acb9e2bbe9fda5f1d5d6f19e3c3842e1a7",
        "cp311 x86_64": "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
        "cp312 aarch64": "6f307c2c32d764ffc6ff6893b801fad6d4752f3e67966cb8abf1843427c02604",
        "cp312 x86_64": "4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2",
        "cp313 aarch64": "0b8f7d0423027ae8b90c7977c627f3379f325363a08224dffad9b4b2d684a83d",
        "cp313 x86_64": "3fbf9c9d1f3c10c2d59d04aca426dee9ccc6ceb32d255c61e93acc3b4f75fae6",
    }
}
HEAD = """\
# Written by deploy/lock.py. Install by
#   pip install --require-hashes --only-binary :all: --extra-index-url https://download.pytorch.org/whl/cpu \\
#     -r requirements.lock
# and then the wheel of codistill by
#   pip install --no-deps codistill-VERSION-py3-none-any.whl
"""


def needed() -> set[str]:
    """The names of all packages that codistill[network] needs on Linux, with what they need in turn."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    open_ = [*project["dependencies"], *project["optional-dependencies"]["network"]]
    names: set[str] = set()
    while open_:
        wanted = Requirement(open_.pop())
        name = canonicalize_name(wanted.name)
        if name not in names and _applies(wanted):
            names.add(name)
            open_ += requires(name) or []
    return names


def _applies(wanted: Requirement) -> bool:
    if wanted.marker is None:
        return True
    linux = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "extra": ""}
    return any(
        wanted.marker.evaluate({**linux, "python_version": python, "python_full_version": f"{python}.0"})
        for python in PYTHONS
    )


def pinned(names: set[str]) -> dict[str, str]:
    """The version of each package."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").split()
    pins = {canonicalize_name(name): number for name, _, number in (line.partition("==") for line in lines)}
    return {name: pins.get(name) or version(name) for name in sorted(names)}


def hashes(name: str, number: str) -> list[str]:
    """The SHA-256 of each wheel that a node may need."""
    with urllib.request.urlopen(f"{INDEX}/{name}/") as page:
        links = re.findall(r'href="[^"]*/([^/"#]+\.whl)#sha256=([0-9a-f]{64})"', page.read().decode())
    found = sorted(digest for file, digest in links if _fits(file, number))
    if not found:
        raise SystemExit(f"{INDEX}/{name}/ lists no wheel of {name} {number} for Linux")
    return found


def _fits(file: str, number: str) -> bool:
    try:
        _, found, _, tags = parse_wheel_filename(file)
    except ValueError:
        return False
    return str(found) == number and any(_tag_fits(tag.interpreter, tag.abi, tag.platform) for tag in tags)


def _tag_fits(interpreter: str, abi: str, platform: str) -> bool:
    versions = [f"cp{python.replace('.', '')}" for python in PYTHONS]
    older = re.fullmatch(r"cp3(\d+)", interpreter) is not None and int(interpreter[3:]) <= 13
    python = (
        interpreter in ("py3", "py2.py3")
        or (interpreter in versions and abi in (interpreter, "none"))
        or (abi == "abi3" and older)
    )
    machine = platform == "any" or ("manylinux" in platform and platform.endswith(MACHINES))
    return python and machine


def main() -> None:
    """Write the file."""
    lines = [HEAD]
    for name, number in pinned(needed()).items():
        if name == "torch":
            number = f"{number.partition('+')[0]}+cpu"
            digests = sorted(TORCH[number].values())
        else:
            digests = hashes(name, number)
        lines.append(f"{name}=={number} " + " ".join(f"\\\n    --hash=sha256:{digest}" for digest in digests) + "\n")
        print(f"{name} {number}: {len(digests)} wheels")
    LOCK.write_text("".join(lines), "utf-8")


if __name__ == "__main__":
    main()
