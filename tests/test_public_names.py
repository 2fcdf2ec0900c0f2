"""The public surface: these names and no others, and help that answers at once."""

import json
import subprocess
import sys

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
    "read_state",
    "register_architecture",
    "serve",
    "setting",
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
