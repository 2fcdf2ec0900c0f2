"""Validation samples: each agent holds them out of its own, nothing is fitted to them, and they choose a round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import GaussianNB
from sklearn.preprocessing import StandardScaler

import codistill as cd
from codistill.nodes.record import record_of
from codistill.results.records import RoundEnded, RunStarted

RNG = np.random.default_rng(3)
X = RNG.normal(size=(160, 4)).astype(np.float32)
Y = (X[:, 0] + 0.5 * RNG.normal(size=160) > 0).astype(int) + (X[:, 1] > 1)
QUIET: dict[str, Any] = {"progress": False, "workers": 2}
pytestmark = pytest.mark.usefixtures("time_limit")


def agents() -> list[cd.Agent]:
    return [
        cd.Agent("a", GaussianNB(), X[:40], Y[:40], prepare=StandardScaler()),
        cd.Agent("b", LogisticRegression(), X[40:80], Y[40:80]),
    ]


def federation(protocol: cd.Protocol | None = None, test: Any = (X[120:], Y[120:]), **options: Any) -> cd.Federation:
    options = {"validation": 0.25, **options}
    return cd.Federation(agents(), protocol or cd.FedMD(), public=X[80:120], test=test, **options)


def rows_in(x: np.ndarray) -> set[bytes]:
    return {np.ascontiguousarray(row).tobytes() for row in x}


def test_a_share_of_every_class_is_held_out_and_nothing_is_fitted_to_it() -> None:
    a, b = federation().agents
    held = record_of(b).validation
    assert held is not None
    assert len(held[0]) == 10  # a quarter of 40
    assert rows_in(held[0]) | rows_in(b.shard.x) == rows_in(X[40:80])
    assert not rows_in(held[0]) & rows_in(b.shard.x)
    shares = np.bincount(held[1], minlength=3) / np.bincount(Y[40:80], minlength=3)
    assert np.all(np.abs(shares - 0.25) < 0.15)  # rounded to whole samples
    assert record_of(b).class_mix.tolist() == np.bincount(b.shard.labels, minlength=3).tolist()
    assert record_of(b).join_info(cd.FedMD.needs).samples == 30
    kept = X[:40][record_of(a).kept]
    np.testing.assert_allclose(record_of(a).prepared.transformer.mean_, kept.mean(axis=0), rtol=1e-5)


def test_the_score_is_that_of_the_answers_on_these_samples() -> None:
    made = federation()
    result = made.run(2, runtime="simulation", **QUIET)
    for name, agent in zip("ab", made.agents, strict=True):
        whole = {"a": X[:40], "b": X[40:80]}[name]
        places = np.setdiff1d(np.arange(40), record_of(agent).kept)
        y = {"a": Y[:40], "b": Y[40:80]}[name][places]
        last = [row for row in result.rows if row["agent"] == name][-1]
        assert last["validation_accuracy"] == np.mean(result.agents[name].predict(whole[places]) == y)
    # Alone they learn from the same samples, so that the gain is that of the protocol.
    alone = {row["agent"]: row for row in result.alone_rows if "accuracy" in row}
    naive, prepared = GaussianNB(), StandardScaler()
    kept = record_of(made.agents[0]).kept
    naive.fit(prepared.fit_transform(X[:40][kept]), Y[:40][kept])
    assert alone["a"]["accuracy"] == np.mean(naive.predict(prepared.transform(X[120:])) == Y[120:])


@pytest.fixture(scope="module")
def whole() -> cd.Result:
    return federation().run(4, runtime="simulation", **QUIET)


@pytest.mark.parametrize("runtime", ["processes", "network"])
def test_the_same_scores_and_best_round_in_every_runtime(runtime: str, whole: cd.Result) -> None:
    result = federation().run(4, runtime=runtime, **QUIET)
    assert result.rows == whole.rows
    assert result.alone_rows == whole.alone_rows
    assert result.best_round == whole.best_round is not None


def test_the_same_after_a_stop_and_a_resume(tmp_path: Path, whole: cd.Result) -> None:
    class StopAfterOne:
        def round_ended(self, record: RoundEnded) -> bool:
            return record.round == 1

    options: dict[str, Any] = {"runtime": "simulation", "folder": tmp_path, **QUIET}
    assert federation().run(4, observers=[StopAfterOne()], **options).interrupted
    result = federation().run(4, resume=True, **options)
    assert result.rows == whole.rows
    assert result.best_round == whole.best_round


def test_test_labels_change_no_validation_score(whole: cd.Result) -> None:
    other = federation(test=(X[120:], Y[120:][::-1])).run(4, runtime="simulation", **QUIET)
    key = "validation_accuracy"
    assert [row[key] for row in other.rows] == [row[key] for row in whole.rows]
    assert [row["accuracy"] for row in other.rows] != [row["accuracy"] for row in whole.rows]


def test_without_test_samples_the_best_round_is_known_by_validation_alone() -> None:
    result = federation(test=None).run(2, runtime="simulation", **QUIET)
    assert result.best_round is not None
    assert result.best_round.best.test is None
    assert "see the table of validation samples" in result.summary().scope()
    assert "best round by validation: " in repr(result)
    assert federation(validation=0).run(1, runtime="simulation", **QUIET).best_round is None


def test_the_report_has_the_table(tmp_path: Path, whole: cd.Result, no_charts: None) -> None:
    page = whole.report(tmp_path / "report.html").read_text()
    assert "Best round by validation" in page
    assert whole.best_round is not None
    assert whole.best_round.sentence()[1:] in page  # as a sentence, with a capital


def test_a_baseline_that_pools_data_pools_what_agents_learn_from() -> None:
    made = federation(cd.Centralised())
    kept = [X[start : start + 40][record_of(agent).kept] for start, agent in zip((0, 40), made.agents, strict=True)]
    assert rows_in(made.agents[1].shard.x) == rows_in(np.concatenate(kept))
    assert len(made.agents[0].shard) == 60
    # Its scaling is fitted to what was pooled, and its validation samples are scaled by it.
    record = record_of(made.agents[0])
    places = np.setdiff1d(np.arange(40), record.kept)
    assert record.validation is not None
    np.testing.assert_allclose(record.prepared.transformer.mean_, np.concatenate(kept).mean(axis=0), rtol=1e-4)
    np.testing.assert_array_equal(record.validation[0], record.prepared(X[:40][places]))


def test_a_second_federation_holds_out_anew() -> None:
    both = agents()
    for share, kept in ((0.25, 30), (0.5, 20), (0.0, 40)):
        cd.Federation(both, cd.FedMD(), public=X[80:120], validation=share)
        assert [len(agent.shard) for agent in both] == [kept, kept]
    assert record_of(both[0]).validation is None


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (1.5, "validation must be a share"),
        (True, "validation must be a share"),
        ("a fifth", "validation must be a share"),
        (0.01, r"Agent 'a' has too few samples to hold some out for validation.*raise validation"),
    ],
)
def test_what_cannot_be_held_out_is_refused(share: Any, text: str) -> None:
    with pytest.raises(cd.CodistillError, match=f"(?s){text}"):
        federation(validation=share)


# --- Early stopping by them.


def ended(t: int, **scores: float) -> RoundEnded:
    return RoundEnded(t, [{"round": t, "agent": "a", "test_samples": 9, **scores}], [], 0.0)


def stops_after(stopping: cd.EarlyStopping, rounds: list[RoundEnded]) -> int | None:
    stopping.started(RunStarted("fedmd", ("a",), len(rounds), scores=("accuracy",)))
    return next((each.round for each in rounds if stopping.round_ended(each)), None)


def test_early_stopping_watches_validation_samples_where_there_are_any() -> None:
    rounds = [
        ended(1, accuracy=0.1, own_accuracy=0.9, validation_accuracy=0.5),
        ended(2, accuracy=0.2, own_accuracy=0.8, validation_accuracy=0.4),
        ended(3, accuracy=0.1, own_accuracy=0.7, validation_accuracy=0.6),
    ]
    for score, watched, stop in (
        (None, "validation_accuracy", 2),
        ("accuracy", "accuracy", 3),
        ("own_accuracy", "own_accuracy", 2),
    ):
        stopping = cd.EarlyStopping(1, score=score)
        assert (stops_after(stopping, rounds), stopping.watched) == (stop, watched)
    # A round in which the watched score could not be computed does not count: no other takes its place.
    gap = [rounds[0], ended(2, accuracy=0.1), ended(3, validation_accuracy=0.6)]
    assert stops_after(cd.EarlyStopping(1), gap) is None
    only_own = cd.EarlyStopping(1)
    assert stops_after(only_own, [ended(1, own_accuracy=0.9), ended(2, own_accuracy=0.8)]) == 2
    assert only_own.watched == "own_accuracy"


def test_early_stopping_refuses_a_score_that_the_run_does_not_have() -> None:
    with pytest.raises(cd.CodistillError, match=r"(?s)no agent has validation samples.*Federation\(validation=0.2\)"):
        stops_after(cd.EarlyStopping(1, score="validation_accuracy"), [ended(1, accuracy=0.5)])
    with pytest.raises(cd.CodistillError, match=r"(?s)must watch a score of the run.*'log_loss'.*scores="):
        stops_after(cd.EarlyStopping(1, score="log_loss"), [ended(1, accuracy=0.5)])
