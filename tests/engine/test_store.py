"""A run's folder: nothing half-written, nothing overwritten, nothing lost."""

import errno
import json
import multiprocessing
import os
import warnings

import pytest

from codistill.core import files
from codistill.core.errors import CheckpointError, RecipeError, StorageError
from codistill.core.files import locked, write_atomically, writing
from codistill.core.spec import RunSpec
from codistill.engine.store import LOG, METRICS, TIMES, RunFolder, check_vacant, read_rows
from codistill.results.records import RoundEnded


def row(done, agent="a"):
    return {"round": done, "agent": agent, "present": True, "sent": 1, "received": 2, "accuracy": done / 10}


def record(done):
    return RoundEnded(done, [row(done)], [f"round {done}: something"], 0.25)


def saved(done):
    return {"a": f"state after {done}".encode(), "hub": b""}


def opened_folder(folder, *, resume=False):
    opened = RunFolder(folder)
    opened.open(resume=resume)
    return opened


def keep_round(opened, done, *, checkpoint=True):
    opened.round_ended(record(done))
    if checkpoint:
        opened.write_checkpoint(done, saved(done))


def filled(folder, rounds=3, every=1, of=10):
    opened, plan = opened_folder(folder), RunSpec(rounds=of, checkpoint_every=every)
    for done in range(1, rounds + 1):
        keep_round(opened, done, checkpoint=plan.has_checkpoint(done))
    opened.close()
    return folder


def latest(folder):
    opened = opened_folder(folder, resume=True)
    try:
        return opened.latest(), opened.notes
    finally:
        opened.close()


def checkpoints(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


# --- keeping ----------------------------------------------------------------------------------------


def test_rows_times_and_log_are_kept_apart(tmp_path):
    filled(tmp_path / "run", 2)
    assert [json.loads(line) for line in (tmp_path / "run" / METRICS).read_text().splitlines()] == [row(1), row(2)]
    assert (tmp_path / "run" / TIMES).read_text() == '{"round": 1, "seconds": 0.25}\n{"round": 2, "seconds": 0.25}\n'
    assert (tmp_path / "run" / LOG).read_text() == "round 1: something\nround 2: something\n"


def test_what_was_saved_comes_back(tmp_path):
    (done, nodes, rows), notes = latest(filled(tmp_path / "run"))
    assert (done, nodes, rows, notes) == (3, saved(3), [row(1), row(2), row(3)], [])


def test_two_checkpoints_are_kept(tmp_path):
    assert checkpoints(filled(tmp_path / "run", 5)) == ["round-000004.state", "round-000005.state"]


@pytest.mark.parametrize(("every", "kept"), [(2, [2, 4, 5]), (4, [4, 5]), (0, [])])
def test_checkpoints_every_so_often_and_at_the_end(tmp_path, every, kept):
    names = [f"round-{done:06d}.state" for done in kept][-2:]
    assert checkpoints(filled(tmp_path / "run", 5, every=every, of=5)) == names


def test_the_baseline_is_kept_where_it_was_no_run_of_its_own(tmp_path):
    opened = opened_folder(tmp_path / "run")
    assert opened.baseline_rows() is None
    opened.write_baseline([row(1), row(2)])
    assert opened.baseline_rows() == [row(1), row(2)]
    opened.close()
    assert read_rows(tmp_path / "run" / "alone" / METRICS) == [row(1), row(2)]


# --- coming back ------------------------------------------------------------------------------------


def test_figures_after_the_checkpoint_are_cut_off(tmp_path):
    folder = filled(tmp_path / "run", 3, every=2)
    (done, nodes, rows), _ = latest(folder)
    assert (done, nodes, rows) == (2, saved(2), [row(1), row(2)])
    assert (folder / METRICS).read_text().count("\n") == 2
    assert (folder / LOG).read_text() == "round 1: something\nround 2: something\n"


def test_without_a_checkpoint_it_starts_anew(tmp_path):
    folder = filled(tmp_path / "run", 2, every=0)
    assert latest(folder)[0] == (0, None, [])
    assert (folder / METRICS).read_text() == ""


@pytest.mark.parametrize("damage", [b"", b"short", lambda data: data[:-1], lambda data: data[:40] + b"!" + data[41:]])
def test_a_damaged_checkpoint_is_passed_over_and_said(tmp_path, damage):
    folder = filled(tmp_path / "run")
    newest = folder / "checkpoints" / "round-000003.state"
    newest.write_bytes(damage(newest.read_bytes()) if callable(damage) else damage)
    (done, nodes, rows), notes = latest(folder)
    assert (done, nodes, len(rows)) == (2, saved(2), 2)
    assert "round-000003.state cannot be used" in notes[0]
    assert "Going on from round-000002.state" in notes[1]


def test_a_checkpoint_that_cannot_be_opened_is_passed_over(tmp_path):
    folder = filled(tmp_path / "run")
    (folder / "checkpoints" / "round-000003.state").unlink()
    (folder / "checkpoints" / "round-000003.state").mkdir()
    assert latest(folder)[0][0] == 2


def test_when_all_are_damaged_nothing_is_touched(tmp_path):
    folder = filled(tmp_path / "run")
    for path in (folder / "checkpoints").iterdir():
        path.write_bytes(b"damaged")
    before = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=r"2 damaged: round-000002.state, round-000003.state"):
        latest(folder)
    assert {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_stale_part_is_ignored_and_removed(tmp_path):
    folder = filled(tmp_path / "run")
    (folder / "checkpoints" / "round-000004.state.123.part").write_bytes(b"half")
    assert latest(folder)[0][0] == 3
    assert checkpoints(folder) == ["round-000002.state", "round-000003.state"]


@pytest.mark.parametrize("harm", ["missing", "shorter"])
def test_lost_figures_are_said(tmp_path, harm):
    folder = filled(tmp_path / "run")
    if harm == "missing":
        (folder / METRICS).unlink()
    else:
        os.truncate(folder / METRICS, 5)
    with pytest.raises(CheckpointError, match=r"metrics.jsonl must hold what it held at the checkpoint"):
        latest(folder)


# --- reading ----------------------------------------------------------------------------------------


def test_a_line_cut_off_by_a_kill_does_not_count(tmp_path):
    path = tmp_path / METRICS
    path.write_text(json.dumps(row(1)) + "\n" + json.dumps(row(2))[:20])
    assert read_rows(path) == [row(1)]
    path.write_text('{"round"')
    assert read_rows(path) == []


@pytest.mark.parametrize("content", [b"5\n", b"nonsense\n", b'{"round": 1}\n', b"\xff\n", b"[]\n"])
def test_what_is_no_metrics_file(tmp_path, content):
    path = tmp_path / METRICS
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="must be a metrics file"):
        read_rows(path)


@pytest.mark.parametrize("name", ["accuracy", "own_accuracy", "validation_accuracy"])
def test_an_accuracy_is_a_share(tmp_path, name):
    path = tmp_path / METRICS
    path.write_text(json.dumps({**row(1), name: 1.5}) + "\n")
    with pytest.raises(CheckpointError, match=f"'{name}' is out of range"):
        read_rows(path)


def test_a_metrics_file_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match="must be a metrics file"):
        read_rows(tmp_path / METRICS)


# --- one run per folder -------------------------------------------------------------------------------


def test_a_new_run_overwrites_nothing(tmp_path):
    folder = filled(tmp_path / "run")
    before = (folder / METRICS).read_bytes()
    opened = RunFolder(folder)
    with pytest.raises(RecipeError, match=r"already holds metrics.jsonl.*codistill resume"):
        opened.open(resume=False)
    opened.close()
    assert (folder / METRICS).read_bytes() == before
    assert checkpoints(folder) == ["round-000002.state", "round-000003.state"]


def test_what_is_not_the_runs_stays_where_it_is(tmp_path):
    """A folder 'checkpoints' with models of one's own is common."""
    mine = tmp_path / "checkpoints" / "model.pt"
    mine.parent.mkdir()
    mine.write_text("mine")
    filled(tmp_path)
    assert latest(tmp_path)[0][0] == 3
    assert mine.read_text() == "mine"


def test_a_folder_with_anything_in_it_is_not_vacant(tmp_path):
    check_vacant(tmp_path)
    check_vacant(tmp_path / "not there yet")
    (tmp_path / "recipe.toml.77.part").touch()
    (tmp_path / ".lock").touch()
    check_vacant(tmp_path)
    (tmp_path / "thesis.doc").touch()
    with pytest.raises(RecipeError, match=r"A new run needs a folder of its own.*thesis.doc"):
        check_vacant(tmp_path)


def attempt(folder, said):
    try:
        RunFolder(folder)
    except StorageError as error:
        said.put((error.found, error.do))
    else:
        said.put("taken")


def in_another_process(folder):
    fork = multiprocessing.get_context("fork")
    said = fork.SimpleQueue()
    process = fork.Process(target=attempt, args=(folder, said))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads, which are not used
        process.start()
    process.join(30)
    return said.get()


def test_another_process_is_refused_as_long_as_the_run_goes_on(tmp_path):
    opened = opened_folder(tmp_path)
    found, do = in_another_process(tmp_path)
    assert found == "another run is using it"
    assert do.startswith("Wait until that run ends.")
    opened.close()
    with locked(tmp_path):
        assert in_another_process(tmp_path)[0] == "another run is using it"
    assert in_another_process(tmp_path) == "taken"


# --- writing ----------------------------------------------------------------------------------------


class FullDisk:
    """Takes so many bytes, and then says that the disk is full; a write may be cut short."""

    def __init__(self, monkeypatch, room):
        self.room = room
        self._real = files.write_all
        monkeypatch.setattr(files, "write_all", self)

    def __call__(self, file, data):
        taken = data[: self.room]
        self.room -= len(taken)
        self._real(file, taken)
        if len(taken) < len(data):
            raise OSError(errno.ENOSPC, "No space left on device")


def test_a_file_is_whole_or_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"first")
    FullDisk(monkeypatch, 3)
    with pytest.raises(StorageError, match="the disk is full"):
        write_atomically(path, b"second")
    assert path.read_bytes() == b"first"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("room", [0, 10, 100, 150, 170, 400])
def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch, room):
    folder = filled(tmp_path / "run")
    with monkeypatch.context() as patch:
        opened = opened_folder(folder, resume=True)
        opened.latest()
        FullDisk(patch, room)
        with pytest.raises(StorageError, match="the disk is full") as caught:
            keep_round(opened, 4)
        opened.close()
    assert "codistill resume" in caught.value.do
    for name in (METRICS, TIMES, LOG):
        assert (folder / name).read_bytes()[-1:] == b"\n"
    assert checkpoints(folder) == ["round-000002.state", "round-000003.state"]
    assert latest(folder)[0] == (3, saved(3), [row(1), row(2), row(3)])


def test_an_interrupt_in_the_middle_of_a_write_leaves_no_part(tmp_path, monkeypatch):
    def interrupted(file, data):
        file.write(data[:3])
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "write_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "file", b"content")
    assert list(tmp_path.iterdir()) == []


def test_short_writes_are_gone_on_with(tmp_path):
    class Slow:
        def __init__(self, path):
            self.path, self.content = path, b""
            self._file = path.open("wb")

        def write(self, data):
            self.content += bytes(data[:2])
            return min(2, len(data))

        def fileno(self):
            return self._file.fileno()

    slow = Slow(tmp_path / "file")
    files.write_all(slow, b"12345")
    slow._file.close()
    assert slow.content == b"12345"


@pytest.mark.parametrize(
    ("number", "found"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "the disk quota is used up"),
        (errno.EFBIG, "the file exceeds the size limit"),
        (errno.EROFS, "the folder is read-only"),
        (errno.EACCES, "no permission to write"),
        (errno.EPERM, "no permission to write"),
        (errno.ENOENT, "no such folder"),
        (errno.ENOTDIR, "a file where a folder is expected"),
        (errno.EISDIR, "a folder where a file is expected"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_why_something_cannot_be_written(tmp_path, number, found):
    with pytest.raises(StorageError) as caught, writing(tmp_path):
        raise OSError(number, os.strerror(number))
    assert found in caught.value.found
    assert caught.value.must == f"{tmp_path} must be writable."
    assert caught.value.do


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(StorageError, match="a file where a folder is expected"):
        RunFolder(tmp_path / "run")
    assert (tmp_path / "run").read_text() == "mine"
