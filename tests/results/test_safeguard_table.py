"""The table of what the safeguard did."""

from __future__ import annotations

from codistill.report.pages import safeguard_section
from codistill.results.summary import Summary, guarded_lines, safeguard_table


def row(agent: str, **scores: float) -> dict[str, object]:
    return {"round": 1, "agent": agent, "present": True, "sent": 0, "received": 0, "test_samples": 10, **scores}


def summary(*, guarded: bool = True) -> Summary:
    """Alone 70 and 90 %; taught 80 and 60 %; safeguarded 78 and 89 %, on their own data."""
    scores = [
        {"own_accuracy": 0.78, "taught_own_accuracy": 0.8, "safeguard_weight": 0.9},
        {"own_accuracy": 0.89, "taught_own_accuracy": 0.6, "safeguard_weight": 0.1},
    ]
    rows = [row(name, **(each if guarded else {"own_accuracy": 0.5})) for name, each in zip("ab", scores, strict=True)]
    alone = [row("a", own_accuracy=0.7), row("b", own_accuracy=0.9)]
    return Summary("t", "fedmd", {"a": "m", "b": "m"}, rows, alone, None, ("0", "1"), 1.0, 0)


def test_alone_taught_and_safeguarded_with_the_weight() -> None:
    table = safeguard_table(summary())
    assert [[str(getattr(cell, "text", cell)) for cell in row] for row in (*table.rows, *table.footer)] == [
        ["a", "70.0 %", "80.0 %", "+10.0", "78.0 %", "+8.0", "0.90"],
        ["b", "90.0 %", "60.0 %", "-30.0", "89.0 %", "-1.0", "0.10"],
        ["mean", "80.0 %", "70.0 %", "-10.0", "83.5 %", "+3.5", "0.50"],
        ["worst gain", "", "", "-30.0", "", "-1.0", ""],
    ]
    assert "the safeguard, on each agent's own data" in summary().table_text()
    assert "-30.0" in safeguard_section(summary()).table.html(page=True)


def test_without_a_safeguard_there_is_no_table() -> None:
    assert guarded_lines(summary(guarded=False)) == {}
    assert "safeguard" not in summary(guarded=False).table_text()
    assert safeguard_section(summary(guarded=False)) is None
