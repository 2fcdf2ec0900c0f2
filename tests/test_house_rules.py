"""Rules of the house that a machine can check: layers, protocols in one file, nothing unsafe."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "codistill"
MODULES = {path.relative_to(SOURCE.parent).with_suffix(""): path for path in sorted(SOURCE.rglob("*.py"))}

# Lowest first. A module imports only from its own layer and from those before it, at the top or inside a function.
LAYERS = (
    ("core",),
    ("certs",),
    ("data",),
    ("wire",),
    ("learners",),
    ("topology",),
    ("nodes", "protocol"),
    ("protocols",),
    ("theory",),
    ("results",),
    ("engine",),
    ("runtimes",),
    ("network",),
    ("report",),
    ("federation",),
    ("experiments",),
    ("__main__", "cli"),
)
LAYER_OF = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
PROTOCOL_FILES = sorted((SOURCE / "protocols").glob("[a-z]*.py"))


def imports(text: str) -> set[str]:
    """All modules of codistill that a source text imports, dotted, whether at its top, in a function or for types."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("codistill")}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "codistill":
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {name for name in inside if Path(*name.split(".")) in MODULES or _is_package(name)}
            found |= modules | ({node.module} if len(modules) < len(inside) else set())
    return found


def forbidden_imports(module: str, text: str) -> set[str]:
    """Imports of a module (dotted, without `codistill.`) from a layer above its own."""
    mine = LAYER_OF[module.partition(".")[0]]
    rooms = {name: name.split(".")[1] if "." in name else "" for name in imports(text)}
    return {name for name, room in rooms.items() if not room or LAYER_OF[room] > mine}


def _is_package(name: str) -> bool:
    return Path(*name.split("."), "__init__") in MODULES


def _dotted(module: Path) -> str:
    parts = module.parts[1:-1] if module.name == "__init__" else module.parts[1:]
    return ".".join(parts)


@pytest.mark.parametrize("module", [m for m in MODULES if _dotted(m)], ids=_dotted)
def test_a_module_imports_only_from_lower_layers(module: Path) -> None:
    assert forbidden_imports(_dotted(module), MODULES[module].read_text()) == set()


@pytest.mark.parametrize(
    ("module", "line", "found"),
    [
        ("engine.store", "from codistill.experiments.run import execute", {"codistill.experiments.run"}),
        ("protocols.fedmd", "def f():\n    from codistill.runtimes import workers", {"codistill.runtimes.workers"}),
        ("data.shard", "import codistill.learners.torch", {"codistill.learners.torch"}),
        ("nodes.agent", "from codistill import Federation", {"codistill"}),
        ("wire.codec", "from codistill.core.errors import MessageError", set()),
    ],
)
def test_a_forbidden_import_is_found(module: str, line: str, found: set[str]) -> None:
    assert forbidden_imports(module, line) == found


@pytest.mark.parametrize("path", PROTOCOL_FILES, ids=lambda path: path.stem)
def test_a_protocol_imports_only_what_it_is_written_in(path: Path) -> None:
    """The paper, its file and parts: at most a baseline protocol beside it, for `alone`."""
    allowed = {"codistill.protocol", "codistill.protocols.parts", "codistill.data.validation"}
    baselines = {"codistill.protocols.alone", "codistill.protocols.silo_sgd"}
    assert imports(path.read_text()) <= allowed | baselines


@pytest.mark.parametrize("path", PROTOCOL_FILES, ids=lambda path: path.stem)
def test_no_protocol_inherits_from_another(path: Path) -> None:
    bases = [ast.unparse(base) for node in ast.parse(path.read_text()).body for base in getattr(node, "bases", [])]
    assert set(bases) <= {"Protocol"}


@pytest.mark.parametrize("path", PROTOCOL_FILES, ids=lambda path: path.stem)
def test_a_protocol_file_is_short(path: Path) -> None:
    """An algorithm is one file, with all that it alone uses: most need 130 lines, these more."""
    longest = {
        "crs": 380,  # two ways to talk, the contrast, representations, and what each agent chooses
        "fedgen": 270,  # the generator
        "feddkd": 230,  # the steps of distillation, and what is measured of them
        "d_distillation": 235,  # conditions of its printed form, three readings of τ, and real values
        "fedmd": 220,  # two kinds of models and of targets, with and without rounds
        "ekd": 160,  # the ensemble it predicts with
    }
    assert len(path.read_text().splitlines()) <= longest.get(path.stem, 130)


def test_nothing_is_unpickled_or_evaluated() -> None:
    unsafe = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    for path in MODULES.values():
        tree = ast.parse(path.read_text())
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
        assert not unsafe & {name.split(".")[0] for name in names}, path
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        assert not {"eval", "exec"} & {call.id for call in calls if isinstance(call, ast.Name)}, path


def test_private_names_of_torch_and_numpy_are_not_used() -> None:
    found = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if ast.unparse(node.value).split(".")[0] in ("np", "numpy", "torch", "nn")
    ]
    assert not found
