"""The policy of an agent: which terms it accepts, what it reports, and what a policy file may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.dummy import DummyClassifier

import codistill as cd
from codistill.core.errors import PolicyError, RecipeError
from codistill.core.spec import RunSpec
from codistill.engine.description import RunDescription
from codistill.federation.joining import check_countable, policy_from
from codistill.network.policy import ANYTHING, Policy, make_policy, read_policy
from codistill.nodes.faults import Faults
from codistill.protocol import Protocol
from codistill.topology import Topology
from codistill.wire.compression import Compression


class Own(Protocol):
    """A protocol that codistill does not know."""

    name = "own"


def description(protocol: Protocol, labels: tuple[int, ...] = (0, 1, 2), **given: Any) -> RunDescription:
    """A run of three agents and four classes; the agent at hand has these labels."""
    names = ("north", "south", "west")
    x = np.random.default_rng(0).normal(size=(len(labels), 2))
    agent = cd.Agent("north", DummyClassifier(), x, np.array(labels))
    options: dict[str, Any] = {"spec": RunSpec(rounds=10), "faults": Faults([], names, 0, 1.0), **given}
    topology = Topology.star(names)
    made = RunDescription(protocol=protocol, topology=topology, classes=4, seed=0, agents=(agent,), **options)
    return made.bind_nodes()


ACCEPTED: list[tuple[dict[str, Any], Protocol, dict[str, Any]]] = [
    ({}, cd.FedAvg(), {}),
    ({"protocols": ["fedmd"], "rounds": 10, "least_agents": 3}, cd.FedMD(), {}),
    ({"settings": {"fedmd": {"aggregate": ["mean", "median"]}}}, cd.FedMD(aggregate="median"), {}),
    ({"settings": {"fedmd": {"aggregate": "median"}}}, cd.FD(), {}),  # a rule for another protocol
    ({"settings": {"d_sgd": {"lr": {"at_most": 0.1, "at_least": 0}}}}, cd.DSGD(lr=0.1), {}),
    ({"compression": "required"}, cd.FedMD(), {"compression": Compression(bits=8)}),
    ({"compression": "forbidden"}, cd.FedMD(), {}),
    ({"classes": [0, 1, 2]}, cd.FD(), {}),
    ({"classes": [0]}, cd.FedMD(), {}),  # nothing by class is released
    ({"classes": [0, 1]}, cd.CRS(release_classes=(0, 1)), {}),
    ({"settings": {"fd": {"smallest_group": {"at_least": 5}}}}, cd.FD(smallest_group=5), {}),
]
REFUSED: list[tuple[dict[str, Any], Protocol, dict[str, Any], str]] = [
    ({"settings": {"fedmd": {"aggregate": "median"}}}, cd.FedMD(), {}, "fedmd.aggregate must be 'median': 'mean'"),
    ({"settings": {"fedmd": {"aggregate": ["mean", "median"]}}}, cd.FedMD(aggregate="coverage"), {}, "must be one of"),
    ({"settings": {"d_sgd": {"lr": {"at_most": 0.1}}}}, cd.DSGD(lr=0.2), {}, "d_sgd.lr must be at most 0.1: 0.2"),
    ({"settings": {"fedmd": {"local_steps": {"at_least": 1}}}}, cd.FedMD(), {}, "must be at least 1: None"),
    ({"least_agents": 4}, cd.FedMD(), {}, "least_agents = 4: the run has 3"),
    ({"rounds": 9}, cd.FedMD(), {}, "rounds = 9: the run has 10"),
    ({"compression": "required"}, cd.FedMD(), {}, "compression = required: messages are not compressed"),
    ({"compression": "forbidden"}, cd.FedMD(), {"compression": Compression(bits=8)}, "messages are compressed"),
    ({"classes": [0, 1]}, cd.FD(), {}, "classes = [0, 1]: fd releases statistics of 2"),
    ({"classes": [0, 1]}, cd.FedProto(), {}, "fedproto releases statistics of 2"),
    ({"classes": [0, 1]}, cd.CRS(), {}, "crs releases statistics of 2"),
    ({"classes": [0, 1]}, cd.CRS(release_classes=(1, 2)), {}, "crs releases statistics of 2"),
    ({"classes": [0, 1]}, cd.FedDistill(), {}, "feddistill releases statistics of 2"),
    ({"settings": {"fd": {"smallest_group": {"at_least": 5}}}}, cd.FD(), {}, "fd.smallest_group must be at least 5: 2"),
    ({"classes": [1]}, cd.FedMD(aggregate="coverage"), {}, "fedmd releases statistics of 0, 2"),
    ({"classes": [0]}, Own(), {}, "own releases statistics of 1, 2"),  # nothing is known of it
]  # fmt: skip


@pytest.mark.parametrize(("tables", "protocol", "given"), ACCEPTED)
def test_terms_within_the_policy_are_fine(tables: dict[str, Any], protocol: Protocol, given: dict[str, Any]) -> None:
    make_policy(tables).check(description(protocol, **given))


@pytest.mark.parametrize(("tables", "protocol", "given", "found"), REFUSED)
def test_terms_against_the_policy_are_refused_by_the_rules_name(
    tables: dict[str, Any], protocol: Protocol, given: dict[str, Any], found: str
) -> None:
    with pytest.raises(PolicyError, match="must keep to this agent's policy") as caught:
        make_policy(tables).check(description(protocol, **given))
    assert found in caught.value.found
    assert caught.value.rule.startswith(next(iter(tables)))
    assert caught.value.exit_code == 9


def test_every_broken_rule_is_named() -> None:
    policy = make_policy({"least_agents": 5, "rounds": 3, "protocols": ["fd"]})
    assert [each.partition(" ")[0] for each in policy.objections(description(cd.FedMD()))] == [
        "protocols", "least_agents", "rounds",
    ]  # fmt: skip


def test_a_setting_that_the_hub_does_not_tell_has_its_default() -> None:
    """The rule is compared with the protocol as it would run, not with the text of the terms."""
    from codistill.network.terms import protocol_from

    made = protocol_from({"name": "fedmd", "settings": {}}, None)
    with pytest.raises(PolicyError):
        make_policy({"settings": {"fedmd": {"aggregate": "median"}}}).check(description(made))


@pytest.mark.parametrize(
    ("hubs", "address", "fits"),
    [(None, "x:1", True), (["hub.org"], "hub.org:7447", True), (["hub.org:7447"], "hub.org:7447", True),
     (["hub.org:7447"], "hub.org:1", False), (["hub.org"], "other.org:7447", False), ([], "x:1", False)],
)  # fmt: skip
def test_only_hubs_that_are_named_are_connected_to(hubs: list[str] | None, address: str, fits: bool) -> None:
    policy = make_policy({} if hubs is None else {"hubs": hubs})
    if fits:
        policy.check_hub(address)
    else:
        with pytest.raises(PolicyError, match="The hub must be one that this agent's policy names"):
            policy.check_hub(address)


def test_accepts_narrows_a_policy_and_never_widens_it() -> None:
    assert policy_from(None, ["fedmd", "fd"]).protocols == ("fedmd", "fd")
    assert policy_from({"protocols": ["fedmd"]}, ["fedmd", "fd"]).protocols == ("fedmd",)
    assert policy_from({"protocols": ["fedmd"]}, None).protocols == ("fedmd",)
    assert policy_from(None, None) == ANYTHING


# --- reports ----------------------------------------------------------------------------------------


def test_what_is_withheld_is_not_in_a_report() -> None:
    content = {
        "sent": {"a": 1}, "received": {"a": 2}, "refused": [("a", "hub", "NaN in 'z'")], "remarks": [("a", "diverged")],
        "measures": [("a", "loss", 0.5)],
    }  # fmt: skip
    assert ANYTHING.reported(content) == content
    told = make_policy({"report": {"remarks": False, "measures": False}}).reported(content)
    assert told == {
        "sent": {"a": 1}, "received": {"a": 2}, "refused": [("a", "hub", "(not told)")], "remarks": [], "measures": [],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("report", "left"),
    [({}, ["accuracy", "own_accuracy", "own_rmse", "rmse"]), ({"own_accuracy": False}, ["accuracy", "rmse"]),
     ({"accuracy": False}, ["own_accuracy", "own_rmse"]), ({"accuracy": False, "own_accuracy": False}, [])],
)  # fmt: skip
def test_what_is_withheld_is_not_in_the_scores(report: dict[str, bool], left: list[str]) -> None:
    scores = {"accuracy": 0.5, "own_accuracy": 0.6, "rmse": 1.0, "own_rmse": 2.0}
    assert sorted(make_policy({"report": report}).scored(scores)) == left


def test_validation_scores_depend_on_own_samples_and_are_withheld_with_own_scores() -> None:
    scores = {"accuracy": 0.5, "validation_accuracy": 0.6}
    assert make_policy({"report": {"own_accuracy": False}}).scored(scores) == {"accuracy": 0.5}
    assert make_policy({"report": {"accuracy": False}}).scored(scores) == {"validation_accuracy": 0.6}


# --- the file ---------------------------------------------------------------------------------------

MISTAKES = [
    ('protocol = ["fedmd"]', "'protocol'. Did you mean 'protocols'?"),
    ('protocols = ["fedm"]', "'fedm'. Did you mean 'fedmd'?"),
    ('protocols = "fedmd"', "policy.protocols must be a list of strings"),
    ("rounds_per_day = 0", "policy.rounds_per_day must be at least 1"),
    ('largest_message = "1 MB"', "policy.largest_message must be an integer"),
    ('compression = "yes"', "policy.compression must be one of required, forbidden"),
    ("[report]\nacuracy = false", "Unknown option 'acuracy' for [report]. Did you mean 'accuracy'?"),
    ("[report]\naccuracy = 0", "report.accuracy must be true or false"),
    ("report = false", "[report] of a policy must be a table"),
    ("[settings.fedmdd]\nlr = 1", "'fedmdd'. Did you mean 'fedmd'?"),
    ("[settings.fedmd]\nagregate = 1", "'agregate'. Did you mean 'aggregate'?"),
    ("[settings.fedmd]\ntrim = { most = 1 }", "'most'. Did you mean 'at_most'?"),
    ('[settings.fedmd]\ntrim = { at_most = "1" }', "trim.at_most must be a number"),
    ("[settings]\nfedmd = 3", "[settings.fedmd] of a policy must be a table"),
    ("rounds =", "must be valid TOML"),
]


@pytest.mark.parametrize(("text", "told"), MISTAKES)
def test_a_mistake_in_a_policy_is_an_error_before_anything_is_sent(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(RecipeError) as caught:
        read_policy(tmp_path / "policy.toml")
    assert told in str(caught.value)


def test_a_policy_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="must be readable"):
        read_policy(tmp_path / "policy.toml")


def test_a_policy_may_name_a_protocol_of_ones_own() -> None:
    assert make_policy({"protocols": ["own"], "settings": {"own": {}}}, Own).protocols == ("own",)


def test_a_policy_in_one_line_and_its_digest() -> None:
    policy = make_policy({"protocols": ["fedmd"], "rounds_per_day": 24, "report": {"alone": False, "accuracy": True}})
    digest = policy.digest[:12]
    assert str(policy) == f'protocols = ["fedmd"]; rounds_per_day = 24; not reported: alone (digest {digest})'
    assert policy.plain() == {"protocols": ["fedmd"], "rounds_per_day": 24, "report": {"alone": False}}
    assert make_policy(policy.plain()) == policy
    assert policy.digest != ANYTHING.digest
    assert "no rules" in str(ANYTHING)


def test_limits_that_outlive_a_process_need_a_folder(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="rounds_per_day of a policy is counted in the audit log"):
        check_countable(Policy(rounds_per_day=2), None)
    check_countable(Policy(rounds_per_day=2), tmp_path)
    check_countable(Policy(largest_message=2), None)
