"""Recipes of texts and images: raw strings go to a pipeline with a vectoriser, pictures to any model of images."""

import numpy as np
import pytest
from PIL import Image

from codistill.core.errors import CodistillError, DataError, RecipeError
from codistill.experiments.building import build, load_data
from codistill.experiments.recipe import make_recipe
from codistill.experiments.run import prepare
from codistill.experiments.saved_run import read_facts
from codistill.nodes.record import record_of

WORDS = (("fine", "great", "lovely"), ("awful", "sad", "poor"))
TFIDF = {"kind": "pipeline", "steps": [{"kind": "TfidfVectorizer", "ngram_range": [1, 2]}, "logistic_regression"]}
COUNTS = {"kind": "pipeline", "steps": ["CountVectorizer", {"kind": "random_forest", "n_estimators": 5}]}


def review(row):
    return f"The film of day {row % 7}, as told, was {WORDS[row % 2][row % 3]}"


def reviews(folder, rows=60):
    lines = [f'"{review(row)}",{("up", "down")[row % 2]},{"ns"[row // 2 % 2]}' for row in range(rows)]
    (folder / "reviews.csv").write_text("\n".join(["review,stars,site", *lines]) + "\n")


def texts(**data):
    return {
        "seed": 0,
        "data": {"kind": "text", "file": "reviews.csv", "text": "review", "label": "stars", "ids": ["site"], **data},
        "partition": {"kind": "by", "id": "site"},
        "agents": [{"name": "n", "learner": TFIDF}, {"name": "s", "learner": COUNTS}],
        "protocol": {"name": "fedmd", "rounds": 2},
        "runtime": {"kind": "simulation"},
    }


def test_raw_strings_reach_the_vectorisers(tmp_path):
    reviews(tmp_path)
    recipe = make_recipe(texts(public=12), tmp_path)
    data = load_data(recipe)
    assert (data.text, data.x.shape, data.x_test.shape) == ("review", (48,), (12,))
    assert set(data.x) | set(data.x_test) == {review(row) for row in range(60)}
    result = build(recipe)[0].run(2, runtime="simulation", alone=False, progress=False)
    assert result.rows[-1]["accuracy"] > 0.9
    model = result.agents["n"]
    vectoriser = record_of(model._agent).node.learner.estimator.steps[0][1]
    assert vectoriser.ngram_range == (1, 2)
    assert {"film", "was great"} <= set(vectoriser.vocabulary_)
    assert list(model.predict(["It was great", "It was awful"])) == [1, 0]  # up, down
    assert list(model.feature_names_in_) == ["review"]


@pytest.mark.long
def test_texts_give_equal_rows_in_the_simulation_and_in_processes(tmp_path):
    reviews(tmp_path)
    recipe = make_recipe(texts(public=12), tmp_path)
    rows = [
        build(recipe)[0].run(2, runtime=runtime, alone=False, progress=False).rows
        for runtime in ("simulation", "processes")
    ]
    assert rows[0] == rows[1]


def test_texts_of_a_folder(tmp_path):
    for row in range(40):
        file = tmp_path / "reviews" / ("up", "down")[row % 2] / f"{row}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(review(row))
    recipe = {
        **texts(),
        "data": {"kind": "text", "folder": "reviews"},
        "partition": {"kind": "iid"},
        "protocol": {"name": "alone"},
    }
    federation, data = build(make_recipe(recipe, tmp_path))
    assert (data.class_names, data.text) == (("down", "up"), "text")
    result = federation.run(1, runtime="simulation", alone=False, progress=False)
    assert result.rows[-1]["accuracy"] == 1
    _, again = prepare(make_recipe(recipe, tmp_path), tmp_path / "run")
    digests = read_facts(tmp_path / "run")["digests"]
    (tmp_path / "reviews" / "up" / "0.txt").write_text("another text")
    prepare(make_recipe(recipe, tmp_path), tmp_path / "other")
    assert read_facts(tmp_path / "other")["digests"] != digests
    np.testing.assert_array_equal(again.x, data.x)


def test_a_file_for_each_agent_and_the_only_column_that_is_left(tmp_path):
    for name in ("n", "s"):
        lines = [f'"{review(row)}",{row % 2}' for row in range(20)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["opinion,good", *lines]))
    data = {"kind": "text", "files": {"n": "n.csv", "s": "s.csv"}, "label": "good"}
    recipe = {key: value for key, value in texts().items() if key != "partition"}
    recipe |= {"data": data, "protocol": {"name": "alone"}}
    federation, found = build(make_recipe(recipe, tmp_path))
    assert found.text == "opinion"
    assert [len(agent.shard) for agent in federation.agents] == [16, 16]


@pytest.mark.parametrize(
    ("changes", "kind", "phrases"),
    [
        ({"text": "reveiw"}, DataError, ["must have the column 'reveiw'", "Did you mean 'review'?"]),
        ({"text": None, "ids": []}, RecipeError, ["column of texts", "'review', 'site'", 'text = "..."']),
        ({"columns": {"review": "text"}}, RecipeError, ["'columns' means nothing for a table of texts"]),
        ({"scale": "unit"}, RecipeError, ["'scale' means nothing for a table of texts"]),
        ({"size": 8}, RecipeError, ["'size' means nothing for a table of texts"]),
        ({"file": None}, RecipeError, ["exactly one of name, sources, file"]),
        ({"file": None, "name": "wine"}, RecipeError, ['kind = "text" needs file or files or folder']),
        ({"file": None, "folder": "x"}, RecipeError, ["'label' means nothing for a folder of texts"]),
        ({"file": None, "folder": "x", "kind": "table"}, RecipeError, ["needs the kind of its files"]),
        ({"file": None, "folder": "x", "kind": "images"}, RecipeError, ["means nothing for a folder of images"]),
        ({"kind": "txet"}, RecipeError, ["data.kind must be one of table, text, images"]),
        ({"decimal": ",", "kind": "table", "text": None}, DataError, ["'review': "]),
        ({"decimal": "x", "kind": "table", "text": None}, RecipeError, ["data.decimal must be", "decimal = 'x'"]),
        ({"separator": ";"}, RecipeError, ["data.separator must be one of comma, semicolon, tab, pipe"]),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, changes, kind, phrases):
    reviews(tmp_path)
    recipe = texts(**changes)
    recipe["data"] = {key: value for key, value in recipe["data"].items() if value is not None}
    with pytest.raises(CodistillError) as error:
        build(make_recipe(recipe, tmp_path))
    assert type(error.value) is kind
    for phrase in phrases:
        assert phrase in str(error.value)


def test_a_model_of_numbers_is_refused_with_a_pipeline_to_write(tmp_path):
    reviews(tmp_path)
    recipe = {**texts(), "agents": [{"name": "n", "learner": TFIDF}, {"name": "s", "learner": "mlp"}]}
    with pytest.raises(RecipeError, match=r"must be a pipeline.*'mlp' for agent 's'.*\"TfidfVectorizer\""):
        build(make_recipe(recipe, tmp_path))


def test_an_empty_text_is_named_or_its_row_is_dropped(tmp_path):
    reviews(tmp_path)
    with (tmp_path / "reviews.csv").open("a") as file:
        file.write(",up,n\n")
    with pytest.raises(DataError, match="column 'review', data row 61"):
        build(make_recipe(texts(), tmp_path))
    data = load_data(make_recipe(texts(missing="drop_rows"), tmp_path))
    assert len(data.x) + len(data.x_test) == 60


# --- images


def images(place, **data):
    for row in range(24):
        file = place / "photos" / ("cat", "dog")[row % 2] / f"{row:02d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.zeros((9, 12), dtype=np.uint8)
        pixels[:, :6] = pixels[:, 6:] = 40 + row  # noise that differs
        pixels[2:7, 4:8] = 255 * (row % 2)
        Image.fromarray(pixels).save(file)
    return {
        "seed": 0,
        "data": {"kind": "images", "folder": "photos", "size": 8, **data},
        "agents": [{"learner": {"kind": "mlp", "hidden": [8]}}, {"learner": {"kind": "random_forest"}}],
        "protocol": {"name": "fedmd", "rounds": 2},
        "runtime": {"kind": "simulation"},
    }


def test_images_of_a_folder_are_samples_for_any_model_of_images(tmp_path):
    federation, data = build(make_recipe(images(tmp_path, public=4), tmp_path))
    assert (data.x.shape[1:], data.class_names, len(data.x), len(data.x_test)) == ((1, 8, 8), ("cat", "dog"), 15, 5)
    assert (data.x.min() >= 0, data.x.max()) == (True, 1)
    result = federation.run(1, runtime="simulation", alone=False, progress=False)
    assert [row["accuracy"] for row in result.rows if row["agent"] == "random_forest"] == [1]
    colour = load_data(make_recipe(images(tmp_path, channels=3, fit="pad", samples=6), tmp_path))
    assert colour.x.shape == (6, 3, 8, 8)
    assert not colour.x[:, :, 0].any()  # padded above


@pytest.mark.parametrize(
    ("changes", "phrases"),
    [
        ({"channels": 2}, ["must be 1 or 3", "channels = 2"]),
        ({"size": None, "fit": "pad"}, ["'fit' needs 'size'"]),
        ({"label": "x"}, ["'label' means nothing for a folder of images"]),
        ({"folder": None, "file": "x.csv"}, ['kind = "images" needs folder']),
        ({"folder": "pictures"}, ["The folder 'pictures' must be beside the recipe", "no such folder"]),
    ],
)
def test_settings_of_images_that_do_not_fit_are_refused(tmp_path, changes, phrases):
    recipe = images(tmp_path, **changes)
    recipe["data"] = {key: value for key, value in recipe["data"].items() if value is not None}
    with pytest.raises(CodistillError) as error:
        build(make_recipe(recipe, tmp_path))
    for phrase in phrases:
        assert phrase in str(error.value)


def test_folders_whose_names_are_numbers_are_classes(tmp_path):
    for row in range(2 * 31):  # of a column, so many integers could be values to predict, and a regressor would ask
        file = tmp_path / "years" / f"{1990 + row // 2}" / f"{row}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(review(row))
    learner = {"kind": "pipeline", "steps": ["TfidfVectorizer", "ridge"]}
    data = {"kind": "text", "folder": "years", "test_fraction": 0.5}
    recipe = {"data": data, "agents": [{"learner": learner}], "protocol": {"name": "alone"}}
    federation, _ = build(make_recipe(recipe, tmp_path))
    assert federation.classes == 31
