"""Search: settings of a recipe, chosen by the validation samples that every agent holds out of its own.

Trials are drawn by a seeded sampler, one after the other, and each is a run in a folder of its own. So a search needs
no storage but its runs: the same command draws the same trials, takes the scores of those that are done, and goes on
with the one that was interrupted from its last checkpoint. Test samples are dropped as the data are read.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from codistill.core.errors import LearnerError, RecipeError
from codistill.core.files import lock, writing
from codistill.core.settings import check_settings, from_table, kinds_of, setting
from codistill.core.spec import RunSpec
from codistill.data.validation import Dataset
from codistill.engine.safeguard import Safeguard
from codistill.experiments.building import load_data, topology_of
from codistill.experiments.recipe import PLACES, Data, Recipe, make_recipe, put, read_tables
from codistill.experiments.sweep import Axis, as_axis
from codistill.experiments.sweep_jobs import outcome_of
from codistill.experiments.user_code import is_own, load_own, protocol_class
from codistill.learners import zoo
from codistill.learners.catalogue import ALIASES, Training, make_learner
from codistill.results.agents import metric_name, score_text
from codistill.results.records import Row
from codistill.results.scores import ACCURACY, RMSE, VALIDATION, Score, as_score
from codistill.topology.graphs import KINDS as GRAPHS
from codistill.wire.compression import Compression

if TYPE_CHECKING:
    import optuna

_SHARE = 0.2  # of its own samples that each agent holds out, where the recipe does not say it
_REPEATS = 100  # draws in a row of settings that were tried before, after which a search ends
_DIGITS = 4  # of a number that is drawn: the recipe of what was found can be read
# What decides on which samples a trial is measured, or where it is computed, is the same in all trials; but for these.
_FIXED = ("seed", "data", "partition", "faults", "evaluation", "runtime", "network", "ray", "clock")
_SEARCHED = ("data.scale", "data.scale_per_agent", "runtime.participation")
_OF_AGENTS = ("learner", "choices")  # of an [[agents]] table


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """[search]: how many trials, and what they are judged by; all other keys are fields of the recipe."""

    trials: int = setting(20, "trials of different settings, beside the recipe's own", at_least=1, at_most=10_000)
    seeds: int = setting(1, "runs of each trial, by the recipe's seed and those after it", at_least=1, at_most=1000)
    minutes: float | None = setting(
        None, "minutes of runs after which no trial begins; the same command goes on; unset: no limit", above=0
    )
    score: str | None = setting(None, "score by which trials are judged; unset: the first one of the recipe")
    of: str = setting(
        "mean", "its mean over the agents, or that of the worst agent; averaged over seeds", choices=("mean", "worst")
    )

    def __post_init__(self) -> None:
        check_settings(self, "search")


@dataclass(frozen=True, kw_only=True)
class Range:
    """A range of a searched field: "protocol.temperature" = { low = 1, high = 20, log = true }."""

    low: int | float = setting(help="the smallest value")
    high: int | float = setting(help="the largest value")
    log: bool = setting(False, "draw on a logarithmic scale")

    def check(self, key: str) -> None:
        check_settings(self, f"search.{key}")
        if not self.low < self.high or (self.log and self.low <= 0):
            raise RecipeError(
                f"search.{key} must have low below high{', and low above 0 with log' if self.log else ''}.",
                f"low = {self.low}, high = {self.high}",
                "Change them; or give a list of values.",
            )


@dataclass(frozen=True)
class Searched:
    """A field of the recipe, and the values that it may take: a range, or a list."""

    key: str
    name: str  # in tables: its last part, where that is clear
    range: Range | None = None
    whole: bool = False  # whether the values of the range are integers
    choices: Axis | None = None

    def draw(self, trial: optuna.Trial) -> Any:
        if self.choices is not None:
            return self.choices.values[trial.suggest_categorical(self.key, list(self.choices.values))]
        assert self.range is not None
        low, high, log = self.range.low, self.range.high, self.range.log
        if self.whole:
            return trial.suggest_int(self.key, int(low), int(high), log=log)
        drawn = float(f"{trial.suggest_float(self.key, low, high, log=log):.{_DIGITS}g}")
        return min(max(drawn, float(low)), float(high))

    @property
    def extremes(self) -> list[Any]:
        """Values which, if they are valid, show that all are."""
        if self.choices is not None:
            return list(self.choices.values.values())
        assert self.range is not None
        return [self.range.low, self.range.high]

    def text(self, value: Any) -> str:
        if self.choices is None:
            return f"{value:.{_DIGITS}g}" if isinstance(value, float) else str(value)
        return next((label for label, each in self.choices.values.items() if each == value), str(value))


@dataclass(frozen=True)
class Trial:
    """Some settings, and what they scored on validation samples."""

    number: int | None  # None: the recipe's own settings
    values: dict[str, Any]  # by field; empty for the recipe's own
    mean: float | None = None  # over the agents and the seeds
    worst: float | None = None  # that of the worst agent, over the seeds
    score: float | None = None  # the one of the two by which it is judged
    spread: float | None = None  # of that over the seeds
    why: str = ""  # it has no score

    @property
    def name(self) -> str:
        return "own" if self.number is None else f"trial-{self.number:04d}"


@dataclass(frozen=True)
class Search:
    """A recipe's tables, what is searched, and how trials are judged."""

    fields: tuple[Searched, ...]
    options: SearchOptions
    tables: dict[str, Any]
    folder: Path  # of the recipe: paths in it are relative to this
    score: Score | None  # None: as the task has it, which the data say
    share: float  # of its samples that each agent holds out

    def recipe(self, values: Mapping[str, Any]) -> Recipe:
        """The recipe with these values in the place of its own."""
        return make_recipe(self._changed(values), self.folder)

    def trial_recipe(self, values: Mapping[str, Any], seed: int = 0) -> Recipe:
        """The same without test samples, measured after the last round on validation samples alone."""
        tables = self._changed(values)
        evaluation = {key: item for key, item in tables.get("evaluation", {}).items() if key != "features_at"}
        if self.score is not None:
            others = [name for name in evaluation.get("scores", []) if as_score(name).name != self.score.name]
            evaluation["scores"] = [self.score.name, *others]
        rounds = tables["protocol"].get("rounds", RunSpec.rounds)
        measured = {"validation": self.share, "test": False, "alone": False, "every": rounds}
        tables["evaluation"] = {**evaluation, **measured}
        tables["seed"] = tables.get("seed", 0) + seed
        return make_recipe(tables, self.folder)

    def _changed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        tables = copy.deepcopy(self.tables)
        for key, value in values.items():
            put(tables, key, copy.deepcopy(value))
        return tables

    def own_value(self, key: str) -> Any:
        """What the recipe itself has for a field; None: the default."""
        place: Any = self.tables
        for step in key.split("."):
            if isinstance(place, list):
                place = place[int(step)]
            else:
                place = place.get(step) if isinstance(place, dict) else None
        return place

    @property
    def judged_by(self) -> Score:
        assert self.score is not None
        return self.score

    @property
    def measured(self) -> str:
        """What trials are judged by, in words."""
        who = "of the worst agent" if self.options.of == "worst" else "on average over the agents"
        return f"validation {metric_name(self.judged_by.name)} {who}"

    def words(self, trial: Trial) -> str:
        """The settings of a trial."""
        return ", ".join(f"{each.name}={each.text(trial.values[each.key])}" for each in self.fields)

    def result(self, trial: Trial) -> str:
        """What a trial scored."""
        if trial.score is None:
            return trial.why
        spread = "" if trial.spread is None else f" ± {score_text(self.judged_by.name, trial.spread)}"
        return f"{score_text(self.judged_by.name, trial.score)}{spread}"


@dataclass(frozen=True)
class Found:
    """What a search has found so far."""

    search: Search
    own: Trial  # the recipe's own settings
    trials: list[Trial]

    def ranked(self) -> list[Trial]:
        """The trials that have a score, the best first; of equal ones the first."""
        scored = [each for each in self.trials if each.score is not None]
        sign = -1.0 if self.search.judged_by.greater_is_better else 1.0
        return sorted(scored, key=lambda each: sign * (each.score or 0.0))

    @property
    def gain(self) -> float | None:
        """Of the best trial over the recipe's own settings: positive is better."""
        best = self.ranked()[:1]
        return self.search.judged_by.gain(self.own.score, best[0].score) if best else None

    @property
    def winner(self) -> Trial:
        """The best trial, or the recipe's own settings if no trial is better."""
        return self.ranked()[0] if (self.gain or 0.0) > 0 else self.own


# --- Reading a recipe with a table [search]: every field, and both ends of every range, checked before anything runs.


def read_search(path: Path, overrides: list[str] | tuple[str, ...] = ()) -> Search:
    tables = read_tables(path, overrides)
    table = tables.pop("search", None)
    if not isinstance(table, dict) or not table:
        raise RecipeError(
            "A search needs a table [search] of fields and their ranges.",
            f"none in {path}",
            'Write for example [search] and below it "protocol.temperature" = { low = 1, high = 20, log = true }.',
        )
    options: SearchOptions = from_table(
        SearchOptions, {key: item for key, item in table.items() if not isinstance(item, dict | list)}, "search"
    )
    given = dict(_leaves({key: item for key, item in table.items() if isinstance(item, dict | list)}))
    if not given:
        raise RecipeError(
            "[search] must name a field of the recipe.", "options only", 'Add for example "agents.0.learner.lr" = ...'
        )
    tables = _with_learner_tables(tables, given)
    folder, own = path.resolve().parent, make_recipe(tables, path.resolve().parent)
    if own.spec.runtime == "ray":
        raise RecipeError(
            "Each run of a search is computed on one machine.", "runtime.kind = 'ray'", "Use the runtime 'processes'."
        )
    names = [options.score] if options.score is not None else list(own.scores)
    score, share = as_score(names[0]) if names else None, own.validation or _SHARE
    search = Search((), options, tables, folder, score, share)
    topology_of(search.trial_recipe({}))
    searched = [_searched(search, key, item, list(given)) for key, item in given.items()]
    return Search(tuple(searched), options, tables, folder, score, share)


def _leaves(table: Mapping[str, Any], head: str = "") -> Iterator[tuple[str, Any]]:
    """Ranges and lists by their fields. TOML reads protocol.lr without quotes as a table in a table."""
    for key, item in table.items():
        if isinstance(item, dict) and not {"low", "high"} & item.keys():
            yield from _leaves(item, f"{head}{key}.")
        else:
            yield f"{head}{key}", item


def _with_learner_tables(tables: dict[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """A learner that is a name becomes a table with this kind, if options of it are searched."""
    made = copy.deepcopy(tables)
    for place, entry in enumerate(made["agents"] if isinstance(made.get("agents"), list) else []):
        searched = any(key.startswith(f"agents.{place}.learner.") for key in keys)
        if searched and isinstance(entry, dict) and isinstance(entry.get("learner"), str):
            entry["learner"] = {"kind": entry["learner"]}
    return made


def _searched(search: Search, key: str, given: Any, keys: list[str]) -> Searched:
    head, _, rest = key.partition(".")
    of_agent = head == "agents" and rest.partition(".")[2].partition(".")[0] not in _OF_AGENTS
    if (head in _FIXED and key not in _SEARCHED) or of_agent or key == "protocol.name":
        raise RecipeError(
            "A search must not change which samples its trials are measured on, the protocol, or where they run.",
            f"search.{key}",
            "Search settings of [protocol] or of learners; compare protocols and data by 'codistill sweep'.",
        )
    if wider := next((other for other in keys if key.startswith(f"{other}.")), None):
        raise RecipeError("A search must change each field once.", f"'{wider}' beside '{key}'", "Remove one of them.")
    lasts = [other.rpartition(".")[2] for other in keys]
    name = key.rpartition(".")[2] if lasts.count(key.rpartition(".")[2]) == 1 else key
    if isinstance(given, dict):
        within: Range = from_table(Range, given, f"search.{key}")
        within.check(key)
        made = Searched(key, name, within, _is_whole(search, key, within))
    elif isinstance(given, list):
        made = Searched(key, name, choices=as_axis(key, given, table="search"))
    else:
        raise RecipeError(
            f"search.{key} must be a range or a list.", f"{given!r}"[:80], "Write { low = 1, high = 20 }, or [1, 5]."
        )
    for value in made.extremes:
        search.trial_recipe({key: value})
    return made


def _is_whole(search: Search, key: str, within: Range) -> bool:
    """Whether values of a range are integers: those of a field that takes no other numbers."""
    both = isinstance(within.low, int) and isinstance(within.high, int)
    kinds = _kinds(search, key) or (int if both else float,)
    if float in kinds and int not in kinds:
        return False
    if int not in kinds and float not in kinds:
        raise RecipeError(
            f"search.{key} must be a list: the field takes no numbers.",
            f"low = {within.low}, high = {within.high}",
            f'Write "{key}" = [...], with the values to try.',
        )
    if float not in kinds and not both:
        raise RecipeError(
            f"search.{key} must have integers as low and high, as the field has.",
            f"low = {within.low}, high = {within.high}",
            "Write them without a decimal point.",
        )
    return both


def _kinds(search: Search, key: str) -> tuple[Any, ...]:
    """The types that a field takes; none where they are not known: then the ends of the range say it."""
    tables, (head, _, rest) = search.tables, key.partition(".")
    name = rest.rpartition(".")[2]
    if key in PLACES:
        return kinds_of(PLACES[key][0], PLACES[key][1].name)
    classes: dict[str, Any] = {"compression": Compression, "safeguard": Safeguard, "data": Data}
    if head == "protocol":
        place = tables["protocol"]["name"]
        classes["protocol"] = protocol_class(str(search.folder / place) if is_own(place) else place)
    if head == "topology" and isinstance(tables.get("topology"), dict):
        classes["topology"] = GRAPHS.get(tables["topology"].get("kind"))
    if head == "agents":
        return _kinds_of_learner(search, key, name)
    cls = classes.get(head)
    return kinds_of(cls, name) if cls is not None and name in {each.name for each in fields(cls)} else ()


def _kinds_of_learner(search: Search, key: str, name: str) -> tuple[Any, ...]:
    place = key.split(".")[1]
    agents = search.tables["agents"]
    learner = agents[int(place)].get("learner") if place.isdigit() and int(place) < len(agents) else None
    kind = learner.get("kind") if isinstance(learner, dict) else None
    if key.split(".")[2:] != ["learner", name] or not isinstance(kind, str):
        return ()
    if kind in zoo.names():
        if name in {each.name for each in fields(Training)}:
            return kinds_of(Training, name)
        default: Any = zoo.defaults(kind).get(name)
    elif (path := ALIASES.get(kind, kind)).partition(".")[0] in ("sklearn", "xgboost", "lightgbm"):
        library, _, cls = path.rpartition(".")
        made = getattr(importlib.import_module(library), cls, None)
        parameter = None if made is None else inspect.signature(made).parameters.get(name)
        default = None if parameter is None else parameter.default
    else:
        return ()
    return (type(default),) if type(default) in (int, float, bool) else ()


# --- The trials.


def check_installed() -> None:
    if importlib.util.find_spec("optuna") is None:
        raise RecipeError(
            "A search needs the library optuna.", "it is not installed", "Install it: pip install 'codistill[search]'."
        )


def execute_search(
    search: Search, folder: Path, *, data_dir: str | None = None, tell: Callable[[str], None] = print
) -> Found | None:
    """Run what is not done yet; returns the recipe's own settings and the trials, or None if it was interrupted."""
    check_installed()
    import optuna

    data = load_data(search.trial_recipe({}), data_dir)
    if search.score is None:
        search = replace(search, score=ACCURACY if data.y.ndim == 1 else RMSE)
    _check_learners(search, data)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with writing(folder, "Wait for the search that uses it to end, or choose another --out."):
        handle = lock(folder)
    with closing(handle):
        spent, began = 0.0, time.monotonic()
        own = _run(search, Trial(None, {}), folder, data_dir)
        if own is None:
            return None
        if own.score is None:
            raise RecipeError("The recipe's own settings must be possible.", own.why, "Change the recipe.")
        tell(f"{search.measured}; the recipe's own settings: {search.result(own)}")
        greater = search.judged_by.greater_is_better
        sampler = optuna.samplers.TPESampler(seed=search.trial_recipe({}).seed)
        study = optuna.create_study(direction="maximize" if greater else "minimize", sampler=sampler)
        trials: list[Trial] = []
        repeats = 0
        while len(trials) < search.options.trials:
            spent += time.monotonic() - began
            if search.options.minutes is not None and spent >= 60 * search.options.minutes:
                tell(f"no trial begins after {search.options.minutes:g} minutes; the same command goes on")
                break
            began, drawn, number = time.monotonic(), study.ask(), len(trials) + 1
            values = {each.key: each.draw(drawn) for each in search.fields}
            same = next((trial for trial in trials if trial.values == values), None)
            trial = same or _run(search, Trial(number, values), folder, data_dir)
            if trial is None:
                return None
            if trial.score is None:
                study.tell(drawn, state=optuna.trial.TrialState.FAIL)
            else:
                study.tell(drawn, trial.score)
            if same is not None:  # settings that were tried before are no trial of their own
                repeats += 1
                if repeats == _REPEATS:
                    tell(f"no further trials: the last {_REPEATS} draws were settings that had been tried before")
                    break
                continue
            repeats = 0
            trials.append(trial)
            best = Found(search, own, trials).ranked()[:1]
            so_far = f" (best: {search.result(best[0])}, trial {best[0].number})" if best else ""
            tell(f"[{number}/{search.options.trials}] {search.words(trial)}: {search.result(trial)}{so_far}")
    return Found(search, own, trials)


def _run(search: Search, trial: Trial, folder: Path, data_dir: str | None) -> Trial | None:
    """The trial with its scores; None if it was interrupted."""
    means, worst = [], []
    for seed in range(search.options.seeds):
        recipe = search.trial_recipe(trial.values, seed)
        outcome = outcome_of(recipe, folder / trial.name / f"seed-{recipe.seed}", data_dir, report=False)
        if outcome is None:
            return None
        scores = outcome if isinstance(outcome, str) else _validation_scores(search, outcome)
        if isinstance(scores, str):
            return Trial(trial.number, trial.values, why=scores)
        means.append(fmean(scores))
        worst.append(min(scores) if search.judged_by.greater_is_better else max(scores))
    judged = worst if search.options.of == "worst" else means
    spread = stdev(judged) if len(judged) > 1 else None
    return Trial(trial.number, trial.values, fmean(means), fmean(worst), fmean(judged), spread)


def _validation_scores(search: Search, rows: list[Row]) -> list[float] | str:
    """The scores of the honest agents after the last round; or why there are none."""
    key, last = f"{VALIDATION}{search.judged_by.name}", max(row["round"] for row in rows)
    evaluated = [row for row in rows if row["round"] == last and "test_samples" in row and not row.get("lies")]
    lacking = [row["agent"] for row in evaluated if not math.isfinite(row.get(key, math.nan))]
    if lacking or not evaluated:
        return f"no score of {lacking[0]}" if lacking else "no agent was evaluated"
    return [row[key] for row in evaluated]


def _check_learners(search: Search, data: Dataset) -> None:
    """Before anything runs: learners must take the ends of the ranges, which only samples of their shape show."""
    for searched in (each for each in search.fields if each.key.startswith("agents.")):
        for value in searched.extremes:
            entry = search.trial_recipe({searched.key: value}).agents[int(searched.key.split(".")[1])]
            try:
                make_learner(entry.kind, entry.options, data.x.shape[1:], data.classes, load_own)
            except LearnerError as error:
                error.found = error.found or f"search.{searched.key} with {searched.text(value)}"
                raise
