"""The public surface: these names and no others, and help that answers at once."""

import json
import subprocess
import sys
from importlib import resources

import pytest

import codistill

NAMES = [
    "AKD",
    "Ability",
    "Agent",
    "Alone",
    "AvgKD",
    "Backfitting",
    "CRS",
    "Centralised",
    "Clock",
    "CodistillError",
    "Columns",
    "Compression",
    "DDistillation",
    "DSGD",
    "EKD",
    "EarlyStopping",
    "FD",
    "Fault",
    "FedAL",
    "FedAvg",
    "FedBN",
    "FedDF",
    "FedDKD",
    "FedDistill",
    "FedGen",
    "FedMAX",
    "FedMD",
    "FedProto",
    "FedProx",
    "Federation",
    "Hub",
    "KernelRidge",
    "Learner",
    "Message",
    "Offline",
    "PKD",
    "Protocol",
    "RayCluster",
    "Result",
    "Safeguard",
    "Score",
    "SiloSGD",
    "Topology",
    "TorchLearner",
    "TrainedModel",
    "advise",
    "join",
    "load",
    "parts",
    "read_state",
    "register_architecture",
    "serve",
    "setting",
    "track",
]
HEAVY = ("torch", "numpy", "pandas", "sklearn", "scipy", "matplotlib", "rich")

# Runs a command in a fresh interpreter, and says which heavy libraries it has imported.
PROBE = f"""
import json, sys
from codistill.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    print(json.dumps([end.code, [name for name in {HEAVY} if name in sys.modules]]))
"""


@pytest.mark.parametrize("name", NAMES)
def test_public_names_are_documented(name):
    """Also their own methods and properties: the API pages are made from these docstrings."""
    public = getattr(codistill, name)
    assert public.__doc__
    if isinstance(public, type):
        members = {key: value for key, value in vars(public).items() if not key.startswith("_")}
        functions = {key: value for key, value in members.items() if callable(value) or isinstance(value, property)}
        inherited = {key for base in public.__mro__[1:] for key in vars(base)}
        assert [key for key, value in functions.items() if not value.__doc__ and key not in inherited] == []


def test_the_public_names_are_these():
    assert codistill.__all__ == NAMES
    assert set(dir(codistill)) == {*NAMES, "__version__"}


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_there_and_documented(name):
    assert getattr(codistill, name).__doc__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="FedMDD"):
        codistill.FedMDD  # noqa: B018


def test_a_star_import_brings_the_names():
    space = {}
    exec("from codistill import *", space)
    assert set(NAMES) <= space.keys()


def test_every_protocol_has_a_public_name():
    from codistill.protocols import PROTOCOLS

    assert {protocol.__name__ for protocol in PROTOCOLS.values()} <= set(NAMES)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["run", "--help"], ["run"], ["walk"]])
def test_help_needs_no_heavy_library(arguments):
    done = subprocess.run([sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, timeout=60)
    code, imported = json.loads(done.stdout.splitlines()[-1])
    assert imported == []
    assert code == (2 if arguments in (["run"], ["walk"]) else 0)
    assert "Traceback" not in done.stderr


def test_importing_the_package_needs_no_heavy_library():
    text = f"import sys, codistill, codistill.cli; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_protocols_and_recipes_need_only_torch(tmp_path):
    """What takes seconds to import waits until it is used: an error in a recipe is shown before."""
    recipe = tmp_path / "recipe.toml"
    demo = resources.files("codistill.experiments") / "demo.toml"
    recipe.write_text(demo.read_text().replace("alpha =", "alfa ="))
    text = f"""
import sys, codistill
from codistill.cli import main
codistill.FedMD, codistill.TorchLearner, codistill.Agent, codistill.Federation
code = main(["run", {str(recipe)!r}])
slow = ("pandas", "scipy.sparse", "scipy.stats", "sklearn", "skops", "matplotlib", "networkx", "onnx", "submitit")
print(code, "torch" in sys.modules, [name for name in slow if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=True)
    assert "Did you mean 'alpha'?" in done.stderr
    assert done.stdout.strip() == "2 True []"


def test_the_package_is_the_command():
    done = subprocess.run([sys.executable, "-m", "codistill", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, f"codistill {codistill.__version__}")
