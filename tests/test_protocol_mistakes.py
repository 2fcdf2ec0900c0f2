"""Mistakes in the code of a protocol: the error names the line of its own file, and what was expected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import codistill as cd
from codistill.core.errors import ProtocolError
from codistill.experiments.user_code import run_file

HEAD = """\
from dataclasses import dataclass

import numpy as np

import codistill as cd


@dataclass(frozen=True, kw_only=True)
class Own(cd.Protocol):
"""
FIRST = HEAD.count("\n") + 1  # the line of the class's first method


class Silent:
    """A model that learns nothing."""

    def fit(self, x: np.ndarray, y: np.ndarray) -> None:
        self.classes = y.shape[1]

    def predict(self, x: np.ndarray) -> np.ndarray:
        return np.full((len(x), self.classes), 1 / self.classes)


def run(body: str, folder: Path, **options: Any) -> cd.Result:
    """Run a protocol whose class has this body, from a file of its own."""
    file = folder / "own.py"
    file.write_text(HEAD + "\n".join(f"    {line}" for line in body.splitlines()) + "\n", "utf-8")
    protocol = run_file(file, "own").Own()
    agents = [cd.Agent(name, Silent(), np.zeros((4, 2)), np.array([0, 1, 0, 1])) for name in ("a", "b")]
    federation = cd.Federation(agents, protocol, **options)
    return federation.run(1, runtime="simulation", alone=False, progress=False)


def of_agent(line: str) -> str:
    return f"async def round(self, me, t):\n    {line}"


def of_hub(line: str) -> str:
    return f"async def hub(self, me, t):\n    {line}\nasync def round(self, me, t):\n    await me.ask_hub(n=1)"


CALLS = {
    of_agent("await me.ask_hub(np.zeros(3))"): "me.ask_hub takes items by name: arrays, or numbers, strings and lists",
    of_agent("await me.ask_hub(m=me.learner)"): "'m' in a message must be an array of numbers, a finite number",
    of_agent("await me.ask_hub(m=np.array(['a']))"): "Found: dtype <U1 (ndarray)",
    of_agent("await me.ask_hub(m=float('nan'))"): "Found: nan (float)",
    of_agent("await me.ask_hub(m=1, expect=['m'])"): "expect must be a table.",
    of_agent("await me.ask_hub(m=1, expect={'m': 5})"): "expect['m'] must be a shape as a tuple, an array, or a type.",
    of_agent("await me.send('hbu', m=1)"): "A receiver must be the name of an agent, or 'hub'.",
    of_agent("await me.send('b', m=1)"): "A message may only go along a link of the topology.",
    of_agent("await me.send('hub', cd.Message.of(m=1), n=2)"): "me.send takes a message or items by name, not both.",
    of_agent("await me.exchange(3)"): "me.exchange takes items by name",
    of_agent("await me.receive()"): "me.receive is called as me.receive(sender, *, expect=None).",
    of_agent("await me.receive('c')"): "A sender must be the name of an agent, or 'hub'.",
    of_agent("me.send('hub', m=1)"): "me.send must be awaited, where it is called. Found: a call without 'await'",
    of_agent("me.ask_hub(m=1)['m']"): "me.ask_hub must be awaited, where it is called. Found: its result used",
    of_agent("me.measure('c', loss=1)"): "me.measure takes names of agents.",
    of_agent("me.measure()"): "me.measure is called as me.measure(agents, **values).",
    of_agent(
        "me.mix(1)"
    ): "me.mix is called as me.mix(own, heard). Found: missing 1 required positional argument: 'heard'",
    of_agent("me.remark(text=1, to='hub')"): "me.remark is called as me.remark(text).",
    of_agent("me.measure(me.name, loss='low')"): "'loss' must be one number for each agent.",
    of_agent("me.measure(me.name, round=1)"): "A figure must not have the name of a column that every run has.",
    of_agent("me.remark(3)"): "me.remark takes a text.",
    of_agent("me.mix(np.zeros(2), {'b': np.zeros(2)})"): "me.mix takes an array of each neighbour, by its name.",
    of_hub("await me.scatter([1, 2])"): "me.scatter takes a table: for each agent a table of items.",
    of_hub("await me.scatter({'a': np.zeros(3)})"): "What is scattered to 'a' must be a table of items.",
    of_hub("await me.scatter({'c': {'m': 1}})"): "A receiver must be the name of an agent, or 'hub'.",
    of_hub("await me.gather({'m': int})"): "me.gather is called as me.gather(*, expect=None).",
    of_hub("await me.gather(expect={'m': np.ndarray})"): "Found: the type ndarray",
    of_hub("await me.gather(expect=lambda name: 3)"): "expect must be a table.",
    of_hub("me.broadcast(m=1)"): "me.broadcast must be awaited",
    of_hub("me.measure(me.present, loss=[1])"): "Found: 1 numbers for 2 agents",
}


@pytest.mark.parametrize("body", CALLS, ids=lambda body: body.splitlines()[1].strip())
def test_a_wrong_call_of_a_verb_names_its_line(body: str, tmp_path: Path) -> None:
    with pytest.raises(ProtocolError) as caught:
        run(body, tmp_path)
    assert CALLS[body] in str(caught.value)
    assert f"own.py:{FIRST + 1}" in str(caught.value)
    assert "round 1" in caught.value.__notes__[0]


def test_a_call_that_was_forgotten_is_found_before_others_wait_for_it(tmp_path: Path) -> None:
    both = "async def round(self, me, t):\n    me.send('hub', n=1)\n    await me.receive('hub')\n"
    with pytest.raises(ProtocolError, match=f"me.send must be awaited.*own.py:{FIRST + 1}"):
        run(both + "async def hub(self, me, t):\n    await me.gather()\n    await me.broadcast(n=1)", tmp_path)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (of_agent("1 / 0"), "in round: 1 / 0"),
        (of_agent("me.gather()"), "An agent has no 'gather', only the hub has"),
        (of_hub("me.shard.x"), "The hub has no 'shard': it has no data and no model"),
        (of_agent("await me.ask_hb(n=1)"), "Did you mean 'ask_hub'?"),
        (of_agent("await __import__('asyncio').sleep(0)"), "A protocol may only await the verbs of 'me'."),
    ],
)
def test_any_other_error_names_the_line_in_a_note(body: str, words: str, tmp_path: Path) -> None:
    with pytest.raises((ArithmeticError, AttributeError, ProtocolError)) as caught:
        run(body, tmp_path)
    told = [str(caught.value), *caught.value.__notes__]
    assert words in "\n".join(told)
    assert any(f"own.py:{FIRST + 1}, in " in note for note in told[1:])


NOTHING = "async def round(self, me, t):\n    pass\n"
HOOKS = {
    "async def round(self, me):\n    pass": "def round(self, me, t). Found: async def round(self, me), at",
    "def round(self, me, t):\n    pass": "must be: async def round(self, me, t). Found: def round(self, me, t), at",
    "async def round(self, me, t):\n    yield 1": "a 'yield' in it",
    "async def rounds(self, me, t):\n    pass": "Own needs a method 'round'. Found: no 'round', but",
    "async def serve(self, me, sender, message):\n    pass\n" + NOTHING: "serve of Own must be: def serve(self, me, ",
    "def predict(self, x):\n    pass\n" + NOTHING: "predict of Own must be: def predict(self, me, x).",
    "def serve(self, me, sender, message):\n    return 5\n" + of_agent("await me.ask_hub(n=1)"): "serve must return a",
    of_agent("return 5"): "round must return nothing. Found: 5 (int), from",
    "async def begin(self, me):\n    await me.ask_hub(n=1)\n" + NOTHING: "The hub takes part from the first round on.",
    "topology = 'rnig'\n" + NOTHING: "Did you mean 'ring'?",
    "needs = 'gradients'\n" + NOTHING: "Own.needs must be an ability.",
}


@pytest.mark.parametrize("body", HOOKS, ids=lambda body: body.splitlines()[0])
def test_a_hook_that_cannot_be_called_is_refused(body: str, tmp_path: Path) -> None:
    with pytest.raises(ProtocolError) as caught:
        run(body, tmp_path)
    assert HOOKS[body] in str(caught.value)
    if "rnig" not in body and "needs" not in body:
        assert "own.py" in str(caught.value)


def test_settings_without_the_decorator_are_refused() -> None:
    class Plain(cd.Protocol):
        rate: float = cd.setting(1.0, "a rate")

        async def round(self, me: cd.Agent, t: int) -> None: ...

    with pytest.raises(ProtocolError, match="Plain must be a frozen dataclass.*test_protocol_mistakes.py"):
        Plain()


def test_a_protocol_without_a_name_is_called_as_its_class(tmp_path: Path) -> None:
    assert str(run(NOTHING, tmp_path)).startswith("own: ")


def test_the_hub_scatters_tables_and_agents_send_them(tmp_path: Path) -> None:
    body = """\
async def hub(self, me, t):
    heard = await me.gather(expect={"n": int, "z": (2,)})
    await me.scatter({name: {"sum": message["z"] * message["n"]} for name, message in heard.items()})

async def round(self, me, t):
    reply = await me.ask_hub({"n": 3, "z": np.arange(2.0)}, expect={"sum": (2,)})
    me.measure(me.name, total=reply["sum"].sum())"""
    assert [row["total"] for row in run(body, tmp_path).rows] == [3.0, 3.0]
