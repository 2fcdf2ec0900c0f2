"""Commands that inspect a recipe or the folder of a run do not run code that these name, unless it is trusted."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from codistill.cli import main

# The file leaves a mark whenever it is run, and so does a module beside it that it imports.
MARK = "from pathlib import Path\nwith Path({mark!r}).open('a') as file:\n    file.write('{who} ')\n"
HELPER = """
import beside
from dataclasses import dataclass
from sklearn.linear_model import LogisticRegression
from codistill.protocols.alone import Alone

@dataclass(frozen=True, kw_only=True)
class E(Alone):
    name = "e"

class Model(LogisticRegression):
    pass
"""
RECIPE = """
seed = 0
[data]
name = "wine"
[[agents]]
name = "a"
learner = "{learner}"
[[agents]]
name = "b"
learner = {{ kind = "pipeline", steps = ["StandardScaler", "{learner}"] }}
[protocol]
name = "{protocol}"
rounds = 2
[evaluation]
alone = false
[runtime]
kind = "simulation"
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with recipes that name a file, a run of each, and a policy; nothing has been run since."""
    mark = str(tmp_path / "mark")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper.py").write_text(MARK.format(mark=mark, who="helper") + HELPER)
    (tmp_path / "beside.py").write_text(MARK.format(mark=mark, who="beside"))
    (tmp_path / "protocol.toml").write_text(RECIPE.format(learner="logistic_regression", protocol="helper.py:E"))
    (tmp_path / "learner.toml").write_text(RECIPE.format(learner="helper.py:Model", protocol="alone"))
    (tmp_path / "policy.toml").write_text("rounds = 5\n")
    for name in ("protocol", "learner"):
        assert main(["run", f"{name}.toml", "--out", name, "--quiet"]) == 0
    assert "helper" in (tmp_path / "mark").read_text()
    _forget(tmp_path)
    return tmp_path


def _forget(folder: Path) -> None:
    """Files that were run once are not run again by the same process, unless it forgets them."""
    import sys

    from codistill.experiments import user_code

    user_code._loaded.clear()
    sys.modules.pop("beside", None)
    (folder / "mark").unlink(missing_ok=True)


def _said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    capsys.readouterr()
    code = main(arguments)
    out = capsys.readouterr()
    return code, out.out + out.err


@pytest.mark.parametrize("name", ["protocol", "learner"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["report", "{name}"],
        ["report", "{name}", "--out", "page.html"],
        ["compare", "{name}", "{name}", "--out", "page.html"],
        ["data", "{name}.toml"],
        ["data", "{name}.toml", "--set", "protocol.rounds=3", "--out", "picture.png"],
        ["data", "{name}.toml", "--set", "protocol.name=fedavg"],
        ["data", "{name}.toml", "--set", "protocol.name=helper.py:E"],
        ["data", "{name}/recipe.toml"],
        ["policy", "check", "policy.toml"],
        ["protocols"],
        ["learners"],
    ],
    ids=" ".join,
)
def test_inspecting_runs_no_code(
    here: Path, capsys: pytest.CaptureFixture[str], name: str, arguments: list[str]
) -> None:
    code, said = _said(capsys, *(each.format(name=name) for each in arguments))
    assert code == 0, said
    assert not (here / "mark").exists()


@pytest.mark.parametrize(
    ("arguments", "done"),
    [
        (["policy", "check", "policy.toml", "protocol.toml"], "would be accepted: e, 2 rounds"),
        (["export", "protocol", "a", "--out", "a.codistill"], "after 2 rounds of e"),
        (["export", "learner", "a", "--out", "a.codistill"], "after 2 rounds of alone"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_what_needs_code_lists_it_and_asks(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], done: str
) -> None:
    code, said = _said(capsys, *arguments)
    assert code == 2
    assert "--trust-code" in said
    for name in ("helper.py", "beside.py"):
        digest = hashlib.sha256((here / name).read_bytes()).hexdigest()
        assert f"{here / name} (SHA-256 {digest})" in said
    assert not (here / "mark").exists()
    code, said = _said(capsys, *arguments, "--trust-code")
    assert (code, done in said) == (0, True), said
    assert (here / "mark").exists()


def test_a_learner_in_a_file_is_not_needed_for_a_policy(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = _said(capsys, "policy", "check", "policy.toml", "learner.toml")
    assert (code, "would be accepted: alone" in said) == (0, True), said
    assert not (here / "mark").exists()


def test_data_says_that_the_topology_is_not_known(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, said = _said(capsys, "data", "protocol.toml")
    assert f"topology: as {here / 'helper.py'}:E says, which was not run; --trust-code runs it" in said
    _, said = _said(capsys, "data", "protocol.toml", "--trust-code")
    assert "which was not run" not in said
    assert (here / "mark").exists()


AGENT = """
import numpy as np
from codistill import Agent
from sklearn.linear_model import LogisticRegression
{protocol}
def agent(name):
    return Agent(name, LogisticRegression(), np.arange(8.0).reshape(4, 2), [0, 1, 0, 1])
"""


def test_an_agent_that_has_the_same_file_of_its_own_trusts_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The hub's recipe names its copy of the file; the agent has read, and named, its own."""
    (here / "mine").mkdir()
    recipe = RECIPE.format(learner="", protocol="helper.py:E").partition("[[agents]]")
    held = 'seed = 0\n[data]\nheld_by_agents = true\nclasses = 2\n[[agents]]\nname = "a"\n'
    (here / "theirs.toml").write_text(held + "[protocol]" + recipe[2].partition("[protocol]")[2])
    (here / "mine" / "beside.py").write_text((here / "beside.py").read_text())
    own = here / "mine" / "approved.py"
    own.write_text((here / "helper.py").read_text().replace("mark'", "own'"))
    (here / "mine" / "agent.py").write_text(AGENT.format(protocol="from approved import E as protocol"))
    check = ["policy", "check", "policy.toml", "theirs.toml", "--agent", "mine/agent.py"]
    code, said = _said(capsys, *check)
    assert (code, "--trust-code" in said) == (2, True), said  # another file
    own.write_text((here / "helper.py").read_text())
    import sys

    sys.modules.pop("approved")
    _forget(here)
    (here / "helper.py").chmod(0o400)
    code, said = _said(capsys, *check)
    assert code == 0, said
    assert (here / "mark").read_text() == "helper beside "  # run once: as the agent's own


# --- resume ---------------------------------------------------------------------------------------------------------


def _stopped(folder: Path) -> None:
    """As if the run had been killed after its first round."""
    assert main(["run", f"{folder.name}.toml", "--out", f"{folder}-1", "--quiet", "--set", "protocol.rounds=1"]) == 0
    text = (Path(f"{folder}-1") / "recipe.toml").read_text()
    (Path(f"{folder}-1") / "recipe.toml").write_text(text.replace("rounds = 1", "rounds = 2"))


@pytest.mark.parametrize("name", ["protocol", "learner"])
@pytest.mark.parametrize("changed", ["helper.py", "beside.py"])
def test_resume_runs_the_files_that_the_run_began_with(
    here: Path, capsys: pytest.CaptureFixture[str], name: str, changed: str
) -> None:
    _stopped(here / name)
    _forget(here)
    before = hashlib.sha256((here / changed).read_bytes()).hexdigest()
    (here / changed).write_text((here / changed).read_text() + "# another\n")
    after = hashlib.sha256((here / changed).read_bytes()).hexdigest()
    code, said = _said(capsys, "resume", f"{name}-1", "--quiet")
    assert code == 6
    for word in (str(here / changed), before, after, "--trust-code"):
        assert word in said
    assert not (here / "mark").exists()
    code, said = _said(capsys, "resume", f"{name}-1", "--quiet", "--trust-code")
    assert code == 0, said
    facts = json.loads((here / f"{name}-1" / "run.json").read_text())
    assert facts["user_code"][str(here / changed)] == after
    assert facts["earlier_code"][0]["user_code"][str(here / changed)] == before
    assert main(["resume", f"{name}-1", "--quiet"]) == 0  # bound to what they are now


def test_resume_refuses_another_protocol_and_other_settings(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The recipe in the folder was changed after the run began; what the run was is in run.json."""
    _stopped(here / "learner")
    recipe = here / "learner-1" / "recipe.toml"
    text = recipe.read_text()
    (here / "evil.py").write_text(MARK.format(mark=str(here / "mark"), who="evil") + HELPER)
    _forget(here)
    recipe.write_text(text.replace('name = "alone"', f'name = "{here / "evil.py"}:E"'))
    code, said = _said(capsys, "resume", "learner-1", "--quiet")
    assert (code, "other protocol_code" in said, str(here / "evil.py") in said) == (6, True, True), said
    assert not (here / "mark").exists()
    for change in ('name = "fedmd"', 'name = "alone"\nrefit = true'):
        recipe.write_text(text.replace('name = "alone"', change).replace('name = "wine"', 'name = "wine"\npublic = 0'))
        code, said = _said(capsys, "resume", "learner-1", "--quiet")
        assert code != 0
        assert "fedmd" in said or "other protocol_settings" in said
    recipe.write_text(text)
    assert main(["resume", "learner-1", "--quiet"]) == 0


def test_a_file_is_only_what_is_named_as_one(here: Path) -> None:
    """One rule says what a file is: 'x.py:y:Z' is none, whatever stands in the folder."""
    (here / "odd.py:x").write_text(MARK.format(mark=str(here / "mark"), who="odd") + HELPER)
    (here / "odd.toml").write_text(RECIPE.format(learner="odd.py:x:Model", protocol="alone"))
    assert main(["run", "odd.toml", "--out", "odd", "--quiet"]) == 4
    assert not (here / "mark").exists()
