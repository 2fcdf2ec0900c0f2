"""Runs with compressed messages: equal in both runtimes and after a kill, fewer bytes, and they still learn."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

import codistill as cd
from codistill.core.errors import RecipeError, RuntimeFault
from codistill.engine.privacy_guard import PrivacyGuard
from codistill.experiments.building import build
from codistill.experiments.recipe import make_recipe
from codistill.experiments.run import execute
from codistill.experiments.saved_run import read_summary
from codistill.learners.zoo import build as build_model
from codistill.nodes.agent import Hub
from codistill.nodes.faults import Fault
from codistill.nodes.record import record_of
from codistill.wire.codec import decode
from codistill.wire.message import Message

EIGHT = cd.Compression(bits=8, error_feedback=True)


class Silent:
    """A model that learns nothing."""

    def fit(self, x: Any, targets: Any) -> None: ...

    def predict(self, x: Any) -> Any:
        return np.tile([1.0, 0.0], (len(x), 1))


@dataclass(frozen=True, kw_only=True)
class Tell(cd.Protocol):
    """Everyone tells its neighbours and the same again one by one, and asks the hub, which tells all."""

    name = "tell"
    needs = cd.Ability.LABELS

    def alone(self) -> None: ...

    async def round(self, me: cd.Agent, t: int) -> None:
        w = np.random.default_rng([ord(me.name), t]).normal(size=(20, 30)).astype(np.float32)
        reply = await me.ask_hub(w=w, seen=np.arange(3), size=2.5, expect={"w": w})
        assert reply is not None
        me.state.setdefault("heard", []).append(np.array(reply["w"]))

    async def hub(self, me: Hub, t: int) -> None:
        heard = await me.gather(expect={"w": (20, 30), "seen": (3,), "size": float})
        me.state.setdefault("heard", []).extend(np.array(message["w"]) for message in heard.values())
        if t % 2:
            await me.broadcast(w=np.sum([message["w"] for message in heard.values()], axis=0))
        else:
            await me.scatter({name: Message.of(w=message["w"] * 2) for name, message in heard.items()})


def tell(runtime: str = "simulation", rounds: int = 3, **options: Any) -> tuple[cd.Federation, cd.Result]:
    run = {key: options.pop(key) for key in ("folder", "resume") if key in options}
    agents = [cd.Agent(name, Silent(), [[0.0], [1.0]], [0, 1]) for name in "abc"]
    federation = cd.Federation(agents, Tell(), test=([[0.0]], [0]), **{"compression": EIGHT, **options})
    return federation, federation.run(rounds, runtime=runtime, workers=2, alone=False, progress=False, **run)


def assert_equal_states(left: cd.Federation, right: cd.Federation) -> None:
    for one, other in zip([*left.agents, left.hub], [*right.agents, right.hub], strict=True):
        assert one is not None
        assert other is not None
        assert record_of(one).residue.keys() == record_of(other).residue.keys() == {("w", "f", 20, 30)}
        for key, lost in record_of(one).residue.items():
            np.testing.assert_array_equal(lost, record_of(other).residue[key])
        for mine, theirs in zip(one.state["heard"], other.state["heard"], strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_both_runtimes_lose_and_carry_over_the_same() -> None:
    runs = [tell(runtime) for runtime in ("simulation", "processes")]
    assert_equal_states(runs[0][0], runs[1][0])
    assert runs[0][1].rows == runs[1][1].rows


@pytest.mark.parametrize("runtime", ["simulation", "processes"])
def test_a_resumed_run_carries_over_what_was_lost(runtime: str, tmp_path: Path) -> None:
    whole, rows = tell(runtime, 4, folder=tmp_path / "whole")
    tell(runtime, 2, folder=tmp_path / "parts")
    parts, again = tell(runtime, 4, folder=tmp_path / "parts", resume=True)
    assert_equal_states(whole, parts)
    assert rows.rows == again.rows


def test_what_is_counted_is_what_travels() -> None:
    """20 x 30 float32 in 8 bits: a body of 608 bytes instead of 2,400; seen and size as ever."""
    seen: list[tuple[str, str, bytes]] = []
    _, result = tell(watchers=[lambda *message: seen.append(message)])
    for row in result.rows:
        assert row["sent"] == len(next(data for sender, _, data in seen if sender == row["agent"]))
        assert row["sent"] <= 608 + 24 + 300
    arrays, values = decode(seen[0][2])
    assert {name: (array.dtype, array.shape) for name, array in arrays.items()} == {
        "w": (np.float32, (20, 30)),
        "seen": (np.int64, (3,)),
    }
    assert values == {"size": 2.5}


def test_a_broadcast_is_compressed_once() -> None:
    seen: dict[str, list[bytes]] = {}
    tell(rounds=2, watchers=[lambda sender, receiver, data: seen.setdefault(sender, []).append(data)])
    to_all = seen["hub"][3:]  # round 2: after what was scattered
    assert len(to_all) == 3
    assert to_all[0] is to_all[1] is to_all[2]


def test_byzantine_messages_are_compressed_and_lost_messages_stay_lost() -> None:
    faults = [Fault(kind="invert", agent="b"), Fault(kind="drop", agent="c", first=2)]
    plain, lossy = cd.Compression(lossless=True), cd.Compression(bits=8)
    heard = []
    for compression in (plain, lossy):
        seen: list[tuple[str, bytes]] = []
        agents = [cd.Agent(name, Silent(), [[0.0], [1.0]], [0, 1]) for name in "abc"]
        watchers = [lambda sender, _, data, seen=seen: seen.append((sender, data))]
        federation = cd.Federation(agents, Once(), faults=faults, compression=compression, watchers=watchers)
        federation.run(2, runtime="simulation", alone=False, progress=False)
        heard.append([len(agent.state["heard"]) for agent in agents])
        for sender, data in seen:
            sign = -1 if sender == "b" else 1
            np.testing.assert_allclose(decode(data)[0]["w"], sign * RAMP, atol=np.ptp(RAMP) / 510 + 1e-6)
    assert heard == [[3, 3, 2], [3, 3, 2]]  # round 1: from two each; round 2: nothing to or from c


RAMP = np.linspace(-1, 2, 500).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class Once(cd.Protocol):
    """Everyone tells all others a ramp."""

    name = "once"
    needs = cd.Ability.LABELS
    topology = "complete"

    def alone(self) -> None: ...

    async def round(self, me: cd.Agent, t: int) -> None:
        heard = await me.exchange(w=RAMP)
        me.state["heard"] = [*me.state.get("heard", []), *heard]


@dataclass(frozen=True, kw_only=True)
class Leak(Once):
    """Sends its samples."""

    async def round(self, me: cd.Agent, t: int) -> None:
        await me.exchange(x=me.shard.x)


def test_the_guard_sees_what_is_meant_and_not_only_what_arrives() -> None:
    rng = np.random.default_rng(0)
    agents = [cd.Agent(name, Silent(), rng.normal(size=(40, 9)), np.arange(40) % 2) for name in "ab"]
    for agent in agents:
        record_of(agent).encode_labels(2)
    compression = cd.Compression(bits=8, top_k=2)
    federation = cd.Federation(agents, Leak(), compression=compression, watchers=[PrivacyGuard(agents)])
    with pytest.raises(RuntimeFault, match="Data stays home"):
        federation.run(1, runtime="simulation", alone=False, progress=False)


# --- real protocols -------------------------------------------------------------------------------

Digits = tuple[np.ndarray, np.ndarray]


def learn(
    digits: Digits, protocol: cd.Protocol, runtime: str, rounds: int, compression: Any, **model: Any
) -> cd.Result:
    """Three agents with 80 digits each: perceptrons and, for FedMD, a linear model."""
    x, y = digits
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    agents = []
    for i in range(3):
        rows = rng.choice(1000, 80, replace=False)
        mlp = cd.TorchLearner(build_model("mlp", (1, 8, 8), 10), lr=3e-3, epochs=10, batch_size=16)
        other = i == 1 and isinstance(protocol, cd.FedMD)
        agents.append(cd.Agent(f"a{i}", LogisticRegression(max_iter=1000) if other else mlp, x[rows], y[rows]))
    federation = cd.Federation(
        agents, protocol, public=x[1000:1200], test=(x[1200:], y[1200:]), classes=10, compression=compression
    )
    return federation.run(rounds, runtime=runtime, workers=2, progress=False, alone=False)


def mean_accuracy(result: cd.Result) -> float:
    last = max(row["round"] for row in result.rows)
    return float(np.mean([row["accuracy"] for row in result.rows if row["round"] == last]))


def test_simulation_equals_processes_to_the_bit(digits: Digits) -> None:
    protocol, compression = cd.FedMD(local_epochs=1, batch_size=32), cd.Compression(bits=16, top_k=3, lossless=True)
    here, there = [learn(digits, protocol, kind, 2, compression) for kind in ("simulation", "processes")]
    assert here.rows == there.rows
    for name, agent in here.agents.items():
        np.testing.assert_array_equal(
            agent.decision_function(digits[0][:20]), there.agents[name].decision_function(digits[0][:20])
        )


@pytest.mark.parametrize(
    ("protocol", "settings"),
    [
        (
            cd.FedMD(local_epochs=10, batch_size=32),
            [(cd.Compression(bits=8), 2.8), (cd.Compression(bits=8, top_k=3), 3.4)],
        ),
        (
            cd.FedAvg(local_epochs=4, batch_size=16),
            [(cd.Compression(bits=8), 3.5), (cd.Compression(bits=8, error_feedback=True, lossless=True), 3.5)],
        ),
    ],
    ids=["fedmd", "fedavg"],
)
def test_it_still_learns(digits: Digits, protocol: Any, settings: list[tuple[cd.Compression, float]]) -> None:
    """As well as without, to 3 % of the test samples, in so many times fewer bytes."""
    plain = learn(digits, protocol, "simulation", 2, None)
    assert mean_accuracy(plain) > 0.8
    for compression, shorter in settings:
        packed = learn(digits, protocol, "simulation", 2, compression)
        assert mean_accuracy(packed) > mean_accuracy(plain) - 0.03
        assert sum(row["sent"] for row in plain.rows) > shorter * sum(row["sent"] for row in packed.rows)


# --- where it is set ------------------------------------------------------------------------------

RECIPE = """
[data]
name = "digits"
samples = 200
public = 50
[[agents]]
learner = "logistic"
count = 2
[protocol]
name = "fedmd"
rounds = 1
[runtime]
kind = "simulation"
[evaluation]
alone = false
[compression]
bits = 8
top_k = 3
lossless = true
"""


def test_a_recipe_sets_it_and_the_folder_says_so(tmp_path: Path) -> None:
    tables = tomllib.loads(RECIPE)
    recipe = make_recipe(tables, tmp_path)
    assert recipe.compression == cd.Compression(bits=8, top_k=3, lossless=True)
    assert build(recipe)[0].compression == recipe.compression
    execute(recipe, tmp_path / "run", progress=False)
    assert "[compression]" in read_summary(tmp_path / "run").facts["recipe"]
    assert '"top_k": 3' in (tmp_path / "run" / "run.json").read_text()
    del tables["compression"]
    assert make_recipe(tables, tmp_path).compression is None


@pytest.mark.parametrize(
    ("change", "must"),
    [
        ({"bit": 8}, "Did you mean 'bits'"),
        ({"bits": 7}, "bits must be 8 or 16"),
        ({"error_feedback": True}, "needs lossy compression"),
    ],
)
def test_a_recipe_is_held_to_it(change: dict[str, Any], must: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=must):
        make_recipe({**tomllib.loads(RECIPE), "compression": change}, tmp_path)


def test_a_federation_is_held_to_it() -> None:
    with pytest.raises(RecipeError, match="compression must be a Compression"):
        tell(compression={"bits": 8})
