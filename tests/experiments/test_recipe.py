"""Recipes: all of a run in one file, checked before anything runs."""

from contextlib import suppress
from importlib import resources
from pathlib import Path

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from codistill.core.errors import RecipeError
from codistill.data.partition import Dirichlet, Iid, LabelSplit
from codistill.engine.safeguard import Safeguard
from codistill.experiments.recipe import make_recipe, read_recipe
from codistill.protocols import AvgKD, FedMD
from codistill.topology import graphs

TABLES = {
    "seed": 3,
    "data": {"name": "wine", "public": 20},
    "partition": {"kind": "dirichlet", "alpha": 1},
    "agents": [{"name": "a", "learner": "mlp"}, {"learner": {"kind": "random_forest", "n_estimators": 5}, "count": 2}],
    "protocol": {"name": "fedmd", "rounds": 4, "temperature": 2},
    "runtime": {"kind": "simulation", "participation": 0.5},
    "evaluation": {"every": 2, "samples": 0, "alone": False},
    "faults": [{"kind": "drop", "agent": "a", "rate": 0.5}],
}


def written(folder, tables=TABLES, name="recipe.toml"):
    path = folder / name
    path.write_text(tomli_w.dumps(tables))
    return path


def changed(**tables):
    return {key: value for key, value in {**TABLES, **tables}.items() if value is not None}


def refused(tables, folder=Path()):
    with pytest.raises(RecipeError) as caught:
        make_recipe(tables, folder)
    return caught.value


def test_a_recipe_is_read_whole(tmp_path):
    recipe = read_recipe(written(tmp_path))
    assert recipe.seed == 3
    assert (recipe.data.name, recipe.data.public) == ("wine", 20)
    assert recipe.partition == Dirichlet(alpha=1.0)
    assert [(entry.kind, entry.options, entry.count) for entry in recipe.agents] == [
        ("mlp", {}, 1),
        ("random_forest", {"n_estimators": 5}, 2),
    ]
    assert recipe.protocol == FedMD(temperature=2.0)
    assert (recipe.spec.rounds, recipe.topology, recipe.participation) == (4, None, 0.5)
    assert (recipe.spec.runtime, recipe.spec.workers) == ("simulation", None)
    assert (recipe.spec.evaluate_every, recipe.spec.evaluate_samples, recipe.spec.alone) == (2, None, False)
    assert [(fault.agent, fault.rate) for fault in recipe.faults] == [("a", 0.5)]


def test_what_is_left_out_has_its_default():
    recipe = make_recipe({key: TABLES[key] for key in ("data", "agents", "protocol")}, Path())
    assert (recipe.seed, recipe.partition, recipe.participation, recipe.faults) == (0, Iid(), 1.0, ())
    assert (recipe.spec.runtime, recipe.spec.checkpoint_every) == ("processes", 1)
    assert (recipe.spec.evaluate_every, recipe.spec.evaluate_samples, recipe.spec.alone) == (1, 2000, True)


def test_a_safeguard_is_true_or_a_table():
    assert make_recipe(changed(safeguard=True), Path()).safeguard == Safeguard()
    assert make_recipe(changed(safeguard={"share": 0.1}), Path()).safeguard == Safeguard(share=0.1)
    assert make_recipe(changed(safeguard=False), Path()).safeguard is None
    assert "'shares'" in str(refused(changed(safeguard={"shares": 0.1})))
    assert "safeguard must be true, false" in str(refused(changed(safeguard="yes")))


def test_its_source_makes_the_same_recipe_again(tmp_path):
    recipe = read_recipe(written(tmp_path), ["protocol.rounds=7"])
    again = read_recipe(written(tmp_path, recipe.source, "again.toml"))
    assert again == recipe
    assert again.spec.rounds == 7


def test_the_demo_is_a_recipe():
    with resources.as_file(resources.files("codistill.experiments") / "demo.toml") as path:
        recipe = read_recipe(path)
    assert len({entry.kind for entry in recipe.agents}) == 5


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    path = tmp_path / "windows.toml"
    path.write_bytes(b"\xef\xbb\xbf" + tomli_w.dumps(TABLES).encode())
    assert read_recipe(path).seed == 3


def test_paths_are_relative_to_the_recipe(tmp_path):
    (tmp_path / "one.csv").touch()
    data = {"files": {"a": "one.csv", "b": "/else/two.csv"}, "label": "y"}
    recipe = make_recipe(changed(data=data, partition=None), tmp_path)
    assert recipe.data.files == {"a": str(tmp_path / "one.csv"), "b": "/else/two.csv"}
    table = make_recipe(changed(data={"file": "one.csv", "label": "y"}), tmp_path)
    assert table.data.file == str(tmp_path / "one.csv")
    assert make_recipe(changed(data={"name": "own", "dir": "sets"}), tmp_path).data.dir == str(tmp_path / "sets")
    assert TABLES["data"] == {"name": "wine", "public": 20}, "the tables given are not changed"


# --- --set ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("protocol.rounds=5", lambda r: r.spec.rounds == 5),
        (" protocol.rounds = 5 ", lambda r: r.spec.rounds == 5),
        ("protocol.temperature=0.5", lambda r: r.protocol.temperature == 0.5),
        ("data.name=digits", lambda r: r.data.name == "digits"),
        ('data.name="digits"', lambda r: r.data.name == "digits"),
        ("evaluation.alone=true", lambda r: r.spec.alone is True),
        ("agents.1.count=5", lambda r: r.agents[1].count == 5),
        ("agents.0.learner=ridge", lambda r: r.agents[0].kind == "ridge"),
        ('agents.0.learner={kind="mlp", lr=0.1}', lambda r: r.agents[0].options == {"lr": 0.1}),
        ("agents.1.learner.n_estimators=9", lambda r: r.agents[1].options == {"n_estimators": 9}),
        ("seed=9", lambda r: r.seed == 9),
        ('partition={kind="iid"}', lambda r: r.partition == Iid()),
        ("protocol.topology=star", lambda r: r.topology == "star"),
    ],
)
def test_set_changes_a_value(tmp_path, override, value):
    assert value(read_recipe(written(tmp_path), [override]))


def test_later_settings_win(tmp_path):
    assert read_recipe(written(tmp_path), ["seed=1", "seed=2"]).seed == 2


def test_set_makes_a_table_that_is_not_there(tmp_path):
    path = written(tmp_path, changed(runtime=None))
    assert read_recipe(path, ["runtime.kind=simulation"]).spec.runtime == "simulation"


@pytest.mark.parametrize(
    ("override", "must"),
    [
        ("protocol.rounds", "--set must have the form table.key=value."),
        ("=5", "--set must have the form table.key=value."),
        ("", "--set must have the form table.key=value."),
        ("protocol.rounds.x=5", "A change must name a place in the recipe."),
        ("agents.9.learner=mlp", "A change must name a place in the recipe."),
        ("agents.first.learner=mlp", "A change must name a place in the recipe."),
        ("seed.x=1", "A change must name a place in the recipe."),
        ("protocl.rounds=5", "Unknown table 'protocl' in the recipe."),
        ("protocol.rounds=", "protocol.rounds must be an integer."),
        ("protocol.rounds=five", "protocol.rounds must be an integer."),
    ],
)
def test_set_that_cannot_be(tmp_path, override, must):
    with pytest.raises(RecipeError) as caught:
        read_recipe(written(tmp_path), [override])
    assert caught.value.must == must


KINDS = changed(partition={"kind": "dirichlet", "alpha": 0.5, "min_size": 5}, protocol={"name": "fedmd", "floor": 0.1})


@pytest.mark.parametrize(
    ("changes", "kept", "note"),
    [
        (
            ["partition.kind=iid"],
            Iid(),
            "[partition] alpha = 0.5, min_size = 5: left out, as iid does not have",
        ),
        (["partition.kind=labels"], LabelSplit(alpha=0.0), "alpha = 0.5, min_size = 5: left out"),  # α is another there
        (["partition.alpha=0.2", "partition.kind=labels"], LabelSplit(alpha=0.2), "[partition] min_size = 5: left out"),
        (["protocol.name=avgkd"], AvgKD(), "[protocol] floor = 0.1: left out, as avgkd does not have it as fedmd does"),
        (["protocol.name=fedmd", "partition.kind=dirichlet"], Dirichlet(alpha=0.5, min_size=5), ""),
    ],
)
def test_another_kind_drops_what_belonged_to_the_old_one(tmp_path, capsys, changes, kept, note):
    recipe = read_recipe(written(tmp_path, KINDS), changes)
    assert kept in (recipe.partition, recipe.protocol)
    said = capsys.readouterr().err
    assert note in said
    assert bool(said) == bool(note)


@pytest.mark.parametrize(
    "changes",
    [
        ["partition.kind=iid", "partition.alpha=0.1"],
        ["protocol.name=avgkd", "protocol.floor=0.2"],
        ['protocol={name="avgkd", floor=0.2}'],
    ],
)
def test_what_is_given_beside_another_kind_is_not_dropped(tmp_path, changes):
    with pytest.raises(RecipeError, match="Unknown option"):
        read_recipe(written(tmp_path, KINDS), changes)


@given(st.text(max_size=30))
def test_any_set_is_taken_or_refused_in_words(tmp_path_factory, text):
    path = written(tmp_path_factory.getbasetemp(), name="fuzzed.toml")
    with suppress(RecipeError):
        read_recipe(path, [text])


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({}, ["A recipe must have [data]."]),
        (changed(agents=None), ["A recipe must have [agents]."]),
        (changed(protocol=None), ["A recipe must have [protocol]."]),
        (changed(partitions={}), ["Unknown table 'partitions'", "Did you mean 'partition'?"]),
        (changed(agents=3), ["'agents' must be [[agents]] tables.", "3", "Write [[agents]] on a line"]),
        (changed(agents=["mlp"]), ["'agents' must be [[agents]] tables."]),
        (changed(agents={"learner": "mlp"}), ["'agents' must be [[agents]] tables."]),
        (changed(agents=[]), ["at least one agent", "Add an [[agents]] table"]),
        (changed(data="wine"), ["'data' must be a [data] table.", "Write [data] on a line"]),
        (changed(protocol="fedmd"), ["'protocol' must be a [protocol] table.", "'fedmd'"]),
        (changed(faults={}), ["'faults' must be [[faults]] tables."]),
        (changed(seed=-1), ["seed must be an integer of at least 0.", "-1"]),
        (changed(seed=True), ["seed must be an integer of at least 0.", "True"]),
        (changed(seed="one"), ["seed must be an integer of at least 0."]),
        (changed(data={}), ["exactly one of name, sources, file, files", "none"]),
        (changed(data={"name": "wine", "file": "x.csv"}), ["exactly one of name, sources", "'name', 'file'"]),
        (changed(data={"name": "wine", "sources": ["wine"]}), ["exactly one of name, sources", "'name', 'sources'"]),
        (changed(data={"sources": ["wine"], "label": "y"}), ["'label' beside 'sources'", "Remove 'label'"]),
        (changed(data={"sources": ["wine", 3]}), ["data.sources must be a list of strings or unset.", "3"]),
        (changed(data={"file": "x.csv", "label": "y", "size": 28}), ["'size' beside 'file'", "Remove 'size'"]),
        (changed(data={"file": "x.csv"}), ["needs 'label', the label column", 'Add label = "column"']),
        (changed(data={"name": "wine", "label": "y"}), ["'label' beside 'name'", "Remove 'label'"]),
        (changed(data={"file": "x.csv", "label": "y", "samples": 3}), ["'samples' beside 'file'"]),
        (changed(data={"name": "wine", "drop": [1]}), ["data.drop must be a list of strings.", "1"]),
        (changed(data={"files": {"a": 3}, "label": "y"}, partition=None), []),
        (changed(data={"files": {"a": "a.csv"}, "label": "y"}), ["the files are the partition", "Remove [partition]"]),
        (changed(data={"name": "wine", "pubic": 3}), ["[data]", "'pubic'", "Did you mean 'public'?"]),
        (changed(data={"name": "wine", "scale": "big"}), ["data.scale must be one of unit, standard, robust, none."]),
        (changed(data={"name": "wine", "test_fraction": 0}), ["data.test_fraction must be above 0."]),
        (changed(agents=[{"name": "a"}]), ["[agents] needs 'learner'.", "codistill learners"]),
        (changed(agents=[{"learner": 5}]), ["agents.learner must be a string or a table or unset.", "5"]),
        (changed(agents=[{"learner": {"lr": 1}}]), ["needs 'kind'", 'Write kind = "name"']),
        (changed(agents=[{"learner": {"kind": 3}}]), ["needs 'kind', a string"]),
        (changed(agents=[{"learner": "mlp", "naem": "x"}]), ["[agents]", "'naem'", "Did you mean 'name'?"]),
        (changed(agents=[{"learner": "mlp", "count": 0}]), ["agents.count must be at least 1."]),
        (changed(protocol={"rounds": 3}), ["[protocol] needs 'name'.", "Choose one of akd, alone"]),
        (changed(protocol={"name": "fedmdd"}), ["'codistill protocols'", "'fedmdd'", "Did you mean 'fedmd'?"]),
        (changed(protocol={"name": "fedmd", "rounds": 0}), ["protocol.rounds must be at least 1.", "0"]),
        (changed(protocol={"name": "fedmd", "rounds": True}), ["protocol.rounds must be an integer", "True"]),
        (
            changed(protocol={"name": "fedmd", "round": 3}),
            ["Unknown option 'round' for fedmd.", "Did you mean 'rounds'?"],
        ),
        (changed(protocol={"name": "fedmd", "temperature": 0}), ["fedmd.temperature must be above 0."]),
        (changed(protocol={"name": "fedmd", "topology": "rin"}), ["topology must be a simple one", "'ring'?"]),
        (changed(protocol={"name": "fedmd", "topology": ["ring"]}), ["topology must be a simple one", "['ring']"]),
        (changed(partition={"alpha": 1}), ["[partition] needs 'kind'.", "one of dirichlet, labels."]),
        (changed(rounds=3), ["Unknown table 'rounds' in the recipe.", "Write protocol.rounds."]),
        (changed(protocol={"name": "fedmd", "lr": 1}), ["'lr'", 'learner = { kind = "mlp", lr = ... } in [[agents]]']),
        (changed(protocol={"name": "FedMD"}), ["Did you mean 'fedmd'?"]),
        (changed(partition={"kind": "dirichle"}), ["'dirichle'", "Did you mean 'dirichlet'?"]),
        (changed(partition={"kind": ["iid"]}), ["Unknown partition ['iid']."]),
        (changed(partition={"kind": "dirichlet"}), ["[partition] needs 'alpha'.", "concentration"]),
        (
            changed(partition={"kind": "iid", "alpha": 1}),
            ["Unknown option 'alpha' for the partition 'iid'.", "a kind that has it: dirichlet"],
        ),
        (
            changed(runtime={"kind": "process"}),
            ["must be one of processes, simulation, network, ray.", "'process'"],
        ),
        (changed(runtime={"workers": 0}), ["runtime.workers must be at least 1."]),
        (changed(runtime={"worker": 2}), ["[runtime]", "'worker'", "Did you mean 'workers'?"]),
        (changed(runtime={"participation": 0}), ["runtime.participation must be above 0.", "0"]),
        (changed(runtime={"participation": "all"}), ["runtime.participation must be a number", "'all'"]),
        (changed(evaluation={"every": 0}), ["evaluation.every must be at least 1."]),
        (changed(evaluation={"sample": 5}), ["[evaluation]", "Did you mean 'samples'?"]),
        (changed(faults=[{"kind": "gone"}]), ["must name its agent"]),
        (changed(faults=[{"knid": "gone"}]), ["[faults]", "Did you mean 'kind'?"]),
    ],
)
def test_every_mistake_is_named_before_anything_runs(tables, words):
    if not words:
        make_recipe(tables, Path())  # 3 is a file's name like any other; that it is missing is said when it is read
        return
    error = refused(tables)
    assert all(word in str(error) for word in words), str(error)
    assert error.do


@pytest.mark.parametrize(
    ("content", "found"),
    [(b"[data\n", "at line 1"), (b"a = 1\na = 2\n", "line 2"), (b"\xff\xfe", "utf-8"), (b"seed = 01", "at line 1")],
)
def test_what_is_not_toml(tmp_path, content, found):
    path = tmp_path / "r.toml"
    path.write_bytes(content)
    with pytest.raises(RecipeError, match="must be valid TOML") as caught:
        read_recipe(path)
    assert found in caught.value.found


@pytest.mark.parametrize(("name", "found"), [("nowhere.toml", "No such file"), (".", "Is a directory")])
def test_a_recipe_that_is_not_there(tmp_path, name, found):
    with pytest.raises(RecipeError, match="The recipe must be a readable file") as caught:
        read_recipe(tmp_path / name)
    assert found in caught.value.found


# --- a protocol of one's own ------------------------------------------------------------------------

OWN = '''
from dataclasses import dataclass
from codistill import Protocol, setting

@dataclass(frozen=True, kw_only=True)
class Quiet(Protocol):
    """Nothing happens."""
    name = "quiet"
    topology = "silent"
    days: int = setting(1, "how long", at_least=1)

class NotOne: pass
'''


def own(tmp_path, text=OWN, file="json.py", cls="Quiet", **fields):
    (tmp_path / file).write_text(text)
    return make_recipe(changed(protocol={"name": f"{file}:{cls}", **fields}), tmp_path)


def test_a_protocol_of_ones_own(tmp_path):
    import json

    recipe = own(tmp_path, days=3)
    assert (recipe.protocol.name, recipe.protocol.days) == ("quiet", 3)
    assert recipe.source["protocol"]["name"] == f"{tmp_path / 'json.py'}:Quiet", "found again when resumed"
    import sys

    assert sys.modules["json"] is json, "a file may be called as a library is"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"days": 0}, ["quiet.days must be at least 1"]),
        ({"day": 2}, ["'day'", "Did you mean 'days'?"]),
        ({"cls": "Quite"}, ["must name something in", "no 'Quite' there", "Did you mean 'Quiet'?"]),
        ({"cls": "NotOne"}, ["must be a class derived from Protocol"]),
        ({"text": "import nowhere_at_all"}, ["must be importable", "nowhere_at_all"]),
        ({"text": "def f(:"}, ["must be importable", "SyntaxError"]),
        ({"text": "1 / 0"}, ["must be importable", "ZeroDivisionError"]),
        ({"text": "x = undefined"}, ["must be importable", "NameError"]),
    ],
)
def test_mistakes_in_a_protocol_of_ones_own(tmp_path, changes, words):
    with pytest.raises(RecipeError) as caught:
        own(tmp_path, **changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_protocols_file_that_is_not_there(tmp_path):
    error = refused(changed(protocol={"name": "gone.py:P"}), tmp_path)
    assert "No such file" in error.found
    assert "Check the path" in error.do


# --- anything at all --------------------------------------------------------------------------------

TEXTS = st.sampled_from(["", "wine", "mlp", "fedmd", "iid"])
KEYS = st.sampled_from(["name", "kind", "learner", "x"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(width=16) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=2),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(sorted(TABLES)), VALUES, max_size=3))
def test_any_tables_are_taken_or_refused_in_words(tables):
    with suppress(RecipeError):
        make_recipe({**TABLES, **tables}, Path())


# --- topologies -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("ring", "ring"),
        ("torus", graphs.Torus()),
        ("random", graphs.Random(degree=3)),
        ({"kind": "ring"}, graphs.Ring()),
        ({"kind": "random", "degree": 5, "seed": 2}, graphs.Random(degree=5, seed=2)),
        ({"kind": "geometric", "radius": 1}, graphs.Geometric(radius=1.0)),
        ({"kind": "erdos_renyi", "probability": 0.5}, graphs.ErdosRenyi(probability=0.5)),
        ({"kind": "expander", "degree": 4}, graphs.Expander(degree=4)),
        ({"kind": "edges", "edges": [["a", "b"]]}, graphs.Edges(edges=(["a", "b"],))),
        ({"kind": "matrix", "matrix": [[1, 0], [0, 1]]}, graphs.Matrix(matrix=([1, 0], [0, 1]))),
    ],
)
def test_a_topology_is_a_name_or_a_table(given, made):
    assert make_recipe(changed(topology=given), Path()).topology == made


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("rin", ["topology must be a known kind", "'rin'", "Did you mean 'ring'?"]),
        ({"kind": "expandr"}, ["topology must be a known kind", "Did you mean 'expander'?"]),
        ({"degree": 3}, ["topology must be a known kind", "None"]),
        (3, ["topology must be a known kind", "3"]),
        (["ring"], ["topology must be a known kind", "['ring']"]),
        ("geometric", ["[topology] needs 'radius'", "largest distance of linked agents"]),
        ({"kind": "random", "degre": 3}, ["Unknown option 'degre' for [topology].", "Did you mean 'degree'?"]),
        ({"kind": "torus", "degree": 3}, ["Unknown option 'degree' for [topology]."]),
        ({"kind": "geometric", "radius": 0}, ["topology.radius must be above 0"]),
        ({"kind": "random", "degree": "3"}, ["topology.degree must be an integer", "'3'"]),
        ({"kind": "edges", "edges": ["ab"]}, ["topology.edges must be a list of lists of strings", "'ab'"]),
        ({"kind": "matrix", "matrix": [1, 2]}, ["topology.matrix must be a list of lists of numbers", "1"]),
    ],
)
def test_mistakes_in_a_topology(given, words):
    error = refused(changed(topology=given))
    assert all(word in str(error) for word in words), str(error)


def test_a_topology_is_said_once():
    error = refused(changed(topology="ring", protocol={"name": "fedmd", "topology": "star"}))
    assert "topology is given twice" in str(error)


@pytest.mark.parametrize(
    ("head", "change", "made"),
    [
        ('topology = "ring"\n', "topology=complete", "complete"),
        ('topology = "ring"\n', "topology={kind='random', degree=4}", graphs.Random(degree=4)),
        ("", "topology.kind=torus", graphs.Torus()),
        ('[topology]\nkind = "random"\ndegree = 3\n', "topology.degree=4", graphs.Random(degree=4)),
        ('[topology]\nkind = "random"\ndegree = 3\n', "topology=ring", "ring"),
    ],
)
def test_a_topology_in_toml_and_changed_from_outside(tmp_path, head, change, made):
    path = tmp_path / "r.toml"
    path.write_text(f'{head}[data]\nname = "wine"\n[[agents]]\nlearner = "mlp"\n[protocol]\nname = "avgkd"\n')
    assert read_recipe(path, [change]).topology == made


@given(VALUES)
def test_any_topology_is_taken_or_refused_in_words(topology):
    with suppress(RecipeError):
        make_recipe({**TABLES, "topology": topology}, Path())
