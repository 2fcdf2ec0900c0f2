import io
import itertools
import sys

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from codistill.core.errors import DataError
from codistill.report.graphs import draw_partition
from codistill.report.style import BLUE


def draw(agents, classes, counts=None):
    counts = 1 + np.arange(agents * classes).reshape(agents, classes) if counts is None else counts
    names = [f"agent {index}" for index in range(agents)]
    return draw_partition(counts, names, [str(index) for index in range(classes)])


def extent(figure, artist):
    return artist.get_window_extent(figure.canvas.get_renderer())


def test_the_area_of_a_circle_is_its_count():
    figure = draw(2, 2, np.array([[100, 25], [0, 1]]))
    circles = figure.axes[0].collections[0]
    positions = [tuple(map(int, place)) for place in circles.get_offsets()]
    areas = dict(zip(positions, circles.get_sizes(), strict=True))
    assert set(areas) == {(0, 0), (0, 1), (1, 1)}
    assert areas[0, 0] / areas[0, 1] == pytest.approx(4)
    assert areas[0, 0] / areas[1, 1] == pytest.approx(100)


def test_the_legend_uses_the_same_scale():
    figure = draw(2, 2, np.array([[160, 25], [0, 1]]))
    per_sample = figure.axes[0].collections[0].get_sizes()[0] / 160
    legend = figure.axes[0].get_legend()
    texts = [int(text.get_text()) for text in legend.get_texts()]
    assert texts == [10, 40, 100]
    sizes = [handle.get_sizes()[0] for handle in legend.legend_handles]
    np.testing.assert_allclose(sizes, np.array(texts) * per_sample)


@pytest.mark.parametrize(("agents", "classes"), [(1, 1), (2, 2), (5, 10), (50, 10), (3, 60), (300, 10)])
def test_it_stays_readable_with_few_and_with_many_agents(agents, classes):
    figure = draw(agents, classes)
    FigureCanvasAgg(figure).draw()
    axes = figure.axes[0]
    page = figure.bbox
    assert max(figure.get_size_inches()) <= 16
    # No two labels overlap, and labels and legend are on the page.
    for axis, low, high in ((axes.xaxis, "x0", "x1"), (axes.yaxis, "y0", "y1")):
        boxes = sorted((extent(figure, label) for label in axis.get_ticklabels()), key=lambda box: getattr(box, low))
        for before, after in itertools.pairwise(boxes):
            assert getattr(before, high) <= getattr(after, low) + 1
    for artist in (axes.get_legend(), axes.xaxis.label, axes.yaxis.label):
        box = extent(figure, artist)
        assert page.x0 <= box.x0 <= box.x1 <= page.x1
        assert page.y0 <= box.y0 <= box.y1 <= page.y1
    # The largest circle fits into its cell.
    cell = axes.bbox.width / agents / figure.dpi * 72
    assert np.sqrt(axes.collections[0].get_sizes().max()) <= cell


def test_every_agent_is_named_with_fifty_agents():
    labels = [label.get_text() for label in draw(50, 10).axes[0].get_xticklabels()]
    assert labels == [f"agent {index}" for index in range(50)]


def test_all_circles_have_one_colour_and_empty_partitions_are_drawn():
    from matplotlib.colors import to_rgba

    figure = draw(3, 4)
    np.testing.assert_allclose(figure.axes[0].collections[0].get_facecolor(), [to_rgba(BLUE)])
    draw(2, 2, np.zeros((2, 2), int)).savefig(io.BytesIO())


def test_the_picture_needs_no_window():
    before = "matplotlib.pyplot" in sys.modules
    assert isinstance(draw(2, 2), Figure)
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_names_must_fit_the_counts():
    with pytest.raises(DataError, match=r"shape \(2, 2\) for 1 agents and 2 classes"):
        draw_partition(np.ones((2, 2)), ["a"], ["x", "y"])
