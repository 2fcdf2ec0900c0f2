"""Graphs of agents: kept in a run's folder, drawn in its report, told on the command line."""

import json
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from matplotlib.patches import Circle
from tests.report.test_pages import Page, make

from codistill.cli import main
from codistill.core.errors import CheckpointError
from codistill.experiments.building import build
from codistill.experiments.recipe import make_recipe
from codistill.experiments.run import execute
from codistill.experiments.saved_run import read_summary
from codistill.experiments.sweep import read_sweep
from codistill.report import graphs as topology_plot
from codistill.report.graphs import draw_graph
from codistill.report.pages import graph_section, write_report
from codistill.results.rounds import scores_of
from codistill.topology import Topology, graphs
from codistill.topology.graphs import as_plain, figures, from_plain

NAMES = [f"agent {index}" for index in range(6)]
TURNING = (np.eye(6) + np.roll(np.eye(6), 1, axis=1)) / 2
TABLES = {
    "seed": 5,
    "data": {"name": "wine"},
    "agents": [{"name": "a", "learner": {"kind": "decision_tree", "max_depth": 2}, "count": 6}],
    "topology": {"kind": "random", "degree": 3},
    "protocol": {"name": "avgkd", "rounds": 1},
    "runtime": {"kind": "simulation"},
    "evaluation": {"alone": False},
}


def links(topology):
    return {(a, b) for a in topology.names for b in topology.neighbours(a)}


# --- as plain values --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "topology",
    [
        Topology.ring(NAMES),
        Topology.complete(NAMES),
        Topology.silent(NAMES),
        graphs.Random().over(NAMES),
        Topology.from_matrix(NAMES, TURNING),
        Topology.from_matrix(NAMES, Topology.ring(NAMES).matrix() / 2 + np.eye(6) / 2),
    ],
    ids=lambda topology: topology.kind,
)
def test_plain_values_and_back(topology):
    again = from_plain(NAMES, json.loads(json.dumps(as_plain(topology))))
    assert links(again) == links(topology)
    assert (again.kind, again.directed, again.has_matrix) == (topology.kind, topology.directed, topology.has_matrix)
    assert np.array_equal(again.matrix(), topology.matrix())


def test_a_graph_in_figures():
    """A ring of six: eigenvalues (1 + 2 cos(2 pi k / 6)) / 3, the second is (1 + 1) / 3."""
    assert figures(Topology.ring(NAMES)) == {
        "kind": "ring", "agents": "6", "links": "6", "links of an agent": "2", "diameter": "3", "spectral gap": "0.333",
    }  # fmt: skip
    path = figures(Topology(NAMES, [("agent 0", "agent 1"), ("agent 1", "agent 2")]))
    assert (path["links of an agent"], path["diameter"], path["spectral gap"]) == ("0 to 2", "infinite", "0")
    assert figures(Topology.from_matrix(NAMES, TURNING))["kind"] == "matrix, directed"


# --- in a run ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graph") / "run"
    execute(make_recipe(TABLES, Path()), folder, progress=False)
    return folder


def test_a_run_goes_along_the_links_of_its_recipe_and_keeps_them(run):
    topology = read_summary(run).topology
    assert links(topology) == links(graphs.Random(degree=3).over([f"a-{i + 1}" for i in range(6)], seed=5))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    sent = {row["agent"]: row["sent"] for row in rows}
    by_degree = sorted((len(topology.neighbours(name)), count) for name, count in sent.items())
    assert by_degree[0][1] < by_degree[-1][1], "who has more neighbours sends more"
    assert "Graph of agents" in (run / "report.html").read_text()


def copied(run, tmp_path, change):
    for name in ("recipe.toml", "metrics.jsonl", "times.jsonl"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    facts = json.loads((run / "run.json").read_text())
    change(facts)
    (tmp_path / "run.json").write_text(json.dumps(facts))
    return tmp_path


def test_a_folder_from_before_graphs_were_kept_still_opens(run, tmp_path):
    summary = read_summary(copied(run, tmp_path, lambda facts: facts.pop("topology")))
    assert summary.topology is None
    assert "Graph of agents" not in write_report(summary, tmp_path / "r.html").read_text()


@pytest.mark.parametrize(
    "links", ["none", ["1", "0"], ["9"] * 6, ["x"] * 6, [1] * 6, None], ids=["word", "few", "far", "text", "kind", "no"]
)
def test_a_damaged_graph_is_named(run, tmp_path, links):
    with pytest.raises(CheckpointError, match="The topology in .* is corrupted"):
        read_summary(copied(run, tmp_path, lambda facts: facts["topology"].update(links=links)))


def test_a_star_keeps_no_graph(tmp_path, no_report):
    tables = {**TABLES, "data": {"name": "wine", "public": 10}, "protocol": {"name": "fedmd", "rounds": 1}}
    del tables["topology"]
    execute(make_recipe(tables, Path()), tmp_path / "run", progress=False)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["topology"] is None


def test_a_matrix_and_edges_in_a_recipe():
    turning = {"kind": "matrix", "matrix": TURNING.tolist()}
    assert build(make_recipe({**TABLES, "topology": turning}, Path()))[0].topology.sources("a-1") == ("a-2",)
    path = {"kind": "edges", "edges": [["a-1", "a-2"], ["a-2", "a-3"]]}
    assert build(make_recipe({**TABLES, "topology": path}, Path()))[0].topology.neighbours("a-2") == ("a-1", "a-3")


def test_a_sweep_over_the_degree(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text(tomli_w.dumps({**TABLES, "sweep": {"topology.degree": [2, 4]}}))
    assert [recipe.topology.degree for _, recipe in read_sweep(path).runs] == [2, 4]


# --- on the command line ----------------------------------------------------------------------------


def test_the_command_line_tells_of_the_graph(tmp_path, capsys):
    path = tmp_path / "r.toml"
    path.write_text(tomli_w.dumps({**TABLES, "topology": "ring"}))
    assert main(["data", str(path)]) == 0
    told = "topology: kind ring; agents 6; links 6; links of an agent 2; diameter 3; spectral gap 0.333\n"
    assert capsys.readouterr().out.endswith(f"\n{told}")
    assert main(["data", str(path), "--set", "protocol.name=alone", "--set", "topology=silent"]) == 0
    assert "topology:" not in capsys.readouterr().out


# --- in the report ----------------------------------------------------------------------------------


def section(topology, names=NAMES):
    names = names if topology is None else list(topology.names)
    summary = make(names=names, rounds=1, topology=topology)
    return graph_section(summary, scores_of(summary))


def test_the_report_draws_the_graph(tmp_path):
    page = Page(write_report(make(names=NAMES, topology=Topology.ring(NAMES)), tmp_path / "report.html"))
    assert "Graph of agents" in page.texts["h2"]
    titles = page.texts["title"]
    assert "agent 0: 90.0 %" in titles, "the last score, at the agent's disc"
    assert "agent 5: 65.0 %" in titles
    assert [page.texts["dd"][-6 + i] for i in (2, 4, 5)] == ["6", "3", "0.333"]
    assert "fill: var(--heat)" in page.source
    assert "fill: var(--paper)" in page.source, "no link shines through a disc, be the page light or dark"
    assert "#ffffff" not in page.source.partition("</style>")[2]


@pytest.mark.parametrize(
    "topology",
    [
        None,
        Topology.star(NAMES),
        Topology.silent(NAMES),
        Topology.ring(NAMES[:2]),
        Topology.ring([str(index) for index in range(301)]),
    ],
    ids=["unknown", "star", "silent", "two", "many"],
)
def test_the_report_draws_no_graph_that_shows_nothing(topology):
    assert section(topology) is None


@pytest.mark.usefixtures("no_charts")
def test_links_of_a_directed_graph_and_of_a_torus_are_explained():
    assert "Arrows point to the receivers" in " ".join(section(Topology.from_matrix(NAMES, TURNING)).notes)
    assert "Links that leave at one side" in " ".join(section(graphs.Torus().over(NAMES)).notes)


def discs(figure):
    return {each.get_gid(): each for each in figure.axes[0].patches if isinstance(each, Circle) and each.get_gid()}


def drawn(topology, **options):
    return draw_graph(topology, scores_of(make(names=list(topology.names), topology=topology, **options)))


@pytest.mark.parametrize("metric", ["accuracy", "rmse"])
def test_the_better_an_agent_the_deeper_its_colour(metric):
    """Scores fall from agent 0 to agent 5; of errors the smallest is the best."""
    figure, _ = drawn(Topology.ring(NAMES), metric=metric)
    alphas = [discs(figure)[f"node-{index}"].get_facecolor()[3] for index in range(6)]
    assert alphas == sorted(alphas, reverse=metric == "accuracy")
    assert max(alphas) == 1


def test_agents_without_a_score_are_empty():
    figure, _ = draw_graph(Topology.ring(NAMES), scores_of(make(names=NAMES, rows=[])))
    assert all(disc.get_facecolor()[3] == 0 for disc in discs(figure).values())


def test_every_agent_is_good_alike():
    row = {"round": 1, "present": True, "sent": 0, "received": 0, "accuracy": 0.5, "test_samples": 9}
    rows = [{**row, "agent": name} for name in NAMES]
    figure, _ = draw_graph(Topology.ring(NAMES), scores_of(make(names=NAMES, rows=rows)))
    assert {disc.get_facecolor()[3] for disc in discs(figure).values()} == {1.0}


def test_names_while_there_is_room_then_numbers_then_none():
    def texts(count, form, graph=Topology.ring):
        figure, numbered = drawn(graph([form.format(index) for index in range(count)]))
        return {text.get_text() for text in figure.axes[0].texts}, numbered

    few, numbered = texts(6, "hospital {}", graphs.Random().over)
    assert "hospital 3" in few
    assert not numbered
    more, numbered = texts(30, "hospital {}")
    assert "30" in more
    assert numbered
    many, numbered = texts(60, "{}")
    assert not {"30", "60"} & many
    assert not numbered


@pytest.mark.parametrize("graph", [graphs.Random(), graphs.Geometric(radius=0.3), graphs.Ring()])
def test_no_disc_hides_another_and_all_are_on_the_page(graph):
    figure, _ = drawn(graph.over([str(index) for index in range(40)]))
    nodes = [disc for gid, disc in discs(figure).items() if gid.startswith("node-")]
    centres, radius = np.array([disc.center for disc in nodes]), nodes[0].radius
    apart = np.hypot(*(centres[:, None] - centres[None]).transpose(2, 0, 1)) + 9 * np.eye(40)
    assert apart.min() >= 2 * radius
    assert radius > 0.14, "and all have room for a number"
    assert (centres - radius > 0).all()
    assert (centres + radius < figure.get_size_inches()).all()


def test_a_drawing_is_the_same_whenever_it_is_made(monkeypatch):
    monkeypatch.setattr(topology_plot, "MOST_STRESS", 10)  # beyond, places are drawn at random
    graph = graphs.Random().over([str(i) for i in range(12)])
    places = [[disc.center for disc in discs(drawn(graph)[0]).values()] for _ in range(2)]
    assert places[0] == places[1]
