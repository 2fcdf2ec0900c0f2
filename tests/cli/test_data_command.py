"""The partition of a recipe as a table for the terminal."""

import numpy as np

from codistill.cli.data_commands import partition_text


def test_the_text_is_a_table_with_totals():
    text = partition_text(np.array([[10, 0], [2, 300]]), ["a", "bob"], ["cat", "dog"])
    assert text.splitlines() == [
        "agent  cat  dog  total",
        "a       10    0     10",
        "bob      2  300    302",
        "total   12  300    312",
    ]


def test_many_classes_are_folded_and_none_is_lost():
    table = np.arange(120).reshape(2, 60)
    text = partition_text(table, ["a", "b"], [f"c{index}" for index in range(60)], width=60)
    assert max(map(len, text.splitlines())) <= 60
    blocks = [block.splitlines() for block in text.split("\n\n")]
    assert len(blocks) > 1
    first_agent = [int(cell) for block in blocks for cell in block[1].split()[1:]]
    assert first_agent == [*range(60), sum(range(60))]


def test_long_names_are_cut():
    text = partition_text(np.ones((1, 1), int), ["n" * 50], ["c" * 50])
    assert "n" * 19 + "…" in text
    assert "n" * 20 not in text
