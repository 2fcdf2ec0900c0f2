"""The maps of the feature space show every agent and every class, whatever the features are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import PathCollection
from matplotlib.image import imread

from codistill.cli import main
from codistill.experiments.saved_run import read_summary
from codistill.experiments.sweep import read_sweep
from codistill.experiments.sweep_results import features_grid
from codistill.report import maps
from codistill.report.maps import draw_features, embed, shown_agents
from codistill.results.outputs import FeatureSpace

RNG = np.random.default_rng(0)


def space(agents: int = 2, samples: int = 30, width: int = 5, done: int = 1, classes: int = 3) -> FeatureSpace:
    labels = np.arange(samples) % classes
    by_agent = {f"agent {i}": RNG.normal(size=(samples, width)) + 9 * labels[:, None] for i in range(agents)}
    return FeatureSpace(done, np.arange(samples), labels, by_agent)


def points(axes) -> np.ndarray:
    return np.concatenate([part.get_offsets() for part in axes.collections if isinstance(part, PathCollection)])


def test_each_round_has_a_panel_with_all_points() -> None:
    figure = draw_features([space(done=1), space(done=20), space(done=30)], ("cat", "dog", "cow"))
    drawn = [axes for axes in figure.axes if axes.axison]
    assert [axes.get_title("left") for axes in drawn] == ["after round 1", "after round 20", "after round 30"]
    for axes in drawn:
        found = points(axes)
        assert found.shape == (60, 2)
        assert len(np.unique(found.round(3), axis=0)) == 60
        assert {text.get_text() for text in axes.texts} == {"cat", "dog", "cow"}
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["agent 0", "agent 1"]


def test_agents_differ_by_colour_and_classes_by_opacity() -> None:
    axes = draw_features([space()], ()).axes[0]
    colours = np.concatenate([part.get_facecolors() for part in axes.collections])
    assert len(np.unique(colours[:, :3], axis=0)) == 2
    assert np.unique(colours[:, 3].round(3)).tolist() == [0.3, 0.65, 1.0]


def test_each_of_twenty_agents_has_a_colour_or_marker_of_its_own() -> None:
    figure = draw_features([space(agents=25, samples=4)], ())
    handles = figure.legends[0].legend_handles
    assert len({(handle.get_color(), handle.get_marker()) for handle in handles}) == len(handles) == 20


def test_real_values_are_drawn_alike() -> None:
    alike = space()
    figure = draw_features([FeatureSpace(1, alike.samples, None, alike.by_agent)], ())
    assert {colour[3] for part in figure.axes[0].collections for colour in part.get_facecolors()} == {1.0}
    assert not figure.axes[0].texts


def test_agents_without_finite_features_or_of_another_width_are_left_out() -> None:
    mixed = space(agents=3)
    mixed.by_agent["diverged"] = np.full((30, 5), np.nan)
    mixed.by_agent["wide"] = np.ones((30, 7))
    assert shown_agents(mixed) == ["agent 0", "agent 1", "agent 2"]
    only = FeatureSpace(1, mixed.samples, mixed.labels, {"diverged": mixed.by_agent["diverged"]})
    assert shown_agents(only) == []
    assert not draw_features([only], ()).axes[0].collections


def test_a_panel_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps, "MOST_POINTS", 20)
    assert len(points(draw_features([space(agents=3)], ()).axes[0])) == 18


@pytest.mark.parametrize(
    "features",
    [np.zeros((3, 2)), np.ones((30, 4)), RNG.normal(size=(30, 1)), np.repeat(RNG.normal(size=(10, 3)), 2, axis=0)],
    ids=["too few", "all alike", "one feature", "twice each"],
)
def test_any_features_have_finite_places(features: np.ndarray) -> None:
    places = embed(features)
    assert places.shape == (len(features), 2)
    assert np.isfinite(places).all()


def test_a_map_is_the_same_again() -> None:
    features = RNG.normal(size=(40, 4))
    assert np.array_equal(embed(features), embed(features))


def test_of_coinciding_agents_both_are_seen() -> None:
    """Where all points coincide, what is drawn last at a place is now one agent, now the other."""
    one = space(agents=1)
    twice = FeatureSpace(1, one.samples, one.labels, {"a": one.by_agent["agent 0"], "b": one.by_agent["agent 0"]})
    axes = draw_features([twice], ()).axes[0]
    parts = [part for part in axes.collections if len(part.get_offsets())]
    on_top = [tuple(part.get_facecolors()[0][:3]) for part in parts[1::2]]
    assert len(set(on_top)) == 2


SWEEP = """
[data]
name = "wine"
[[agents]]
learner = "mlp"
count = 2
[protocol]
name = "alone"
rounds = 2
[evaluation]
alone = false
features_at = [1, 2]
[runtime]
kind = "simulation"
[sweep]
protocol = [{ name = "alone", label = "IL" }, { name = "fedavg", label = "FL" }]
"""


@pytest.mark.long
@pytest.mark.usefixtures("no_report")
def test_a_sweep_is_drawn_with_a_row_per_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, out = tmp_path / "sweep.toml", tmp_path / "out"
    recipe.write_text(SWEEP)
    assert main(["sweep", str(recipe), "--out", str(out)]) == 0
    assert capsys.readouterr().out.endswith(f"feature space: {out / 'features.png'}\n")
    height, width = imread(out / "features.png").shape[:2]
    assert (height, width) == (671, 660)
    grid = features_grid(read_sweep(recipe), out)
    assert [[panel and panel[0] for panel in row] for row in grid] == [
        ["protocol=IL, round 1", "protocol=IL, round 2"],
        ["protocol=FL, round 1", "protocol=FL, round 2"],
    ]
    shown, kept = grid[1][1], read_summary(out / "FL").features[1]
    assert shown is not None
    assert shown[1].encode() == kept.encode()
    first, second = kept.by_agent.values()
    assert np.array_equal(first, second)  # after a round of fedavg all have the same weights
