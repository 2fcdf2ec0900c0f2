"""Attacks by well-formed frames: bombs, extra arrays, other architectures, forged numbers of samples."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from trials.fuzz import run_all

import codistill as cd
from codistill.core.errors import MessageError, NetworkError
from codistill.engine.exchange import Frame, Report
from codistill.engine.host import Host
from codistill.network.commands import checked_scores, checked_view
from codistill.network.terms import check_terms, hello_of, objection, terms_of
from codistill.nodes.agent import Hub, JoinInfo
from codistill.nodes.faults import Faults
from codistill.results.scores import ACCURACY, RMSE, as_scores
from codistill.topology import HUB, Topology
from codistill.wire.codec import decode, encode, read_json
from codistill.wire.compression import Compression
from codistill.wire.message import Message

MEGABYTE = 1 << 20


class Arrivals:
    """Links on which these messages have arrived, and from which nothing more is to come."""

    def __init__(self, *messages: tuple[str, bytes], senders: Sequence[str] = ("a", "b", "c")) -> None:
        self._frames = [Frame(0, sender, [HUB], data) for sender, data in messages]
        self._senders = senders
        self.sent: dict[str, Message] = {}

    def post(self, phase: int, sender: str, receivers: Sequence[str], data: bytes | None) -> None:
        self.sent |= dict.fromkeys(receivers, Message.decode(data or b""))

    def post_end(self, phase: int, sender: str, listeners: Iterable[str]) -> None: ...

    def flush(self) -> None: ...

    def arrived(self) -> list[Frame]:
        return [*self._frames, *(Frame(0, sender, [], b"", is_end=True) for sender in self._senders)]

    def wait(self, host: Any) -> list[Frame]:
        raise AssertionError(host.waits())


def hub_round(
    protocol: cd.Protocol,
    *messages: tuple[str, bytes],
    present: tuple[str, ...] = ("a", "b", "c"),
    hellos: dict[str, JoinInfo] | None = None,
    **options: Any,
) -> tuple[Report, dict[str, Message]]:
    """What the hub makes of these messages in a round, and what it sends to whom."""
    hub, links = Hub(), Arrivals(*messages, senders=present)
    hub.topology, hub.classes, hub.joined = Topology.star(present), 2, hellos or {}
    host = Host([hub], protocol, Faults((), present, 0), links, **options)
    return host.run(0, present), links.sent


def refused(report: Report) -> dict[str, str]:
    return {sender: reason for _, sender, reason in report.refused}


def weights(value: float, samples: int, **extra: Any) -> bytes:
    return Message({"w": np.full(3, value, np.float32), **extra}, {"samples": samples}).encoded


def hellos(**samples: int) -> dict[str, JoinInfo]:
    layout = Message({"w": np.zeros(3, np.float32)}).layout
    return {name: JoinInfo(count, layout) for name, count in samples.items()}


# --- what is decoded counts -------------------------------------------------------------------------------------


def bomb(size: int) -> bytes:
    """A message whose array has a thousand times as many bytes."""
    return Compression(bits=8, top_k=1, lossless=True).encode({"w": np.zeros((size // 800, 200), np.float32)}, {}, {})


def test_the_limit_counts_what_is_decoded() -> None:
    data = bomb(8 * MEGABYTE)
    assert len(data) < MEGABYTE // 8
    assert decode(data)[0]["w"].nbytes > 7 * MEGABYTE
    tracemalloc.start()
    with pytest.raises(MessageError, match=f"above the limit of {MEGABYTE}"):
        decode(data, limit=MEGABYTE)
    assert tracemalloc.get_traced_memory()[1] < MEGABYTE
    tracemalloc.stop()


def test_arrays_beside_the_packed_ones_count_too() -> None:
    arrays = {"w": np.zeros((100, 200), np.float32), "ids": np.arange(10_000)}
    data = Compression(bits=8).encode(arrays, {}, {})
    total = sum(array.nbytes for array in arrays.values())
    assert decode(data, limit=total)
    with pytest.raises(MessageError, match="above the limit"):
        decode(data, limit=total - 1)


@pytest.mark.parametrize("terms", [None, Compression(bits=16), Compression(top_k=3), Compression(lossless=True)])
def test_a_message_is_packed_as_was_agreed_on_or_not_at_all(terms: Compression | None) -> None:
    """At the hub, as from the network; a message that is not packed is always accepted."""
    x = np.random.default_rng(0).normal(size=(20, 30)).astype(np.float32)
    ways = [Compression(bits=16), Compression(bits=8), Compression(top_k=3), Compression(top_k=2)]
    ways += [Compression(lossless=True), Compression(bits=16, lossless=True)]
    for way in [None, *ways]:
        arrays = {"w": np.round(x)}
        data = encode(arrays, {}) if way is None else way.encode(arrays, {}, {})
        report, _ = hub_round(_Listen(), ("a", data), present=("a",), compression=terms)
        reason = refused(report).get("a", "")
        if way in (None, terms):
            assert not reason
        else:
            assert (
                "a compression that was not agreed on" in reason if terms else "no compression was agreed on" in reason
            )


class _Listen(cd.Protocol):
    """The hub waits for one message of each agent."""

    name = "listen"

    async def hub(self, me: Hub, t: int) -> None:
        await me.gather()


def test_small_messages_of_one_sender_do_not_fill_the_memory() -> None:
    """300 bombs of one megabyte each in one round: decoded are those that are asked for, and the first."""
    data = bomb(MEGABYTE - 1000)
    tracemalloc.start()
    hub_round(
        _Listen(), *[("a", data)] * 300, present=("a",), message_limit=MEGABYTE,
        compression=Compression(bits=8, top_k=1, lossless=True),
    )  # fmt: skip
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * MEGABYTE


def test_headers_and_texts_are_bounded() -> None:
    long = encode({}, {"text": "x" * 2 * MEGABYTE})
    with pytest.raises(MessageError, match="header of a message may have at most 1048576 bytes"):
        decode(long)
    assert decode(long, header_limit=3 * MEGABYTE)
    with pytest.raises(ValueError, match="more than 16 levels"):
        read_json("[" * 17 + "]" * 17, 100)
    with pytest.raises(ValueError, match="above 10"):
        read_json('"1234567890"', 10)
    assert read_json('{"a": [1, {"b": null}]}', 100) == {"a": [1, {"b": None}]}


# --- judged by what was said at joining, never by a majority -------------------------------------------------------


def test_with_two_agents_an_extra_array_is_the_fault_of_its_sender_whoever_is_listed_first() -> None:
    for order in (("a", "b"), ("b", "a")):
        sent = {"a": weights(5.0, 1, extra=np.zeros(1)), "b": weights(1.0, 1)}
        report, replies = hub_round(
            cd.FedAvg(), *((name, sent[name]) for name in order), present=order, hellos=hellos(a=1, b=1)
        )
        assert list(refused(report)) == ["a"]
        assert "that their sender joined with" in refused(report)["a"]
        np.testing.assert_array_equal(replies["b"]["w"], np.ones(3, np.float32))


def test_an_extra_array_beside_outputs_is_refused() -> None:
    means, seen = np.zeros((2, 2), np.float32), np.ones(2, bool)
    good, bad = Message.of(means=means, seen=seen), Message.of(means=means, seen=seen, extra=seen)
    report, _ = hub_round(cd.FD(), ("a", bad.encoded), ("b", good.encoded), present=("a", "b"))
    assert list(refused(report)) == ["a"]
    assert "unexpected content" in refused(report)["a"]


def test_an_agent_that_joined_with_another_architecture_harms_nobody() -> None:
    """Two agents with one architecture each are both left alone; of three, the two that can be averaged are."""
    other = Message({"v": np.full(2, 9.0, np.float32)}, {"samples": 1})
    said = {"a": JoinInfo(1, Message(other.arrays).layout), **hellos(b=1, c=3)}
    report, replies = hub_round(
        cd.FedAvg(), ("a", other.encoded), ("b", weights(2, 1)), ("c", weights(4, 3)), hellos=said
    )
    assert not report.refused
    # (1 · 2 + 3 · 4) / 4
    assert [list(replies[name]["w"]) for name in "bc"] == [[3.5] * 3] * 2
    assert list(replies["a"]["v"]) == [9, 9]
    assert "different architectures, each averaged separately: a; b, c" in report.remarks[0][1]


def test_hellos_are_checked() -> None:
    torch.manual_seed(0)
    agents = [cd.Agent(name, nn.Linear(2, 2), np.eye(2), [0, 1]) for name in "ab"]
    description = cd.Federation(agents, cd.FedAvg()).description
    terms, hello = terms_of(description), hello_of(agents[0], None)
    assert objection(terms, hello) is None
    assert hello["weights"] == description.hub.joined["b"].weights
    assert hello["features"] == 2
    for wrong in (
        {"samples": 2**63},
        {"samples": True},
        {"weights": "x"},
        {"weights": 7},
        {"body": "x"},
        {"features": 0},
        {"columns": 7},
        {"columns": "x" * 63},
        {"columns": []},
        {"columns": ["x", 1]},
        {"columns": ["x", "x"]},
        {"columns": ["x", "y", "z"]},  # of samples with two
        {"columns": ["x", "y" * (1 << 17)]},
        {"columns": {"x": "y"}},
    ):
        assert objection(terms, hello | wrong) == "malformed join request"
    assert objection(terms, hello | {"columns": ["x", "y"]}) is None
    for wrong in (7, [], ["x", 1], ["x", "x"], ["y" * (1 << 17)]):
        with pytest.raises(NetworkError, match="The columns of a federation must be named, each once"):
            check_terms(terms | {"columns": wrong})


# --- what stands beside weights, and gradients ------------------------------------------------------------------------


def gradients(value: float, name: str = "w", dtype: type = np.float32, size: int = 3) -> bytes:
    return Message({name: np.full(size, value, dtype)}).encoded


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (gradients(9, "v"), "must have an array 'w'"),
        (gradients(9, size=2), "must have shape"),
        (gradients(9, dtype=np.float64), "must have dtype float32"),
        (gradients(np.nan), "finite"),
        (Message({"w": np.ones(3, np.float32), "more": np.ones(1)}).encoded, "unexpected content"),
    ],
)
def test_a_gradient_that_does_not_fit_is_refused_for_that_step(bad: bytes, said: str) -> None:
    """w̄ = (1 + 3 + 5) / 3 = 3; the gradients of b and c are 2 and 4, so that w̄ - 0.1 · (2 + 4) / 2 = 2.7."""
    sent = [(name, weights(value, 1)) for name, value in (("a", 1.0), ("b", 3.0), ("c", 5.0))]
    steps = [("a", bad), ("b", gradients(2)), ("c", gradients(4))]
    report, replies = hub_round(cd.FedDKD(dkd_steps=1, dkd_lr=0.1), *sent, *steps, hellos=hellos(a=1, b=1, c=1))
    assert list(refused(report)) == ["a"]
    assert said in refused(report)["a"]
    for name in "abc":
        np.testing.assert_allclose(replies[name]["w"], 2.7, rtol=1e-6)


def test_weights_of_batch_norm_are_not_taken_where_they_stay_at_home() -> None:
    body = Message({"w": np.zeros(3, np.float32)}).layout
    said = {name: JoinInfo(1, "0" * 64, None, body) for name in "ab"}
    sent = [("a", weights(1, 1, **{"norm.weight": np.ones(3, np.float32)})), ("b", weights(3, 1))]
    for protocol in (cd.FedBN(), cd.FedDKD(average="except batch norm", dkd_steps=0)):
        report, replies = hub_round(protocol, *sent, present=("a", "b"), hellos=said)
        assert list(refused(report)) == ["a"]
        assert list(replies["b"]["w"]) == [3, 3, 3]


def test_what_stands_beside_weights_is_as_expected_or_refused() -> None:
    beside = {"class means": np.zeros((2, 2), np.float32), "classes seen": np.ones(2, bool)}
    good, bad = weights(1, 1, **beside), weights(5, 1, **(beside | {"class means": np.zeros((3, 2), np.float32)}))
    report, replies = hub_round(
        cd.FedDistill(), ("a", bad), ("b", good), ("c", weights(9, 1)), hellos=hellos(a=1, b=1, c=1)
    )
    assert set(refused(report)) == {"a", "c"}
    assert list(replies["a"]["w"]) == [1, 1, 1]


# --- numbers of samples ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("claimed", [2**63, 3, 0, -1])
def test_a_number_of_samples_is_at_most_the_one_that_was_said_at_joining(claimed: int) -> None:
    said = hellos(a=1, b=1, c=2)
    sent = [("a", weights(0, 1)), ("b", weights(4, 1)), ("c", weights(1e6, claimed))]
    report, replies = hub_round(cd.FedAvg(), *sent, hellos=said)
    assert list(refused(report)) == ["c"]
    assert list(replies["c"]["w"]) == [2, 2, 2]


def test_a_number_of_samples_may_be_smaller_than_said() -> None:
    """A safeguard holds samples out: with 1 of the 2 that c said, w = (1 · 0 + 1 · 4 + 1 · 5) / 3 = 3."""
    sent = [("a", weights(0, 1)), ("b", weights(4, 1)), ("c", weights(5, 1))]
    report, replies = hub_round(cd.FedAvg(), *sent, hellos=hellos(a=1, b=1, c=2))
    assert not refused(report)
    np.testing.assert_allclose(replies["c"]["w"], 3, rtol=1e-6)


def test_a_claim_of_many_samples_is_capped() -> None:
    """Lower median of (1, 1, 2⁴⁷) is 1: with cap 10, w = (1 · 0 + 1 · 6 + 10 · 12) / 12 = 10.5."""
    many = 1 << 47
    sent = [("a", weights(0, 1)), ("b", weights(6, 1)), ("c", weights(12, many))]
    _, replies = hub_round(cd.FedAvg(), *sent, hellos=hellos(a=1, b=1, c=many))
    np.testing.assert_allclose(replies["a"]["w"], 10.5, rtol=1e-6)
    _, replies = hub_round(cd.FedAvg(cap=1.0), *sent, hellos=hellos(a=1, b=1, c=many))
    np.testing.assert_allclose(replies["a"]["w"], 6, rtol=1e-6)
    # Of two agents, the lower median is the smaller number.
    _, replies = hub_round(cd.FedAvg(), sent[0], sent[2], present=("a", "c"), hellos=hellos(a=1, c=many))
    np.testing.assert_allclose(replies["a"]["w"], 12 * 10 / 11, rtol=1e-6)


@pytest.mark.parametrize("aggregate", ["mean", "median", "trimmed"])
def test_robust_weights_withstand_one_of_three(aggregate: str) -> None:
    """Weights 1, 2 and 10⁶ times that: the median and, with one trimmed at each end, the trimmed mean are 2."""
    sent = [("a", weights(1, 5)), ("b", weights(2, 5)), ("c", weights(2e6, 5))]
    protocol = cd.FedAvg(aggregate=aggregate, trim=0.4)
    _, replies = hub_round(protocol, *sent, hellos=hellos(a=5, b=5, c=5))
    expected = (1 + 2 + 2e6) / 3 if aggregate == "mean" else 2.0
    np.testing.assert_allclose(replies["a"]["w"], expected, rtol=1e-6)


def test_robust_weights_are_taken_number_by_number() -> None:
    """Also of counters, which are rounded, and of masks, where the majority counts."""
    arrays = [
        {"w": np.array(w, np.float64), "n": np.array(n), "m": np.array(m)}
        for w, n, m in [([1, 9], 1, [True, False]), ([5, 3], 4, [True, True]), ([3, 7], 9, [False, False]),
                        ([7, 5], 7, [True, False])]
    ]  # fmt: skip
    sent = {str(k): Message(each, {"samples": 1}) for k, each in enumerate(arrays)}
    found = cd.protocols.parts.combined_weights(sent, "median", 0.2, 10.0)
    # Of four, the mean of the two in the middle: (3 + 5)/2, (5 + 7)/2; (4 + 7)/2 = 5.5, rounded to even
    assert found["w"].tolist() == [4, 6]
    assert found["n"].tolist() == 6
    assert found["m"].tolist() == [True, False]
    assert {name: array.dtype for name, array in found.items()} == {name: a.dtype for name, a in arrays[0].items()}


def test_the_model_stays_where_one_of_three_sends_a_million_times_its_weights() -> None:
    def run(aggregate: str, faults: list[cd.Fault]) -> np.ndarray:
        torch.manual_seed(0)
        rng = np.random.default_rng(0)
        x = rng.normal(size=(3, 20, 4)).astype(np.float32)
        agents = [cd.Agent(name, nn.Linear(4, 2), part, part[:, 0] > 0) for name, part in zip("abc", x, strict=True)]
        made = cd.Federation(agents, cd.FedAvg(aggregate=aggregate), faults=faults)
        made.run(3, runtime="simulation", alone=False, progress=False)
        return agents[0].learner.weights()["weight"]

    attack = [cd.Fault(kind="invert", agent="c", strength=1e6)]
    honest = run("median", [])
    assert np.abs(run("median", attack) - honest).max() < 1
    assert np.abs(run("mean", attack) - honest).max() > 1e3


# --- answers ------------------------------------------------------------------------------------------------------


def test_outputs_in_a_run_of_real_values_are_refused() -> None:
    with pytest.raises(MessageError, match="for classes only"):
        checked_view({"mean": np.zeros((1, 1))}, np.zeros((6, 1)), 1)
    assert checked_view({}, np.zeros((6, 1)), 1) is None


def test_scores_are_of_the_kind_of_the_run() -> None:
    assert checked_scores({"rmse": 2}, [RMSE]) == {"rmse": 2.0}
    with pytest.raises(MessageError, match="scores of this run must be: accuracy"):
        checked_scores({"rmse": 2}, [ACCURACY])
    with pytest.raises(MessageError, match="scores of this run must be: rmse"):
        checked_scores({"own_accuracy": 0.5}, [RMSE])
    with pytest.raises(MessageError, match="within their bounds"):
        checked_scores({"own_r2": 1.5}, as_scores(["rmse", "r2"], "regression", 1))
    with pytest.raises(MessageError, match="must be numbers"):
        checked_scores({"accuracy": "0.5"})


@pytest.mark.long
def test_changed_messages_of_every_protocol_are_refused_or_used(time_limit: None) -> None:
    """The same with 100,000: python -m trials.fuzz."""
    outcomes = list(run_all(1500))
    assert [error for outcome in outcomes for error in outcome.errors] == []
    assert sum(outcome.refused for outcome in outcomes) > 500
    assert all(outcome.cases >= 5 for outcome in outcomes)
