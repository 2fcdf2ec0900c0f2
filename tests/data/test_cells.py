"""Cells as they are written: separators, decimal commas, thousands, bounds and dates."""

from datetime import date

import numpy as np
import pandas as pd
import pytest

from codistill import Columns
from codistill.core.errors import DataError, RecipeError
from codistill.data.cells import Form, find_form, find_separator
from codistill.data.tables import read_file, read_table

# --- separators


@pytest.mark.parametrize(
    ("text", "separator"),
    [
        ("a,b\n1,2\n", ","),
        ("a;b\n1,5;2,5\n", ";"),
        ("a\tb\n1\tx, y\n", "\t"),
        ("a|b\n1|x; y\n", "|"),
        ('a;b\n"x;y";2\n', ";"),
        ("a\n1\n", ","),  # one column
        ("a,b\n1,2\n1,2,3\n", ","),  # rows of different length: reported when the file is read
        ("", ","),
    ],
)
def test_the_separator_is_that_by_which_all_rows_are_equally_long(tmp_path, text, separator):
    (tmp_path / "t.csv").write_text(text)
    assert find_separator(tmp_path / "t.csv") == separator


def test_an_unclear_separator_is_named_and_can_be_set(tmp_path):
    (tmp_path / "t.csv").write_text("height, cm;label\n" + "170;1,5\n171;2,5\n" * 9)
    with pytest.raises(DataError, match=r'by each of comma, semicolon\. Set separator = "comma"'):
        find_separator(tmp_path / "t.csv")
    assert list(read_file(tmp_path / "t.csv", separator="semicolon").columns) == ["height, cm", "label"]


def test_only_whole_rows_of_a_long_file_are_compared(tmp_path):
    rows = "".join(f"{row};{'x' * 50}\n" for row in range(5000))  # the sample ends within a row
    (tmp_path / "t.csv").write_text("a;b\n" + rows)
    assert find_separator(tmp_path / "t.csv") == ";"


# --- numbers


@pytest.mark.parametrize(
    ("cells", "form"),
    [
        (["1,5", "2"], Form(",")),
        (["0,125"], Form(",")),  # no group of thousands begins with 0
        (["1,234,567", "12"], Form(".", ",")),
        (["1,234.5"], Form(".", ",")),
        (["1.234,5"], Form(",", ".")),
        (["1 234", "12"], Form(".", " ")),
        (["1\u202f234,5"], Form(",", " ")),
        (["1'234.5"], Form(".", "'")),
        (["1,234"], None),  # one point two or more than a thousand?
        (["12,34,5"], None),
        (["many"], None),
        (["<1"], None),
    ],
)
def test_a_form_is_found_if_it_is_the_only_one(cells, form):
    assert find_form(pd.Series(cells)) == form


def test_the_mark_of_the_table_decides_what_a_comma_is():
    assert find_form(pd.Series(["1,234"]), ",") == Form(",")
    assert find_form(pd.Series(["1,234"]), ".") == Form(".", ",")


@pytest.mark.parametrize(
    ("kind", "cells", "numbers"),
    [
        ({"decimal": ","}, ["1,5", None, "-2", " 3,25e1 "], [1.5, np.nan, -2, 32.5]),
        ({"decimal": ",", "thousands": "."}, ["1.234,5", "12", "1.000"], [1234.5, 12, 1000]),
        ({"thousands": " "}, ["1 234.5", "1\u00a0000"], [1234.5, 1000]),
        ({"bounds": "value"}, ["<1", ">= 5", "≤2.5", "3", None], [1, 5, 2.5, 3, np.nan]),
        ({"decimal": ",", "bounds": "value"}, ["< 0,5", "7"], [0.5, 7]),
        ({"decimal": ","}, [1.5, "2,5"], [1.5, 2.5]),  # of two tables, one with numbers
    ],
)
def test_numbers_are_read_as_they_are_written(kind, cells, numbers):
    columns = Columns({"x": {"kind": "number", **kind}})
    frame = pd.DataFrame({"x": pd.Series(cells, dtype=object)})
    np.testing.assert_array_equal(columns.transform(frame)[:, 0], numbers)
    again = Columns.from_plain(columns.as_plain())
    np.testing.assert_array_equal(again.transform(frame)[:, 0], numbers)


@pytest.mark.parametrize(
    ("kind", "cells", "phrases"),
    [
        ({}, ["1", "<5", "2"], ["'<5' in data row 2", 'bounds = "value"']),
        ({}, ["1,5"], ["'1,5' in data row 1", 'decimal = ","']),
        ({"decimal": ","}, ["1.5", "1,5"], ["with a decimal comma", "'1.5' in data row 1"]),
        ({"thousands": ","}, ["12,34"], ["thousands separated by ','", "'12,34'"]),
        ({"bounds": "value"}, ["<low"], ["'<low' in data row 1", "'missing_values'"]),
        ({}, ["a", "b", "c", "d", "e"], ["'c' in data row 3 and 2 more"]),
        ({"decimal": ",", "thousands": "."}, [1.5, 2.0], ["must be text or whole numbers", "1.5"]),
    ],
)
def test_other_cells_are_named(kind, cells, phrases):
    with pytest.raises(DataError) as error:
        Columns({"x": {"kind": "number", **kind}}).transform(pd.DataFrame({"x": cells}))
    for phrase in phrases:
        assert phrase in str(error.value)


def test_points_that_separate_thousands_are_not_taken_for_decimal_points(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("pay;x;y\n" + "".join(f"{1 + row}.500;{row},5;{'ab'[row % 2]}\n" for row in range(20)))
    with pytest.raises(DataError, match=r"(?s)'pay': numbers that can be read in two ways.*thousands = \"\.\""):
        read_table(path, "y", scale="none")
    data = read_table(path, "y", scale="none", decimal=",")
    assert set(np.concatenate([data.x, data.x_test])[:, 0]) == {1000 * (1 + row) + 500 for row in range(20)}
    assert data.columns.columns["pay"].options == {"kind": "number", "decimal": ",", "thousands": "."}
    plain = read_table(path, "y", scale="none", columns={"pay": "number"})
    assert plain.x[:, 0].max() < 21


# --- dates


def test_dates_become_days_and_parts():
    frame = pd.DataFrame({"d": ["1970-01-02", "1969-12-31T12:00", None, "2024-02-29 06:00:00"]})
    days = Columns({"d": "date"}).transform(frame)
    np.testing.assert_array_equal(days, [[1], [-0.5], [np.nan], [19782.25]])
    assert (pd.Timestamp("2024-02-29") - pd.Timestamp(0)).days == 19782
    columns = Columns({"d": {"kind": "date", "parts": ["days", "year", "month", "day", "weekday", "hour"]}})
    np.testing.assert_array_equal(columns.transform(frame)[3], [19782.25, 2024, 2, 29, date(2024, 2, 29).weekday(), 6])
    assert np.isnan(columns.transform(frame)[2]).all()
    assert columns.numbers == 6
    assert columns.feature_names()[:3] == ["d:days", "d:year", "d:month"]
    np.testing.assert_array_equal(Columns.from_plain(columns.as_plain()).transform(frame), columns.transform(frame))


@pytest.mark.parametrize(
    "values",
    [
        pd.Series(["31.03.2021", "01.04.2021"]),
        pd.to_datetime(pd.Series(["2021-03-31", "2021-04-01"])),
        pd.to_datetime(pd.Series(["2021-03-31", "2021-04-01"])).dt.tz_localize("UTC"),
        pd.Series([date(2021, 3, 31), date(2021, 4, 1)], dtype=object),
    ],
)
def test_dates_of_any_type_are_the_same(values):
    form = "%d.%m.%Y" if isinstance(values[0], str) else None
    x = Columns({"d": {"kind": "date", **({"format": form} if form else {})}}).transform(pd.DataFrame({"d": values}))
    first = (date(2021, 3, 31) - date(1970, 1, 1)).days
    np.testing.assert_array_equal(x, [[first], [first + 1]])


def test_offsets_are_converted_to_the_time_zone():
    frame = pd.DataFrame({"d": ["2021-07-01T00:30+02:00", "2021-06-30T22:30Z"]})
    utc = Columns({"d": {"kind": "date", "parts": ["day", "hour"]}}).transform(frame)
    np.testing.assert_array_equal(utc, [[30, 22], [30, 22]])
    columns = Columns({"d": {"kind": "date", "parts": ["day", "hour"], "timezone": "Europe/Berlin"}})
    np.testing.assert_array_equal(columns.transform(frame), [[1, 0], [1, 0]])
    local = pd.DataFrame({"d": ["2021-07-01 00:30", "2021-06-30T22:30Z"]})  # the first by the clock of the zone
    np.testing.assert_array_equal(columns.transform(local), [[1, 0], [1, 0]])
    with pytest.raises(DataError, match=r"offset from UTC, or none.*'2021-07-01 00:30' in data row 1, but .*row 2"):
        Columns({"d": "date"}).transform(local)


@pytest.mark.parametrize(
    ("kind", "cells", "phrases"),
    [
        ({}, ["2021-02-28", "2021-02-30", "x"], ["ISO 8601", "'2021-02-30' in data row 2, 'x' in data row 3"]),
        ({}, ["31.12.2021"], ["'31.12.2021' in data row 1", 'format = "%d.%m.%Y"']),
        ({}, [20210304], ["ISO 8601", 'format = "%Y%m%d"']),
        ({"format": "%d.%m.%Y"}, ["2021-02-28"], ["written as '%d.%m.%Y'", "'2021-02-28' in data row 1"]),
    ],
)
def test_what_is_no_date_is_named(kind, cells, phrases):
    with pytest.raises(DataError) as error:
        Columns({"d": {"kind": "date", **kind}}).transform(pd.DataFrame({"d": cells}))
    for phrase in phrases:
        assert phrase in str(error.value)


@pytest.mark.parametrize(
    ("kind", "phrases"),
    [
        ({"kind": "date", "parts": ["days", "moth"]}, ["some of days, year, month", "Did you mean 'month'?"]),
        ({"kind": "date", "parts": []}, ["parts of a date must list"]),
        ({"kind": "date", "parts": ["day", "day"]}, ["each once"]),
        ({"kind": "date", "format": "DD.MM"}, ["how dates are written", "no % in it"]),
        ({"kind": "date", "format": "%d.%Q"}, ["how dates are written", "%Q"]),
        ({"kind": "date", "timezone": "Europe/Berlyn"}, ["name of a time zone", "Europe/Berlin"]),
        ({"kind": "date", "timezone": "../../etc/passwd"}, ["name of a time zone"]),
        ({"kind": "category", "format": "%d"}, ["columns.format is for a date column"]),
        ({"kind": "date", "decimal": ","}, ["columns.decimal is for a number column"]),
        ({"kind": "number", "decimal": ",", "thousands": ","}, ["what separates thousands another", "thousands = ','"]),
        ({"kind": "number", "thousands": "x"}, ["what separates thousands another", "thousands = 'x'"]),
        ({"kind": "number", "bounds": "yes"}, ["bounds must be one of refuse, value"]),
    ],
)
def test_settings_that_do_not_fit_are_refused(kind, phrases):
    with pytest.raises(RecipeError) as error:
        Columns({"d": kind})
    for phrase in phrases:
        assert phrase in str(error.value)


def test_dates_are_scaled_as_numbers_and_missing_ones_stay(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(
        "d,y\n" + "".join(f"{f'2021-01-{row + 1:02d}' if row % 5 else ''},{row % 2}\n" for row in range(20))
    )
    data = read_table(path, "y", columns={"d": "date"})
    assert np.isnan(np.concatenate([data.x, data.x_test])).sum() == 4
    np.testing.assert_allclose([np.nanmean(data.x), np.nanstd(data.x)], [0, 1], atol=1e-5)


def test_real_values_may_have_a_decimal_comma(tmp_path):
    (tmp_path / "t.csv").write_text("x;y\n" + "".join(f"{row};{row},5\n" for row in range(20)))
    data = read_table(tmp_path / "t.csv", "y", task="regression", scale="none")
    np.testing.assert_array_equal(data.y[:, 0], data.x[:, 0] + 0.5)
