"""An authority with a hub and an agent, and another of the same name."""

import shutil

import pytest
from tests.certs.certificates import NOW

from codistill.certs.authority import Authority


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """An authority with a hub at localhost and the agent 'lab'; copied for each test, as making keys takes time."""
    folder = tmp_path_factory.mktemp("made") / "certs"
    authority = Authority(folder, now=NOW)
    authority.create()
    authority.issue("hub", "localhost", addresses=["127.0.0.1", "::1"])
    authority.issue("agent", "lab")
    return folder


@pytest.fixture
def certs(made, tmp_path):
    shutil.copytree(made, tmp_path / "certs")
    return tmp_path / "certs"


@pytest.fixture
def authority(certs):
    return Authority(certs, now=NOW)


@pytest.fixture(scope="session")
def foreign(tmp_path_factory):
    """Another authority of the same name, with an agent of the same name."""
    folder = tmp_path_factory.mktemp("foreign") / "certs"
    Authority(folder, now=NOW).create()
    Authority(folder, now=NOW).issue("agent", "lab")
    return folder
