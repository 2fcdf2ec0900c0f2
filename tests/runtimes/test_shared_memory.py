"""Large messages between processes: in shared memory, where there is room; nothing is overwritten before it is read."""

import mmap
import os
import random
from types import SimpleNamespace

import numpy as np
import pytest

from codistill.engine.exchange import Frame
from codistill.runtimes.workers import SharedMemory, SocketLinks, _socket_pairs, shared_by

IDLE = SimpleNamespace(waits=dict)  # a host none of whose nodes waits


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
        frames += here.wait(IDLE)
    assert [frame.payload for frame in frames] == [small, large, large, small]
    assert int(memory[1]._read[0]) == 1
    here.close()
    there.close()


def test_without_shared_memory_all_goes_through_the_socket():
    here, there = _pair(())
    there.post(0, "a", ["hub"], bytes(200_000))
    frames = here.wait(IDLE)
    assert [len(frame.payload) for frame in frames] == [200_000]
    here.close()
    there.close()


def test_a_system_that_has_not_so_much_memory_goes_without(monkeypatch):
    assert len(shared_by(3)) == 3

    def refuse(*_):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    assert shared_by(3) == []


def test_numbers_of_readers_are_shared_with_forked_processes():
    memory = SharedMemory(2, room=100)
    start = memory.write(b"a" * 100, [1])
    child = os.fork()
    if child == 0:
        os._exit(0 if memory.read(1, start, 100) == b"a" * 100 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert np.array_equal(memory._read, [0, 1])
    assert memory.write(b"b" * 100, [1]) == 0
