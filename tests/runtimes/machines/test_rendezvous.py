"""How machines meet: who may take part, who is turned away, and what is said when somebody does not come."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from codistill.devices import LocalRank
from codistill.errors import CodistillError, NetworkError, RecipeError, RuntimeFault
from codistill.runtimes.links import Links
from codistill.runtimes.machines.acceptor import Acceptor, Caller, listen_here
from codistill.runtimes.machines.heartbeat import Heartbeat
from codistill.runtimes.machines.place import Place, place_here
from codistill.runtimes.machines.proof import NotProven, prove_as_caller, prove_as_listener, receive, send
from codistill.runtimes.machines.rendezvous import Met, meet
from codistill.runtimes.machines.shared_key import SharedKey
from codistill.runtimes.runtime import Stopped

pytestmark = pytest.mark.usefixtures("time_limit")
HERE = socket.gethostname()
SECRET = "0123456789abcdef" * 4
FACTS = {"version of torch": "2.0", "the data of 'a'": "1234"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Machines:
    """Machines that meet, as threads; each may have another key, other facts or less patience."""

    def __init__(self, world: int) -> None:
        self.port, self.world = free_port(), world
        self._pool = ThreadPoolExecutor(world + 1)

    def place(self, rank: int) -> Place:
        return Place(rank, self.world, "127.0.0.1", (self.port,))

    def start(
        self, rank: int, *, secret: str = SECRET, patience: float = 30, stop: Callable[[], bool] = lambda: False,
        **facts: str,
    ) -> Future[Met]:  # fmt: skip
        key = SharedKey.__new__(SharedKey)
        key._given, key._path, key._meeting = secret, None, self.place(rank).meeting
        return self._pool.submit(meet, self.place(rank), key, FACTS | facts, patience, stop)

    def call(self) -> socket.socket:
        """A stranger's connection to rank 0, as soon as it listens."""
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self.port))
            except ConnectionRefusedError:
                time.sleep(0.01)


def close(*met: Met) -> None:
    for each in met:
        for end in (*each.links.values(), *each.heartbeats.values()):
            end.close()


def failure(met: Future[Met]) -> CodistillError:
    error = met.exception(60)
    assert isinstance(error, CodistillError), error
    return error


def test_every_machine_gets_a_link_to_every_other_one() -> None:
    machines = Machines(4)
    met = {rank: machines.start(rank) for rank in (3, 1, 0, 2)}
    found = {rank: each.result(60) for rank, each in met.items()}
    for a in range(4):
        assert found[a].links.keys() == found[a].heartbeats.keys() == {0, 1, 2, 3} - {a}
        assert found[a].names[3] == f"rank 3 on {HERE}"
        for b in range(a):
            for mine, theirs in (
                (found[a].links[b], found[b].links[a]),
                (found[a].heartbeats[b], found[b].heartbeats[a]),
            ):
                assert mine.getsockname()[1] == theirs.getpeername()[1]
    with pytest.raises(ConnectionRefusedError):  # nobody listens during the run
        socket.create_connection(("127.0.0.1", machines.port))
    close(*found.values())


def test_strangers_are_turned_away_and_do_not_keep_a_machine_out() -> None:
    machines = Machines(2)
    zero = machines.start(0)
    silent = [machines.call() for _ in range(200)]  # more than may be pending at a time
    noise = machines.call()
    noise.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(1000))
    one = machines.start(1)
    close(zero.result(60), one.result(60))
    noise.settimeout(5)
    with suppress(ConnectionResetError):
        assert noise.recv(100) == b""  # not a byte of an answer
    for connection in (*silent, noise):
        connection.close()


def test_another_key_is_refused_at_both_ends_and_the_missing_rank_is_named() -> None:
    machines = Machines(3)
    zero, one = machines.start(0, patience=2.5), machines.start(1)
    two = machines.start(2, secret=SECRET[::-1], patience=1)
    assert "is refused, or another run listens" in failure(two).found
    assert "same key" in failure(two).do
    error = failure(zero)
    assert error.found.startswith("no rank 2; turned away: ")
    assert error.found.endswith("x another key, or another run")
    assert failure(one).found == error.found  # whoever has come is told the same


def test_a_listener_without_the_key_is_no_rank_0() -> None:
    """It can take the port, and even accept the proof, but not give one."""

    async def talk() -> None:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        loop = asyncio.get_running_loop()

        async def impostor() -> None:
            said = await loop.sock_recv(theirs, 1000)
            await loop.sock_sendall(theirs, said[-32:])  # the nonce back, in the hope of a proof to send back
            proof = await loop.sock_recv(theirs, 1000)
            await loop.sock_sendall(theirs, b"\1" + proof)

        task = asyncio.ensure_future(impostor())
        with pytest.raises(NotProven, match="another key"):
            await prove_as_caller(ours, b"key")
        await task
        ours.close()
        theirs.close()

    asyncio.run(talk())


def test_both_ends_prove_themselves_and_then_talk() -> None:
    async def talk(theirs: bytes) -> Any:
        caller, listener = socket.socketpair()
        for end in (caller, listener):
            end.setblocking(False)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(prove_as_caller(caller, b"key"))
                group.create_task(prove_as_listener(listener, theirs))
            await send(caller, rank=3)
            return await receive(listener)
        finally:
            caller.close()
            listener.close()

    assert asyncio.run(talk(b"key")) == {"rank": 3}
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(talk(b"yek"))
    assert caught.value.subgroup(NotProven)


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"version of torch": "1.9"}, "version of torch (1.9 instead of 2.0)"),
        ({"the data of 'a'": "5678"}, "the data of 'a'"),
        ({"the model of 'b'": "5678"}, "the model of 'b'"),
    ],
)
def test_a_machine_with_another_recipe_is_named(facts: dict[str, str], named: str) -> None:
    machines = Machines(2)
    zero, one = machines.start(0), machines.start(1, **facts)
    for error in (failure(zero), failure(one)):
        assert error.must == "All machines must have the same recipe, data and versions."
        assert error.found == f"rank 1 on {HERE} differs from rank 0 on {HERE} in: {named}"


def test_a_rank_that_is_there_already_is_refused() -> None:
    machines = Machines(3)
    zero, one = machines.start(0, patience=3), machines.start(1)
    time.sleep(1)
    again = machines.start(1)
    twice = f"rank 1 twice, here from {HERE}"
    assert failure(again).found == twice
    assert failure(zero).found == failure(one).found == f"no rank 2; turned away: 1 x {twice}"


def test_whoever_asks_to_stop_need_not_wait() -> None:
    machines, asked = Machines(2), threading.Event()
    zero = machines.start(0, stop=asked.is_set)
    machines.call().close()
    asked.set()
    assert isinstance(zero.exception(10), Stopped)
    one = machines.start(1, patience=0.5)  # and there is nobody
    assert failure(one).found == f"127.0.0.1:{machines.port}: Connection refused"


def test_what_a_member_says_must_be_well_formed() -> None:
    async def talk() -> dict[tuple[int, str], Caller]:
        listening = listen_here("127.0.0.1", 0)
        acceptor = Acceptor(listening, b"key", range(1, 3), lambda _: None)
        for hello in ({}, {"rank": "1"}, {"rank": 1, "purpose": "x", "host": "h", "port": 1, "facts": {}}):
            connection = socket.create_connection(listening.getsockname())
            connection.setblocking(False)
            await prove_as_caller(connection, b"key")
            await send(connection, **hello)
            with pytest.raises(ConnectionError):
                await receive(connection)
            connection.close()
        acceptor.close()
        return acceptor.callers

    assert asyncio.run(talk()) == {}


# --- the environment ------------------------------------------------------------------------------


TORCHRUN = {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "40007", "SLURM_JOB_NODELIST": "gpu[07-09,12],x1"}


@pytest.mark.parametrize(
    ("environment", "rank", "world", "address", "first"),
    [
        (TORCHRUN, 2, 3, "n0", 29501),
        (SLURM | TORCHRUN, 2, 3, "n0", 29501),  # torchrun under srun
        (SLURM, 1, 4, "gpu07", 20008),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "x1"}, 1, 2, "x1", 20008),
        (SLURM | {"SLURM_JOB_NODELIST": "rack[1-2]node[03-04],a"}, 1, 4, "rack1node03", 20008),
        (SLURM | {"MASTER_ADDR": "m", "MASTER_PORT": "1000"}, 1, 4, "m", 1001),
    ],
)
def test_the_place_is_read_from_the_environment(
    environment: dict[str, str], rank: int, world: int, address: str, first: int
) -> None:
    place = place_here(None, environment)
    assert (place.rank, place.world, place.address) == (rank, world, address)
    assert place.ports == tuple(range(first, first + 8))
    assert place_here(77, environment).ports == (77,)


@pytest.mark.parametrize(
    ("environment", "local"),
    [
        (TORCHRUN, None),
        (TORCHRUN | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, LocalRank(1, 2)),
        (TORCHRUN | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, None),  # alone on its machine
        (TORCHRUN | {"LOCAL_RANK": "2"}, LocalRank(2, 3)),  # by another launcher: at least three
        (TORCHRUN | {"SLURM_LOCALID": "1", "SLURM_TASKS_PER_NODE": "2"}, None),  # of srun, not of torchrun under it
        (SLURM, None),
        (SLURM | {"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, LocalRank(1, 2)),
        (SLURM | {"SLURM_LOCALID": "1", "SLURM_TASKS_PER_NODE": "1,12(x2),3"}, LocalRank(1, 12)),
        (SLURM | {"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_TASKS_PER_NODE": "8"}, None),
    ],
)
def test_the_local_rank_is_read_from_the_environment(environment: dict[str, str], local: LocalRank | None) -> None:
    assert place_here(None, environment).local == local


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({}, "SLURM_PROCID"),
        ({"RANK": "0"}, "SLURM_PROCID"),
        (TORCHRUN | {"RANK": "3"}, "RANK"),
        (TORCHRUN | {"RANK": "-1"}, "RANK"),
        (TORCHRUN | {"WORLD_SIZE": "many"}, "WORLD_SIZE"),
        (TORCHRUN | {"MASTER_PORT": "65535"}, "MASTER_PORT"),
        (TORCHRUN | {"MASTER_ADDR": ""}, "MASTER_ADDR"),
        (TORCHRUN | {"LOCAL_RANK": "first"}, "LOCAL_RANK"),
        (TORCHRUN | {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK"),
        (SLURM | {"SLURM_LOCALID": "4", "SLURM_TASKS_PER_NODE": "4"}, "SLURM_LOCALID"),
    ],
)
def test_what_is_missing_in_the_environment_is_named(environment: dict[str, str], named: str) -> None:
    with pytest.raises(RecipeError, match=named):
        place_here(None, environment)


def test_the_key_in_the_folder_is_its_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CODISTILL_KEY", raising=False)
    key, file = SharedKey(tmp_path, "here"), tmp_path / "machines.key"
    assert key.read() is None
    with key.published():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        first = key.read()
        assert first == SharedKey(tmp_path, "here").read() != SharedKey(tmp_path, "there").read()
        os.chmod(file, 0o640)
        with pytest.raises(RecipeError, match="mode 640"):
            key.read()
    assert not file.exists()
    with key.published():
        assert key.read() not in (first, None)
    with pytest.raises(RecipeError, match="neither CODISTILL_KEY"):
        SharedKey(None, "here")
    monkeypatch.setenv("CODISTILL_KEY", "short")
    with pytest.raises(RecipeError, match="at least 32"):
        SharedKey(tmp_path, "here")


# --- during the run -------------------------------------------------------------------------------


def test_a_silent_machine_is_noticed_though_its_connection_is_open() -> None:
    (a, b), (c, silent) = socket.socketpair(), socket.socketpair()
    one, other = Heartbeat({1: a, 2: c}, lease=1.5), Heartbeat({0: b}, lease=1.5)
    while not one.silent():
        time.sleep(0.02)
    assert one.silent() == {2}
    assert other.silent() == set()
    one.close()
    other.close()
    silent.close()


def test_a_link_that_breaks_between_two_others_ends_the_run_at_rank_0() -> None:
    pairs = {pair: socket.socketpair() for pair in ((0, 1), (0, 2), (1, 2))}

    def lost(rank: int, told_by: int) -> RuntimeFault:
        return RuntimeFault("All must stay.", f"{rank} is lost, says {told_by}", "Start again.")

    zero = Links(0, {1: pairs[0, 1][0], 2: pairs[0, 2][0]}, {}, fault=lost)
    one = Links(1, {0: pairs[0, 1][1], 2: pairs[1, 2][0]}, {}, fault=lost)
    pairs[1, 2][1].close()
    one.command(0, well=True)
    assert zero.next_control() == (1, {"well": True})
    one._pump(1)  # it notices, and goes on
    one.command(0, well=True)
    with pytest.raises(RuntimeFault, match="2 is lost, says 1"):
        zero.next_control()
    zero.close()
    one.close()
    pairs[0, 2][1].close()


def test_what_the_owner_said_last_is_found_after_a_link_to_another_one_broke_first() -> None:
    """It has told the end and closed, and another machine has ended already: to say so breaks the link to the owner."""
    owner, other = socket.socketpair(), socket.socketpair()
    zero, one = Links(0, {1: owner[0]}, {}), Links(1, {0: owner[1], 2: other[0]}, {})
    zero.command(1, do="end")
    zero.close()
    other[1].close()
    with pytest.raises(RuntimeFault, match="owns the run has ended"):
        one._lose(one._peers[2])
    assert one.last_controls() == [{"do": "end"}]
    one.close()


def test_the_owner_reads_until_the_others_have_closed() -> None:
    ends = socket.socketpair()
    zero, one = Links(0, {1: ends[0]}, {}), Links(1, {0: ends[1]}, {})
    one.command(0, late=True)
    timer = threading.Timer(0.2, one.close)
    timer.start()
    zero.wait_for_ends(30)
    assert ends[0].recv(10) == b""  # all was read, and the other end is closed
    timer.join()
    zero.close()


def test_a_machine_that_counts_as_dead_is_lost() -> None:
    ends, dead = socket.socketpair(), set[int]()
    zero = Links(0, {1: ends[0]}, {}, fault=lambda rank, _: RuntimeFault("x", f"{rank}", "y"), silent=lambda: dead)
    dead.add(1)
    with pytest.raises(RuntimeFault, match="Found: 1"):
        zero.next_control()
    zero.close()
    ends[1].close()


def test_a_missing_machine_is_an_error_of_the_network() -> None:
    error = failure(Machines(2).start(0, patience=0.2))
    assert isinstance(error, NetworkError)
    assert error.found == "no rank 1"
