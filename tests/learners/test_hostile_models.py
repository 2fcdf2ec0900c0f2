"""What is no sound model is refused: by a receiver, and in a running federation, where the others go on."""

from __future__ import annotations

import os
import pickle
import re
import resource
import subprocess
import sys
import tracemalloc
import zipfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from archived_models import EVIL
from hostile_messages import HOSTILE, Hostile, claims
from model_messages import (
    TRAP,
    Trap,
    archive_message,
    attributes,
    call_node,
    changed,
    closed,
    first,
    linear,
    list_node,
    npy,
    opened,
)
from model_mutations import PACKED, TABLE, mutate_archives, mutate_messages
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import Ridge
from travelling_models import CLASSES, D, message
from trials.archives import run

import codistill as cd
from codistill.core.errors import CheckpointError, MessageError
from codistill.learners import zoo
from codistill.learners.portable import ReceivedModel, open_model
from codistill.learners.portable.onnx_graph import to_message
from codistill.learners.portable.skops_archive import load_own_estimator
from codistill.learners.torch import TorchLearner
from codistill.wire.message import Message


def refused(made: Message | bytes, case: Hostile) -> None:
    """A message, or bytes in the place of one, is a `MessageError` that says why."""
    must = "must be" if isinstance(made, bytes) else "A received model must be of a known type, sound"
    with pytest.raises(MessageError, match=rf"{must}.*(?:{case.said})"):
        open_model(Message.decode(made) if isinstance(made, bytes) else made, case.shape, case.classes)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_message_is_refused_and_takes_no_memory(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = HOSTILE[name].make()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(made, HOSTILE[name])
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert taken < (500_000 if name.startswith("onnx") else 300_000)  # kB
    assert not (tmp_path / TRAP).exists()


def test_no_archive_kills_its_reader():
    """In a process of its own: compiled code that follows a wrong index ends the process, and not with an exception.

    Every estimator with trees, with nodes, values and class counts of the wrong dtype, shape or content; and what
    compiled code reads of other saved models.
    """
    folder = Path(__file__).parent
    paths = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    opened = subprocess.run(
        [sys.executable, str(folder / "archived_models.py")],
        env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True,
    )  # fmt: skip
    assert opened.returncode == 0, (opened.returncode, opened.stdout.splitlines()[-1:], opened.stderr[-500:])
    lines = opened.stdout.splitlines()
    assert len(lines) == sum(map(len, EVIL.values()))
    assert [line for line in lines if not line.endswith(": refused")] == []


def test_changed_archives_are_refused_or_used_and_nobody_dies():
    """A few cases of the trial `archives`, which says of each what became of it."""
    outcomes, _ = run([("tree", 0, 25), ("saved: encoded", 0, 25)])
    assert [outcome.cases for outcome in outcomes] == [25, 25]
    assert all(outcome.refused + outcome.accepted == 25 for outcome in outcomes), [each.said for each in outcomes]
    assert all(outcome.refused > 5 for outcome in outcomes)


# --- sizes that a test makes smaller --------------------------------------------------------------


def test_an_archive_that_claims_to_be_small_is_not_unpacked_further():
    out = BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("schema.json", b" " * 50_000_000)
    bomb = archive_message(claims(out.getvalue(), 200))
    del out
    tracemalloc.start()
    try:
        refused(bomb, Hostile(lambda: bomb))
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_an_archive_may_not_be_larger_than_its_limit(monkeypatch):
    outline, files = opened(message("ridge"))
    large = closed(outline, files | {"more.npy": b"\0" * 1_000_000})
    open_model(large, (D,), CLASSES)
    monkeypatch.setattr("codistill.learners.portable.skops_archive.UNPACKED_LIMIT", 1_000_000)
    refused(large, Hostile(lambda: large, "that unpacks to"))


def test_one_file_may_not_be_read_over_and_over(monkeypatch):
    monkeypatch.setattr("codistill.learners.portable.skops_archive.UNPACKED_LIMIT", 1_000_000)
    outline, files = opened(message("ridge"))
    files["big.npy"] = npy(np.zeros(50_000))
    open_model(closed(outline, files), (D,), CLASSES)
    attributes(outline)["alpha"] = list_node([first(outline, "NdArrayNode") | {"file": "big.npy"}] * 3)
    often = closed(outline, files)
    refused(often, Hostile(lambda: often, "a model of more than 1000000 bytes"))


# --- mutated messages -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLE)
def test_mutated_messages_are_refused_or_are_models(name):
    """Many more of them: `python tests/learners/model_mutations.py`."""
    assert mutate_messages(name, 25, seed=0) < 25


@pytest.mark.parametrize("name", PACKED)
def test_mutated_archives_are_refused_or_are_models(name):
    """Inside of the archive, where no checksum helps."""
    assert mutate_archives(name, 24, seed=1) < 24


# --- an agent's own checkpoints -------------------------------------------------------------------


@pytest.mark.parametrize("loader", ["ConstructorFromReduceNode", "LossNode"])
def test_a_checkpoint_calls_no_function(loader, tmp_path, monkeypatch):
    """Not even those of packages whose classes are trusted: numpy.load would unpickle."""
    monkeypatch.chdir(tmp_path)
    np.save("trap.npy", np.array([Trap()], dtype=object), allow_pickle=True)
    for call in [
        ("numpy", "load", "trap.npy", None, True),
        ("builtins", "eval", f"__import__('os').mkdir({TRAP!r})"),
        ("os", "mkdir", TRAP),
    ]:
        outline, files = opened(message("ridge"))
        attributes(outline)["alpha"] = call_node(*call, loader=loader)
        with pytest.raises(CheckpointError, match="Resume with the recipe"):
            load_own_estimator(closed(outline, files).arrays["model"].tobytes(), Ridge())
    assert not (tmp_path / TRAP).exists()


@pytest.mark.parametrize("data", [b"", b"noise", pickle.dumps([1])], ids=["nothing", "noise", "a pickle"])
def test_a_damaged_checkpoint_is_a_checkpoint_error(data):
    with pytest.raises(CheckpointError):
        load_own_estimator(data, Ridge())


# --- in a running federation ----------------------------------------------------------------------


def far(seed: int, n: int = 30) -> tuple[np.ndarray, np.ndarray]:
    """Rows that reach far beyond what a model is probed with."""
    labels = np.arange(n) % CLASSES
    x = np.random.default_rng(seed).normal(size=(n, D)) + labels[:, None]
    x[:, 0] *= 1000
    return x.astype(np.float32), labels


def logistic(weight: float) -> Message:
    """Classes that pull against one another."""
    sound = TorchLearner(zoo.build("logistic", (D,), CLASSES)).export()
    signs = np.sign(np.arange(CLASSES) - 1.0)
    made = {
        name: np.broadcast_to(weight * signs[:, None] if array.ndim == 2 else 0 * signs, array.shape).astype(np.float32)
        for name, array in sound.arrays.items()
    }
    return changed(sound, made)


def test_a_model_that_passes_the_probe_may_be_refused_on_ones_own_samples():
    model = open_model(logistic(1e37), (D,), CLASSES)
    with pytest.raises(MessageError, match="NaN or infinity in its predictions"):
        ReceivedModel(model, far(0)[0], CLASSES)


# Of every way to be refused one or two: bytes, kinds, each opener, and one's own samples.
ATTACKS = [
    "bytes: a pickle",
    "bytes: 10 GB announced",
    "no model at all",
    "torch: name = backdoor",
    'torch: options = {"hidden": [50000, 50000]}',
    "torch: NaN",
    "skops: a pickle",
    "skops: unlisted estimator inside",
    "skops: tree with ('left_child', 0, 1000000)",
    "kernel: kernel = wavelet",
    "onnx: custom domain",
    "onnx: wants 2500000000 elements",
]


@dataclass(frozen=True, kw_only=True)
class Hijacked(cd.AvgKD):
    """AvgKD, except for what mallory sends in each round."""

    sent: tuple[Message | None, ...] = ()

    async def round(self, me, t):
        if me.name != "mallory":
            return await super().round(me, t)
        if self.sent[t] is not None:
            await me.exchange(self.sent[t])
        return None


def federation(sent, folder=None):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(D, 6), torch.nn.Tanh(), torch.nn.Linear(6, CLASSES))
    models = {
        "ann": RandomForestClassifier(4),
        "ben": TorchLearner(zoo.build("mlp", (D,), CLASSES, hidden=[6]), epochs=1),
        "mallory": Ridge(),
        "cleo": TorchLearner(module, epochs=1),  # travels as ONNX
    }
    agents = [cd.Agent(name, model, *far(number)) for number, (name, model) in enumerate(models.items())]
    run = cd.Federation(agents, Hijacked(sent=tuple(sent)), test=far(9)).run(
        len(sent), runtime="simulation", alone=False, progress=False, folder=folder
    )
    targets = {agent.name: agent.state["targets"] for agent in agents if agent.name != "mallory"}
    return targets, {name: run.agents[name].predict(far(9)[0]) for name in targets}


def raw(made: Message | bytes) -> Message:
    """A message to send; bytes travel as they are."""
    if isinstance(made, Message):
        return made
    sent = Message({"any": np.zeros(1)})
    sent.__dict__["encoded"] = made
    return sent


def test_hostile_models_are_refused_by_name_and_the_others_go_on(tmp_path, monkeypatch):
    """The honest agents end with the very bits they would have if mallory had sent nothing."""
    monkeypatch.chdir(tmp_path)
    made = [raw(HOSTILE[name].make()) for name in ATTACKS] + [logistic(1e37)]
    targets, answers = federation(made, tmp_path / "run")
    assert not (tmp_path / TRAP).exists()
    log = (tmp_path / "run" / "log.txt").read_text().splitlines()
    for number, said in enumerate([*(HOSTILE[name].said for name in ATTACKS), "NaN or infinity in its pred"], 1):
        for receiver in targets:
            lines = [line for line in log if f"round {number}: '{receiver}' continues without" in line]
            assert len(lines) == 1, (number, receiver)
            assert re.search(rf"a message of 'mallory'.*(?:{said})", lines[0])
    alike, answered = federation([None] * len(made))
    for agent in targets:
        assert np.array_equal(targets[agent], alike[agent])
        assert np.array_equal(answers[agent], answered[agent])
    for number, name in [(0, "ann"), (1, "ben"), (3, "cleo")]:  # they learn from one another
        assert np.abs(targets[name] - np.eye(CLASSES)[far(number)[1]]).max() > 0.1


@pytest.mark.parametrize(
    "model",
    [lambda: message("registered mlp"), lambda: logistic(1e-3), lambda: to_message(linear(1e-3, softmax=True))],
    ids=["mlp", "logistic", "onnx"],
)
def test_a_sound_model_of_the_same_sender_is_used(model):
    """So that what is refused above is refused for what was done to it."""
    targets, _ = federation([model()])
    without, _ = federation([None])
    assert all(not np.array_equal(targets[name], without[name]) for name in without)


def test_predictions_below_zero_do_not_end_the_run():
    """A classifier learns probabilities: of real values it takes what is positive."""
    targets, _ = federation([to_message(linear(-1.0))])
    assert all((wanted >= 0).all() for wanted in targets.values())
