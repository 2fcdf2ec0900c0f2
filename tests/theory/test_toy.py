"""The toy of figure 3 has the shape of the paper's pictures; the command prints and draws it."""

from __future__ import annotations

import numpy as np
import pytest

from codistill.cli import main
from codistill.report.theory_plots import DIMENSION, SAMPLES, SETTINGS, run_toy, toy_problem
from codistill.theory import forecast_of


@pytest.fixture(scope="module")
def toys():
    return [run_toy(setting, 600, seed=0) for setting in SETTINGS]


@pytest.fixture(scope="module")
def outlooks(toys):
    return [forecast_of(toy.problem) for toy in toys]


def test_the_data_are_those_of_appendix_a() -> None:
    for setting in SETTINGS:
        problem = toy_problem(setting, 3)
        assert [x.shape for x in problem.inputs] == [(90, DIMENSION), (60, DIMENSION)]
        assert problem.samples == SAMPLES == 1.5 * DIMENSION
        assert (problem.targets[0].max() <= problem.targets[1].min()) == setting.sort


def test_the_shape_of_figure_3(toys) -> None:
    """EKD reaches the centralised error, AvgKD is worse than agent 1 alone, AKD is worst and degrades to 1."""
    for toy in toys:
        e = toy.errors
        central = e["centralised"][0]
        assert central < e["agent 1 alone"][0] < e["agent 2 alone"][0]
        assert e["AKD"][600] == pytest.approx(1, abs=1e-3)
        assert (np.diff(e["AKD"][::2]) > -1e-12).all()
        assert e["AKD"][250] >= e["PKD"][250] > e["AvgKD"][250] > e["agent 1 alone"][0]
        assert e["AvgKD"][600] == pytest.approx(e["AvgKD"][250], rel=1e-9)
        for method in ("EKD", "EKD half-term"):
            assert e[method][600] == pytest.approx(central, rel=0.01)
        assert e["EKD"][250] < e["agent 1 alone"][0]


def test_the_half_term_is_sooner_there(toys) -> None:
    for toy in toys[:2]:
        plain, half = toy.first_within("EKD"), toy.first_within("EKD half-term")
        assert plain is not None
        assert half is not None
        assert half * 2 < plain
        assert toy.first_within("AKD") is None


def test_sorting_hardly_changes_the_degradation_and_regularisation_does(outlooks) -> None:
    same, sort, strong = outlooks
    assert abs(same.rho - sort.rho) < 0.01
    assert strong.rho < 0.5 < 0.95 < same.rho


def test_the_forecast_is_what_happens(toys, outlooks) -> None:
    for toy, outlook in zip(toys, outlooks, strict=True):
        for method, line in {line.method: line for line in outlook.outlooks}.items():
            if line.rate ** len(toy.errors[method]) < 1e-2:
                assert toy.errors[method][-1] == pytest.approx(line.error, rel=0.03)
        assert outlook.errors == pytest.approx(
            {name: toy.errors[name][0] for name in ("agent 1 alone", "agent 2 alone", "centralised")}
        )


def test_the_command_prints_tables_and_draws(tmp_path, capsys) -> None:
    assert main(["theory", "--rounds", "12", "--out", str(tmp_path / "a" / "b")]) == 0
    out = capsys.readouterr().out
    for word in ("same data", "different data", "strong regularisation", "round 10", "round 12", "rho(B) = 0.9795",
                 "EKD half-term", "the centralised model", "minimal angle"):  # fmt: skip
        assert word in out
    assert "round 50" not in out
    pictures = sorted((tmp_path / "a" / "b").iterdir())
    assert [path.name for path in pictures] == ["ensemble.png", "projections.png", "toy.png"]
    for path in pictures:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert 10_000 < path.stat().st_size < 300_000


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--rounds", "0"], 2, "at least 1"),
        (["--rounds", "1000000000"], 2, "at most 100,000"),
        (["--seed", "-1"], 2, "seed must be at least 0"),
        (["--out", "taken/theory"], 7, "must be writable"),
    ],
)
def test_mistakes_are_sentences(arguments, code, said, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("a file")
    assert main(["theory", *arguments]) == code
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err
