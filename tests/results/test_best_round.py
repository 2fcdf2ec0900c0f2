"""The best round by validation, derived from rows by hand."""

from __future__ import annotations

from typing import Any

import pytest

from codistill.results.best_round import best_round_table, find_best_round
from codistill.results.scores import ACCURACY, RMSE


def row(t: int, agent: str, **scores: Any) -> dict[str, Any]:
    return {"round": t, "agent": agent, "test_samples": 40, **scores}


# Means by validation: 0.5, 0.6, 0.6, 0.55. The first of the equal ones is round 2, where test is (0.3 + 0.7) / 2.
ROWS = [
    row(1, "a", accuracy=0.9, validation_accuracy=0.4),
    row(1, "b", accuracy=0.9, validation_accuracy=0.6),
    row(2, "a", accuracy=0.3, own_accuracy=0.8, validation_accuracy=0.7, test_samples=20),
    row(2, "b", accuracy=0.7, own_accuracy=0.9, validation_accuracy=0.5, test_samples=20),
    row(3, "a", accuracy=0.8, validation_accuracy=0.3),
    row(3, "b", accuracy=0.8, validation_accuracy=0.9),
    {"round": 4, "agent": "a"},
    row(5, "a", accuracy=0.6, validation_accuracy=0.7),
    row(5, "b", accuracy=0.4, validation_accuracy=0.4),
]


def test_it_is_the_first_round_with_the_best_mean_and_says_the_test_score_there() -> None:
    found = find_best_round(ROWS, ACCURACY)
    assert found is not None
    assert (found.best.round, found.last.round) == (2, 5)
    assert (found.best.validation, found.best.test) == (pytest.approx(0.6), pytest.approx(0.5))
    assert (found.last.validation, found.last.test) == (pytest.approx(0.55), pytest.approx(0.5))
    assert found.sentence() == (
        "best round by validation: 2 (validation 60.0 %, test 50.0 %, own data 85.0 %); "
        "the last one: 5 (validation 55.0 %, test 50.0 %)"
    )
    # Of each agent its own best round: the first of a's two with 0.7, and b's third.
    assert {name: (best.round, best.test) for name, (best, _) in found.agents.items()} == {"a": (2, 0.3), "b": (3, 0.8)}


def test_the_table_has_both_rounds_of_every_agent() -> None:
    table = best_round_table(ROWS, ACCURACY)
    assert table is not None
    cells = [[cell if isinstance(cell, str) else cell.text for cell in line] for line in (*table.rows, *table.footer)]
    assert cells == [
        ["a", "70.0 %", "60.0 %", "70.0 %", "30.0 %", "2", "70.0 %", "30.0 %"],
        ["b", "40.0 %", "40.0 %", "50.0 %", "70.0 %", "3", "90.0 %", "80.0 %"],
        ["mean", "55.0 %", "50.0 %", "60.0 %", "50.0 %", "", "80.0 %", "55.0 %"],
    ]
    assert "round 2 was measured on 20 random test samples, the last one on 40" in table.notes


def test_a_lower_error_is_better_and_byzantine_agents_do_not_count() -> None:
    rows = [
        row(1, "a", rmse=3.0, validation_rmse=1.0),
        row(1, "liar", rmse=9.0, validation_rmse=9.0, lies=True),
        row(2, "a", rmse=2.0, validation_rmse=2.0),
        row(2, "liar", rmse=0.0, validation_rmse=0.0, lies=True),
    ]
    found = find_best_round(rows, RMSE)
    assert found is not None
    assert (found.best.round, found.best.test, list(found.agents)) == (1, 3.0, ["a"])


def test_without_a_common_test_set_own_test_data_count_and_without_validation_there_is_none() -> None:
    found = find_best_round([row(1, "a", own_accuracy=0.7, validation_accuracy=0.6)], ACCURACY)
    assert found is not None
    assert (found.best.test, found.own_test) == (0.7, True)
    said = found.sentence()
    assert said == "best round by validation: 1 (validation 60.0 %, own test 70.0 %), the last one that was evaluated"
    assert find_best_round([row(1, "a", accuracy=0.7)], ACCURACY) is None
    assert best_round_table([row(1, "a", accuracy=0.7)], ACCURACY) is None
