"""What deploy/ and docs/deploy.md show works: recipe, agent files, units; and every command can be parsed."""

from __future__ import annotations

import configparser
import dataclasses
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from codistill.cli import main, make_parser
from codistill.experiments.building import agent_names
from codistill.experiments.networked import describe_without_data, read_agent_file
from codistill.experiments.recipe import make_recipe, read_recipe
from codistill.federation.joining import with_agent
from codistill.network.options import Network
from codistill.network.policy import Policy, Reports
from codistill.network.terms import hello_of
from codistill.nodes.record import record_of

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
PAGE = (ROOT / "docs" / "deploy.md").read_text("utf-8")
EXECUTED = "\n".join(path.read_text("utf-8") for path in DEPLOY.glob("*.service"))
COMMANDS = sorted(
    set(re.findall(r"^    (codistill .+)$", PAGE, re.MULTILINE))
    | set(re.findall(r"codistill ((?:hub|join) /config.+)$", (DEPLOY / "README.md").read_text("utf-8"), re.MULTILINE))
    | set(re.findall(r"^ExecStart=/opt/codistill/bin/(codistill .+)$", EXECUTED, re.MULTILINE))
)


@pytest.fixture
def agent_folder(tmp_path: Path) -> Path:
    """A folder with small tables of the form that the examples read."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(size=(40, 5)), columns=list("abcde"))
    table["malignant"] = np.arange(40) % 2
    table.to_csv(tmp_path / "patients.csv", index=False)
    np.save(tmp_path / "public.npy", rng.normal(size=(12, 5)))
    for path in (*DEPLOY.glob("*.py"), DEPLOY / "federation.toml"):
        shutil.copy(path, tmp_path)
    return tmp_path


@pytest.mark.parametrize("file", ["my_agent.py", "my_torch_agent.py"])
def test_an_example_of_an_agent_file_gives_an_agent_that_the_recipe_takes(file: str, agent_folder: Path) -> None:
    recipe = read_recipe(agent_folder / "federation.toml")
    brought = read_agent_file(agent_folder / file, "hospital-a")
    assert agent_names(recipe) == ["hospital-a", "hospital-b"]
    hello = hello_of(brought.agent, brought.public)
    assert (hello["shape"], hello["samples"]) == ([5], 32)
    assert brought.public is not None
    description = describe_without_data(recipe)
    assert description.public is not None
    assert description.public.digest == brought.public.digest
    with_agent(description, brought.agent)  # checked for what the protocol needs
    assert record_of(brought.agent).test is not None
    assert len(record_of(brought.agent).test[0]) == 8


@pytest.mark.parametrize(
    ("file", "language"), [("federation.toml", "toml"), ("my_agent.py", "python"), ("my_torch_agent.py", "python")]
)
def test_the_page_shows_the_files_as_they_are(file: str, language: str) -> None:
    assert f"```{language}\n{(DEPLOY / file).read_text('utf-8')}```" in PAGE


def test_the_recipe_of_peers_on_the_page_is_read(tmp_path: Path) -> None:
    blocks = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    recipe = make_recipe(tomllib.loads(blocks[-1]), tmp_path)
    assert recipe.protocol.name == "avgkd"
    assert not describe_without_data(recipe).topology.hub


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_can_be_parsed(command: str) -> None:
    words = shlex.split(command.removeprefix("codistill "))
    options = make_parser().parse_args(words)
    assert callable(options.command)


def test_enough_commands_were_found() -> None:
    found = {command.removeprefix("codistill ").split()[0] for command in COMMANDS}
    assert found >= {"certs", "hub", "join", "up"}
    assert sum("/config/" in command for command in COMMANDS) == 2
    assert sum("/var/lib/" in command for command in COMMANDS) == 2


@pytest.mark.parametrize("unit", sorted(DEPLOY.glob("*.service")), ids=lambda path: path.name)
def test_a_unit_stops_gently_and_comes_back(unit: Path) -> None:
    read = configparser.RawConfigParser(strict=True)
    read.optionxform = str  # type: ignore[assignment,method-assign]
    read.read_string(unit.read_text("utf-8"))
    service = read["Service"]
    assert (service["Restart"], service["SuccessExitStatus"], service["KillSignal"]) == ("on-failure", "130", "SIGTERM")
    assert service["User"] == "codistill"
    assert "TimeoutStopSec" in service
    assert service["LimitNOFILE"] == "65536"
    assert service["LimitCORE"] == "0"  # a core dump holds the key and the data
    assert set(service["RestartPreventExitStatus"].split()) == {"2", "3", "4", "6"}  # a restart would fail again
    assert (service["NoNewPrivileges"], service["ProtectSystem"], service["CapabilityBoundingSet"]) == (
        "yes", "strict", "",
    )  # fmt: skip


# --- packages with their hashes -----------------------------------------------------------------------


def locked() -> dict[str, tuple[str, list[str]]]:
    """Version and hashes of each package in deploy/requirements.lock."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "requirements.lock").read_text("utf-8"), flags=re.MULTILINE)
    found = {}
    for line in text.replace("\\\n", "").splitlines():
        requirement, *hashes = line.split()
        name, _, version = requirement.partition("==")
        found[name] = (version, hashes)
    return found


def test_every_locked_package_has_hashes_and_the_version_that_is_tested() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").split()
    tested = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    for name, (version, hashes) in locked().items():
        assert hashes, name
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes), name
        assert version.removesuffix("+cpu") == tested.get(name, version), name
    assert len(locked()["numpy"][1]) == len(locked()["torch"][1]) == 6  # three versions of Python, two machines


def test_everything_that_a_node_needs_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for text in (*project["dependencies"], *project["optional-dependencies"]["network"]):
        wanted = Requirement(text)
        version, _ = locked()[canonicalize_name(wanted.name)]
        assert wanted.specifier.contains(version), text


@pytest.mark.parametrize("name", ["Containerfile", "README.md"])
def test_what_is_deployed_is_installed_with_hashes(name: str) -> None:
    """No package is installed by its name alone, and none but by its hash."""
    text = (DEPLOY / name).read_text("utf-8").replace("\\\n", " ")
    installs = re.findall(r"pip install [^\n&]*", text)
    assert sum("--require-hashes" in line and "requirements.lock" in line for line in installs) == 1
    assert all("--require-hashes" in line or "--no-deps" in line for line in installs)


# --- the policy -----------------------------------------------------------------------------------------


def test_the_recipe_keeps_to_the_example_of_a_policy(agent_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["policy", "check", str(DEPLOY / "policy.toml"), str(agent_folder / "federation.toml")]
    assert main([*arguments, "--agent", str(agent_folder / "my_agent.py")]) == 0
    assert "would be accepted: fedmd, 10 rounds" in capsys.readouterr().out


def test_every_rule_of_a_policy_is_on_the_page() -> None:
    page = (ROOT / "docs" / "policy.md").read_text("utf-8")
    for field in dataclasses.fields(Policy):
        if field.name not in ("settings", "report"):
            assert f"\n| `{field.name}` |" in page
    for field in dataclasses.fields(Reports):
        assert f"\n| `report.{field.name}` |" in page
    assert (DEPLOY / "policy.toml").read_text("utf-8") in page


def test_every_network_setting_is_on_the_page() -> None:
    for field in dataclasses.fields(Network):
        assert f"\n| `{field.name}` |" in PAGE


def test_the_example_data_are_made_where_one_says_and_help_makes_nothing(tmp_path: Path) -> None:
    made = [sys.executable, str(DEPLOY / "example_data.py")]
    said = subprocess.run([*made, "--help"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "usage: example_data.py" in said.stdout
    assert "two unequal tables" in said.stdout
    assert list(tmp_path.iterdir()) == []
    wrong = subprocess.run([*made, "--out", "x"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (wrong.returncode, list(tmp_path.iterdir())) == (2, [])
    subprocess.run([*made, "data"], cwd=tmp_path, capture_output=True, check=True)
    files = sorted(
        str(path.relative_to(tmp_path / "data")) for path in (tmp_path / "data").rglob("*") if path.is_file()
    )
    assert files == ["hospital-a/patients.csv", "hospital-b/patients.csv", "public.npy"]
