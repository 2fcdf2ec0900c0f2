"""Draws docs/protocols/rounds/*.svg: who sends what to whom in one round of each protocol.

A picture is a description in ROUNDS: lanes, and steps from top to bottom. A step is what a lane does, a message from
one lane to another, or steps that are repeated. The same description gives the text for those who do not see the
picture. The colours follow the scheme of the page, light or dark.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from textwrap import wrap

FOLDER = Path(__file__).parent / "protocols" / "rounds"
WIDTH, FONT, LINE, GAP = 420, 13, 16, 10
LETTER = 6.7  # width of a letter on average, generously
STYLE = """\
svg { --ink: #1f2430; --soft: #5b6472; --line: #3f51b5; --fill: #eef0fb; --page: #ffffff; }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e6e8f0; --soft: #a7afbf; --line: #9fa8da; --fill: #2c3148; --page: #1e2129; }
}
.page { fill: var(--page); stroke: var(--soft); stroke-opacity: .35; }
.lane { stroke: var(--soft); stroke-dasharray: 2 4; }
.box { fill: var(--fill); stroke: var(--line); }
.act { fill: var(--page); stroke: var(--soft); }
.loop { fill: none; stroke: var(--soft); stroke-dasharray: 6 4; }
.send { stroke: var(--line); stroke-width: 1.8; }
.head { fill: var(--line); }
text { fill: var(--ink); font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
.name { font-weight: 600; }
.note { fill: var(--soft); font-style: italic; }
.on { stroke: var(--page); stroke-width: 5px; paint-order: stroke; }
.low { font-size: 9px; }"""


@dataclass(frozen=True)
class Do:
    """What a lane does by itself."""

    lane: int
    text: str


@dataclass(frozen=True)
class Send:
    """A message from one lane to another."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Repeat:
    """Steps that are taken several times in a round, and when."""

    when: str
    steps: tuple[Do | Send, ...]


@dataclass(frozen=True)
class Round:
    """A picture of one round: the names of the lanes, and the steps."""

    lanes: tuple[str, ...]
    steps: tuple[Do | Send | Repeat, ...]


HUB = ("every agent n", "hub")
PAIR = ("every agent n", "each other agent j")
TRAIN = Do(0, "trains on its own samples")
_WEIGHTS = (Send(0, 1, "weights w_k and n_k"), Do(1, "mean w̄, weighted by n_k"), Send(1, 0, "w̄"))
_AGENT_K = ("every agent k", "hub")
_FEDAVG = (*_WEIGHTS, Do(0, "loads w̄"))
_MODELS = (
    Do(0, "fits its model g_n to its current labels"),
    Send(0, 1, "model g_n"),
    Send(1, 0, "model g_j"),
)  # fmt: skip

_TRANSFER = Repeat(
    "for each public batch P",
    (
        Send(0, 1, "outputs f_n(P)"),
        Do(1, "mean f̄(P) of all agents"),
        Send(1, 0, "f̄(P)"),
        Do(0, "removes itself, steps towards the others' mean f_{-n}(P)"),
    ),
)

ROUNDS: dict[str, Round] = {
    "alone": Round(("every agent n",), (TRAIN, Do(0, "sends nothing"))),
    "centralised": Round(
        ("every agent n", "one process"),
        (Send(0, 1, "all samples, before round 1"), Do(1, "trains every agent's model on all samples")),
    ),
    "silo_sgd": Round(("every agent n",), (Do(0, "takes gradient steps on its own samples"), Do(0, "sends nothing"))),
    "fedmd": Round(HUB, (TRAIN, _TRANSFER)),
    "fedal": Round(
        HUB,
        (
            Do(0, "τ local steps, close to what it was"),
            Repeat(
                "τ times, on a public batch P",
                (
                    Send(0, 1, "outputs f_n(P)"),
                    Do(1, "the discriminator takes a step; mean f̄(P)"),
                    Send(1, 0, "f̄(P), gradient ∇U_n"),
                    Do(0, "steps towards the others' mean, and against the discriminator"),
                ),
            ),
        ),
    ),
    "feddf": Round(
        HUB,
        (
            TRAIN,
            Send(0, 1, "weights w_n, n_n samples"),
            Do(1, "mean of the weights, per architecture"),
            Send(1, 0, "mean of its architecture"),
            _TRANSFER,
        ),
    ),
    "fd": Round(
        HUB,
        (
            Do(0, "trains towards labels and the targets F̂_{-n}"),
            Send(0, 1, "mean outputs F_{n,c} per class"),
            Do(1, "for each agent, the mean of all others"),
            Send(1, 0, "new targets F̂_{-n,c}"),
        ),
    ),
    "fedproto": Round(
        HUB,
        (
            Do(0, "trains towards labels and prototypes C̄"),
            Send(0, 1, "mean features C_{n,c} per class"),
            Do(1, "mean over the agents with class c"),
            Send(1, 0, "prototypes C̄_c"),
        ),
    ),
    "crs": Round(
        ("every agent u", "relay"),
        (
            Send(1, 0, "mean t̄, observations t_m"),
            Do(0, "trains: labels, distance to t̄, contrast with t_m"),
            Send(0, 1, "its means and observations"),
            Do(1, "keeps the last upload of each agent; trains nothing"),
        ),
    ),
    "fedavg": Round(_AGENT_K, (Do(0, "trains the common model on its own samples"), *_FEDAVG)),
    "fedprox": Round(_AGENT_K, (Do(0, "trains near the common weights"), *_FEDAVG)),
    "fedmax": Round(_AGENT_K, (Do(0, "trains, with activations near uniform"), *_FEDAVG)),
    "fedbn": Round(
        _AGENT_K,
        (
            Do(0, "trains its own model"),
            Send(0, 1, "w_k without batch norm"),
            Do(1, "mean w̄, weighted by n_k"),
            Send(1, 0, "w̄ without batch norm"),
            Do(0, "loads w̄, keeps its own batch norm"),
        ),
    ),
    "feddkd": Round(
        _AGENT_K,
        (
            Do(0, "trains the common model: w_k"),
            *_WEIGHTS,
            Repeat(
                "J times",
                (
                    Send(0, 1, "gradient ∇d_k at w̄"),
                    Do(1, "step down the mean gradient"),
                    Send(1, 0, "new w̄"),
                ),
            ),
            Do(0, "loads w̄"),
        ),
    ),
    "feddistill": Round(
        _AGENT_K,
        (
            Do(0, "trains towards labels and outputs F̂_c"),
            Send(0, 1, "weights, mean outputs F_{k,c}"),
            Do(1, "means of weights and of outputs"),
            Send(1, 0, "w̄ and F̂_c"),
        ),
    ),
    "fedgen": Round(
        _AGENT_K,
        (
            Do(0, "trains on its samples and generated features"),
            Send(0, 1, "weights, which classes it has"),
            Do(1, "mean of weights; trains the generator G"),
            Send(1, 0, "w̄ and the generator G"),
        ),
    ),
    "akd": Round(
        ("agent before", "agent i", "agent after"),
        (
            Send(0, 1, "its model"),
            Do(1, "predicts labels for its own samples"),
            Do(1, "fits its model to them"),
            Send(1, 2, "its model"),
        ),
    ),
    "avgkd": Round(PAIR, (*_MODELS, Do(0, "labels: mean of its true labels and the predictions of all g_j"))),
    "pkd": Round(PAIR, (*_MODELS, Do(0, "labels: mean of its current labels and the predictions of all g_j"))),
    "ekd": Round(
        PAIR,
        (
            *_MODELS,
            Do(0, "keeps all models, for the sum"),
            Do(0, "labels: predictions of the model before it on the ring"),
        ),
    ),
    "backfitting": Round(
        ("agent i, in turn", "all others"),
        (
            Do(0, "fits its model f_i to what the others' models leave unexplained"),
            Send(0, 1, "model f_i"),
            Do(1, "keep the newest f_i"),
        ),
    ),
    "d_distillation": Round(
        ("every agent n", "each neighbour m"),
        (
            Repeat(
                "at every τ-th iteration, on a public batch",
                (
                    Send(0, 1, "soft-decisions z^n"),
                    Send(1, 0, "soft-decisions z^m"),
                    Do(0, "gradient step: own labels, and towards z"),
                    Do(0, "mixes z by W, moves it towards its own outputs"),
                ),
            ),
        ),
    ),
    "d_sgd": Round(
        ("every agent n", "each neighbour m"),
        (
            Repeat(
                "after every τ-th gradient step",
                (
                    Send(0, 1, "weights θ^n"),
                    Send(1, 0, "weights θ^m"),
                    Do(0, "mixes the weights by W"),
                ),
            ),
        ),
    ),
}  # fmt: skip


def drawn(name: str) -> str:
    """The picture of a protocol as SVG."""
    picture = ROUNDS[name]
    width = WIDTH // len(picture.lanes)
    middles = [width * lane + width // 2 for lane in range(len(picture.lanes))]
    parts, y = [], 54
    for step in picture.steps:
        drawing, y = _step(step, middles, y)
        parts += drawing
    height = y + 6
    back = [f'<rect class="page" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>']
    for x, lane in zip(middles, picture.lanes, strict=True):
        half = min(width - 10, len(lane) * LETTER * 1.1 + 24) / 2
        back += [
            f'<line class="lane" x1="{x}" y1="42" x2="{x}" y2="{height - 8}"/>',
            f'<rect class="box" x="{x - half:g}" y="12" width="{2 * half:g}" height="30" rx="6"/>',
            _text(lane, x, 31, "name"),
        ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'role="img" aria-label="{escape(described(name))}">'
    )
    return "\n".join([head, f"<style>\n{STYLE}\n</style>", *back, *parts, "</svg>", ""])


def _step(step: Do | Send | Repeat, middles: Sequence[int], y: int) -> tuple[list[str], int]:
    """The drawing of a step that begins at height y, and the height at which the next one begins."""
    if isinstance(step, Repeat):
        parts, end = [_text(step.when, 18, y + 16, "note on", anchor="start")], y + 24
        for each in step.steps:
            drawing, end = _step(each, middles, end)
            parts += drawing
        frame = f'<rect class="loop" x="8" y="{y}" width="{WIDTH - 16}" height="{end - y}" rx="8"/>'
        return [frame, *parts], end + GAP
    if isinstance(step, Do):
        room = min(WIDTH // len(middles), 240) - 22
        lines = wrap(step.text, int((room - 8) / LETTER))
        half, height = room / 2, LINE * len(lines) + 12
        x = middles[step.lane]
        box = f'<rect class="act" x="{x - half:g}" y="{y}" width="{room:g}" height="{height}" rx="6"/>'
        return [box, *_lines(lines, x, y + 6)], y + height + GAP
    start, end = middles[step.start], middles[step.end]
    x, away = (start + end) / 2, 1 if end > start else -1
    lines = wrap(step.text, int((abs(end - start) - 16) / LETTER))
    y += LINE * len(lines) + 4
    arrow = [
        f'<line class="send" x1="{start + 2 * away}" y1="{y}" x2="{end - 8 * away}" y2="{y}"/>',
        f'<path class="head" d="M{end - 1 * away} {y}l{-10 * away} -5v10z"/>',
    ]
    return [*arrow, *_lines(lines, x, y - LINE * len(lines) - 5, "on")], y + GAP + 4


def _lines(lines: Sequence[str], x: float, y: float, kind: str = "") -> list[str]:
    return [_text(line, x, y + LINE * (index + 1) - 4, kind) for index, line in enumerate(lines)]


def _text(text: str, x: float, y: float, kind: str = "", anchor: str = "middle") -> str:
    marked = re.sub(r"([_^])(?:\{([^}]*)\}|(\w))", _shifted, escape(text))
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{marked}</text>'


def _shifted(match: re.Match[str]) -> str:
    away = 3 if match[1] == "_" else -5
    return f'<tspan class="low" dy="{away}">{match[2] or match[3]}</tspan><tspan dy="{-away}">&#8203;</tspan>'


def described(name: str) -> str:
    """The picture of a protocol in words."""

    def words(step: Do | Send | Repeat, lanes: tuple[str, ...]) -> str:
        if isinstance(step, Repeat):
            return f"{step.when}: " + "; ".join(words(each, lanes) for each in step.steps)
        if isinstance(step, Do):
            return f"{lanes[step.lane]}: {step.text}"
        return f"{lanes[step.start]} to {lanes[step.end]}: {step.text}"

    picture = ROUNDS[name]
    said = ". ".join(words(step, picture.lanes) for step in picture.steps)
    return f"One round of {name}. " + re.sub(r"_\{([^}]*)\}", r"_\1", said) + "."


def main() -> None:
    """Draw all pictures."""
    FOLDER.mkdir(exist_ok=True)
    for name in ROUNDS:
        (FOLDER / f"{name}.svg").write_text(drawn(name), "utf-8")


if __name__ == "__main__":
    main()
