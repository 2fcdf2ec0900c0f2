"""Tables of a recipe that stand nowhere else: [data], [[agents]] and [evaluation], each with its settings."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from codistill.data.columns import Columns
from codistill.data.label_mapping import check_label_mapping
from codistill.data.labels import TASKS
from codistill.devices import DEVICE_HELP, check_name
from codistill.errors import RecipeError
from codistill.experiments.user_code import is_own
from codistill.results.scores import as_score
from codistill.runtimes.plan import EVALUATE_AGENTS, FEATURES_AT
from codistill.settings import check_settings, setting

_OF_TABLES = (  # keys of [data]
    "label", "label_above", "label_map", "drop", "ids", "columns", "schema", "missing", "missing_values",
)  # fmt: skip
MOST_AGENTS = 100_000  # of a recipe: each takes some 40 KB, whatever its model
_OF_NAMES = ("samples", "test_samples", "size", "channels")


@dataclass(frozen=True, kw_only=True)
class Data:
    """[data]: a data set by name, or tables; and how much of it is public."""

    name: str | None = setting(None, "a bundled data set, a file <name>.npz in the data folder, or hf:owner/name")
    sources: tuple[str, ...] | None = setting(
        None, "several such data sets of one task as one; the id 'source' of a sample names its own"
    )
    file: str | None = setting(None, "a CSV or Parquet file instead of a name")
    files: dict[str, str] | None = setting(None, "one CSV or Parquet file per agent: name = path")
    label: str | None = setting(None, "the label column of a table")
    label_above: float | None = setting(None, "two classes: label values above this number, and all others")
    label_map: dict[str, str] | None = setting(None, "the class of each value of the label column: value = class")
    task: str | None = setting(
        None, "whether labels are classes or real values; unset: as the data say, or asked about", choices=TASKS
    )
    drop: tuple[str, ...] = setting((), "columns of a table to leave out")
    ids: tuple[str, ...] = setting((), "columns of a table that say where a sample is from")
    dir: str | None = setting(None, "the data folder; unset: --data-dir or the environment's CODISTILL_DATA")
    samples: int | None = setting(None, "use only this many training samples; of each of sources", at_least=1)
    test_samples: int | None = setting(None, "use only this many test samples; of each of sources", at_least=1)
    size: int | None = setting(
        None, "resize images to squares of so many pixels, bilinearly with antialiasing", at_least=1, at_most=4096
    )
    channels: int | None = setting(
        None, "channels of images: grey ones are repeated, 3 become 1 by their luma", at_least=1, at_most=64
    )
    test_fraction: float = setting(0.2, "test share where there is no test set", above=0, at_most=0.9)
    validation: float = setting(
        0.0, "share of the training samples to measure on in place of the test set, to choose settings", at_least=0,
        at_most=0.9,
    )  # fmt: skip
    columns: dict[str, str | dict[str, Any]] | None = setting(
        None, "columns of a table that are no numbers: name = kind (category, text), or a table with kind and options"
    )
    schema: str | None = setting(None, "a file that says the same of all columns, agreed on by all organisations")
    missing: str = setting(
        "keep", "empty cells: kept for models that take them and imputed for others; imputed for all; or their rows "
        "dropped; or refused", choices=("keep", "impute", "drop_rows", "refuse"),
    )  # fmt: skip
    missing_values: tuple[str, ...] = setting((), "cells that mean the same as an empty one, such as ?")
    scale: str | None = setting(
        None, "how samples are scaled; unset: as suits the data", choices=("unit", "standard", "robust", "none")
    )
    scale_per_agent: bool = setting(False, "each agent scales by its own training samples, not all by those of all")
    public: int | float = setting(0, "public samples without labels: a count, or a share below 1", at_least=0)
    held_by_agents: bool = setting(False, "every agent brings its own data; see docs/deploy.md")
    classes: int | None = setting(
        None, "with held_by_agents: how many classes there are; 1 for one real value", at_least=1
    )
    class_names: tuple[str | int | bool, ...] | None = setting(
        None, "with held_by_agents: the classes, where labels are not 0, 1, 2 and so on"
    )
    public_file: str | None = setting(None, "with held_by_agents: a .npy file of public samples, equal on every node")

    def __post_init__(self) -> None:
        check_settings(self, "data")
        given = [key for key in ("name", "sources", "file", "files") if getattr(self, key) is not None]
        given += ["held_by_agents"] if self.held_by_agents else []
        if len(given) != 1:
            raise RecipeError(
                "[data] must say exactly one of name, sources, file, files, held_by_agents.",
                f"{given or 'none'}",
                "Keep one.",
            )
        of_hub = [key for key in ("classes", "class_names", "public_file") if getattr(self, key) is not None]
        if not self.held_by_agents and of_hub:
            raise RecipeError(
                "[data] classes, class_names and public_file go with held_by_agents.",
                f"'{of_hub[0]}' beside '{given[0]}'",
                "Remove them, or say held_by_agents = true.",
            )
        if self.held_by_agents:
            self._check_held_by_agents()
            return
        if not self.by_name and self.label is None:
            raise RecipeError("[data] must say the label column of a table.", "no label", 'Add label = "column".')
        check_label_mapping(self.label_above, self.label_map)
        if self.columns is not None and self.schema is not None:
            raise RecipeError("[data] must say its columns once.", "'columns' beside 'schema'", "Keep one of them.")
        Columns(self.columns or {})
        of_others = _OF_TABLES if self.by_name else _OF_NAMES
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        useless = [key for key in of_others if getattr(self, key) != defaults[key]]
        if useless:
            raise RecipeError(
                f"[data] {', '.join(_OF_TABLES)} go with a table (file, files); {', '.join(_OF_NAMES)} with a name.",
                f"'{useless[0]}' beside '{given[0]}'",
                f"Remove '{useless[0]}'.",
            )

    @property
    def by_name(self) -> bool:
        """Whether it is a data set by name, or several of them; tables and what agents hold are not."""
        return self.name is not None or self.sources is not None

    def _check_held_by_agents(self) -> None:
        """The hub has no data to split or to scale."""
        if (self.classes is None) == (self.class_names is None):
            raise RecipeError(
                "[data] with held_by_agents must say how many classes there are, or name them.",
                "neither" if self.classes is None else "both classes and class_names",
                'Add classes = 2, or class_names = ["no", "yes"].',
            )
        kept = {"held_by_agents", "classes", "class_names", "public_file", "task"}
        idle = [f.name for f in dataclasses.fields(self) if f.name not in kept and getattr(self, f.name) != f.default]
        if idle:
            raise RecipeError(
                "[data] with held_by_agents holds no data.",
                f"'{idle[0]}' beside 'held_by_agents'",
                f"Remove '{idle[0]}'.",
            )


@dataclass(frozen=True, kw_only=True)
class AgentEntry:
    """[[agents]]: one agent, or several of a kind."""

    learner: str | dict[str, Any] | None = setting(
        None, "a learner's name, 'file.py:Name', or a table with kind and options; where agents hold their data: none"
    )
    name: str | None = setting(None, "the agent's name; unset: made from the learner's")
    count: int = setting(1, "how many such agents", at_least=1, at_most=MOST_AGENTS)
    device: str | None = setting(None, f"{DEVICE_HELP}; unset: as [runtime] says")
    choices: dict[str, Any] = setting(factory=dict, help="settings of the protocol that it chooses for itself")

    def __post_init__(self) -> None:
        check_settings(self, "agents")
        if self.device is not None:
            check_name(self.device)
        if isinstance(self.learner, dict) and not isinstance(self.learner.get("kind"), str):
            raise RecipeError(
                "A learner's table must say its kind, a string.", f"{self.learner}", 'Write kind = "name" in it.'
            )

    @property
    def kind(self) -> str:
        """The learner's name."""
        if self.learner is None:
            return "agent"
        kind: str = self.learner if isinstance(self.learner, str) else self.learner["kind"]
        return kind

    @property
    def short_kind(self) -> str:
        """The last part of the learner's name."""
        return self.kind.rpartition(":")[2] if is_own(self.kind) else self.kind.rpartition(".")[2]

    @property
    def kinds(self) -> list[Any]:
        """The names of the learner and of the steps of a pipeline."""
        steps = self.options.get("steps", [])
        inner = steps if isinstance(steps, list) else []
        return [self.kind, *(step.get("kind") if isinstance(step, dict) else step for step in inner)]

    @property
    def options(self) -> dict[str, Any]:
        """The learner's options."""
        return {} if not isinstance(self.learner, dict) else {k: v for k, v in self.learner.items() if k != "kind"}


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """[evaluation]: what is measured, and when."""

    every: int = setting(1, "rounds between evaluations; the last round is always evaluated", at_least=1)
    samples: int | None = setting(
        2000, "test samples per evaluation, the full test set in the last round; 0: always all", at_least=0
    )
    agents: str = setting("all", EVALUATE_AGENTS, choices=("all", "present"))
    alone: bool = setting(True, "also train every agent alone, so that the gain is known")
    scores: tuple[str, ...] = setting(
        (), "scores by scikit-learn's names, the most important first; unset: accuracy, or rmse for a regression"
    )
    features_at: tuple[int, ...] = setting((), FEATURES_AT, at_least=1)

    def __post_init__(self) -> None:
        check_settings(self, "evaluation")
        for name in self.scores:
            as_score(name)
