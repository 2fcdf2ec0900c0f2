"""Large messages between processes: in shared memory, where there is room; nothing is overwritten before it is read."""

import mmap
import os
import random

import numpy as np
import pytest

from codistill.runtimes.carrier import Frame
from codistill.runtimes.cores import compute_in_the_background, own_core
from codistill.runtimes.links import SocketLinks
from codistill.runtimes.processes import _socket_pairs
from codistill.runtimes.shared_memory import SharedMemory, shared_by


def test_a_message_stays_until_every_reader_has_it():
    memory = SharedMemory(3, room=100)
    first = memory.write(b"a" * 60, [1, 2])
    assert first == 0
    assert memory.write(b"b" * 60, [1]) is None
    assert memory.read(1, first, 60) == b"a" * 60
    assert memory.write(b"b" * 60, [1]) is None  # host 2 has not read it yet
    assert memory.read(2, first, 60) == b"a" * 60
    assert memory.write(b"b" * 60, [1]) == 0


def test_what_has_no_room_at_all_is_not_taken():
    memory = SharedMemory(2, room=100)
    assert memory.write(b"a" * 101, [1]) is None
    assert memory.write(b"a" * 100, [1]) == 0


def test_all_that_was_read_makes_room_at_the_front_again():
    memory = SharedMemory(2, room=100)
    for letter in (b"a", b"b", b"c"):
        start = memory.write(letter * 40, [1])
        assert start == 0  # the same memory in every round
        assert memory.read(1, start, 40) == letter * 40


@pytest.mark.parametrize("seed", range(5))
def test_whatever_the_order_messages_arrive_as_they_were_sent(seed):
    rng = random.Random(seed)
    memory, hosts = SharedMemory(4, room=1000), (1, 2, 3)
    waiting = {host: [] for host in hosts}  # (start, content), in the order in which they were written
    written = refused = 0
    for number in range(3000):
        if rng.random() < 0.5:
            readers = rng.sample(hosts, rng.randint(1, 3))
            content = bytes([number % 251]) * rng.randint(1, 300)
            start = memory.write(content, readers)
            if start is None:
                refused += 1
                assert any(waiting.values())
                continue
            written += 1
            for reader in readers:
                waiting[reader].append((start, content))
        else:
            reader = rng.choice(hosts)
            if waiting[reader]:
                start, content = waiting[reader].pop(0)
                assert memory.read(reader, start, len(content)) == content
    assert written > 300
    assert refused > 100


def _pair(memory):
    ends = _socket_pairs(2)
    places = {"hub": 0, "a": 1}
    return [SocketLinks(me, ends[me], places, memory=memory) for me in (0, 1)]


def test_large_messages_are_in_shared_memory_and_the_order_of_all_is_kept():
    large, small = bytes(range(256)) * 1000, b"small"
    memory = [SharedMemory(2, room=300_000) for _ in range(2)]
    here, there = _pair(memory)
    for data in (small, large, large, small):  # the second large one has no room, and goes through the socket
        there.post(0, "a", ["hub"], data)
    assert sum(len(piece) for piece in there._peers[0].outgoing) < len(large)
    there.flush()
    frames: list[Frame] = []
    while len(frames) < 4:
        frames += here.wait(None)
    assert [frame.payload for frame in frames] == [small, large, large, small]
    assert int(memory[1]._read[0]) == 1
    here.close()
    there.close()


def test_without_shared_memory_all_goes_through_the_socket():
    here, there = _pair(())
    there.post(0, "a", ["hub"], bytes(200_000))
    frames = here.wait(None)
    assert [len(frame.payload) for frame in frames] == [200_000]
    here.close()
    there.close()


def test_a_system_that_has_not_so_much_memory_goes_without(monkeypatch):
    assert len(shared_by(3)) == 3

    def refuse(*_):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    assert shared_by(3) == []


def test_a_worker_waits_on_its_own_core_and_computes_on_any(monkeypatch):
    allowed = {3, 5}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(allowed))
    asked = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: asked.append(set(cores)))
    with own_core(2, workers=2):
        assert asked == [{5}]
    assert asked == [{5}, {3, 5}]
    with own_core(2, workers=3):  # fewer cores than workers: the scheduler deals them out
        pass
    with own_core(1, workers=1):  # more cores than workers: none is short of one
        pass
    assert len(asked) == 2


def test_a_core_that_was_taken_away_is_no_error(monkeypatch):
    def refuse(*_):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    entered = False
    with own_core(1, workers=1):
        entered = True
    assert entered


def test_numbers_of_readers_are_shared_with_forked_processes():
    memory = SharedMemory(2, room=100)
    start = memory.write(b"a" * 100, [1])
    child = os.fork()
    if child == 0:
        os._exit(0 if memory.read(1, start, 100) == b"a" * 100 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert np.array_equal(memory._read, [0, 1])
    assert memory.write(b"b" * 100, [1]) == 0


def test_a_worker_does_not_interrupt_who_wakes_it():
    child = os.fork()
    if not child:
        compute_in_the_background()
        os._exit(os.sched_getscheduler(0) != os.SCHED_BATCH)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert os.sched_getscheduler(0) != os.SCHED_BATCH  # only the worker itself
