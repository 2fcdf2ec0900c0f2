"""audit and policy from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codistill.cli import main
from codistill.network.frames import FrameKind, Turn
from codistill.network.policy import ANYTHING, AUDIT, AuditedTransport, AuditLog
from codistill.wire.message import Message

RECIPE = """
[data]
held_by_agents = true
classes = 3
[[agents]]
name = "north"
[[agents]]
name = "south"
[protocol]
name = "fd"
rounds = 5
"""
AGENT_FILE = """
import numpy as np
import torch
import codistill as cd

policy = "policy.toml"

def agent(name):
    x = np.zeros((6, 2), dtype="float32")
    return cd.Agent(name, torch.nn.Linear(2, 3), x, np.arange(6) % 3)
"""


class Nowhere:
    def send(self, *given: Any) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An agent's folder after three rounds."""
    log = AuditLog(tmp_path)
    log.append("started", policy_digest="abc")
    log.append("joined", run="a1b2c3d4e5", terms={"protocol": {"name": "fedmd"}})
    message = Message.of(z=np.zeros((4, 2), np.float32)).encoded
    for number in range(3):
        AuditedTransport(Nowhere(), log, ANYTHING).send(  # type: ignore[arg-type]
            ["hub"], FrameKind.MESSAGE, Turn(number), message
        )
    log.append("stopped", rule="rounds_per_day", limit=3)
    log.close()
    return tmp_path


def test_verify_counts_what_was_released_and_tells_the_head(folder: Path, capsys: Any) -> None:
    assert main(["audit", "verify", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "as it was written, 6 lines (" in told
    assert "runs: 1; starts: 1; joins: 1; rounds: 3" in told
    assert "releases stopped by the policy: 1" in told
    row = next(line for line in told.splitlines() if "protocol message" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["hub", "protocol message", "3", "312 B"]
    head = told.splitlines()[-1].split()[1]
    assert told.splitlines()[-1] == f"head {head} after 6 lines"
    assert main(["audit", "verify", str(folder / AUDIT), "--head", head[:16].upper()]) == 0
    assert "The noted digest is that of line 6: 0 lines came after it." in capsys.readouterr().out


def test_verify_finds_a_forged_line_and_lines_cut_off_at_the_end(folder: Path, capsys: Any) -> None:
    main(["audit", "verify", str(folder)])
    head = capsys.readouterr().out.splitlines()[-1].split()[1]
    whole = (folder / AUDIT).read_bytes()
    (folder / AUDIT).write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    assert main(["audit", "verify", str(folder)]) == 0  # the chain alone cannot tell
    assert main(["audit", "verify", str(folder), "--head", head]) == 6
    assert "Lines were cut off at the end" in capsys.readouterr().err
    (folder / AUDIT).write_bytes(whole.replace(b'"to":["hub"]', b'"to":["hug"]', 1))
    assert main(["audit", "verify", str(folder)]) == 6
    assert "line 4 does not continue line 3" in capsys.readouterr().err
    assert main(["audit", "show", str(folder)]) == 6


def test_verify_says_that_a_last_line_was_cut_by_a_kill(folder: Path, capsys: Any) -> None:
    with (folder / AUDIT).open("ab") as file:
        file.write(b'{"number":7')
    assert main(["audit", "verify", str(folder)]) == 0
    assert "The last line was cut off after 11 bytes" in capsys.readouterr().out


def test_show_lists_the_last_lines(folder: Path, capsys: Any) -> None:
    assert main(["audit", "show", str(folder), "--last", "2"]) == 0
    told = capsys.readouterr().out
    assert "z (float32 4x2)" in told
    assert "rounds_per_day = 3" in told
    assert "joined" not in told
    assert main(["audit", "show", str(folder)]) == 0
    assert "run a1b2c3d4: fedmd" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["audit", "verify", "nowhere"], 6, "No such file or directory"),
        (["audit", "verify", ".", "--head", "xyz"], 2, "--head must be a digest."),
        (["policy", "check", "nowhere.toml"], 2, "must be readable"),
    ],
)
def test_mistakes(arguments: list[str], code: int, told: str, folder: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(folder)
    assert main(arguments) == code
    assert told in capsys.readouterr().err


def test_a_policy_is_checked_before_anything_is_sent(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "my_agent.py").write_text(AGENT_FILE)
    (tmp_path / "policy.toml").write_text('protocols = ["fd"]\nclasses = [0, 1]\n')
    assert main(["policy", "check", "policy.toml"]) == 0
    assert 'policy: protocols = ["fd"]; classes = [0, 1]' in capsys.readouterr().out
    assert main(["policy", "check", "policy.toml", "recipe.toml"]) == 0
    told = capsys.readouterr().out
    assert "recipe.toml would be accepted: fd, 5 rounds" in told
    assert "--agent my_agent.py" in told
    assert main(["policy", "check", "policy.toml", "recipe.toml", "--agent", "my_agent.py"]) == 9
    assert "classes = [0, 1]: fd releases statistics of 2" in capsys.readouterr().err
    (tmp_path / "policy.toml").write_text("rounds = 4\n[settings.fd]\nweight = { at_most = 0.5 }\n")
    assert main(["policy", "check", "policy.toml", "recipe.toml"]) == 9
    assert "settings.fd.weight must be at most 0.5: 1.0; rounds = 4: the run has 5" in capsys.readouterr().err


def test_a_policy_beside_the_agents_file_is_read_or_replaced(tmp_path: Path) -> None:
    from codistill.experiments.networked import read_agent_file

    (tmp_path / "my_agent.py").write_text(AGENT_FILE + '\naccepts = ("fd", "fedmd")\n')
    (tmp_path / "policy.toml").write_text('protocols = ["fd", "fedavg"]\nrounds = 4\n')
    (tmp_path / "other.toml").write_text("rounds = 7\n")
    assert read_agent_file(tmp_path / "my_agent.py", "north").policy.plain() == {"protocols": ["fd"], "rounds": 4}
    other = read_agent_file(tmp_path / "my_agent.py", "north", policy=tmp_path / "other.toml").policy
    assert other.plain() == {"protocols": ["fd", "fedmd"], "rounds": 7}
