"""What is particular to objects on a disk: files, restarts, other processes, and disks that fail."""

import errno
import json
import os
import shutil
import socket
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from specimens import Clock, Specimen, put, specimen

from kvlink.core.errors import DamagedObject, StoreFull, StoreUnusable
from kvlink.store import DiskStore, folder

FIRST, SECOND, THIRD = (specimen(seed) for seed in range(3))
SIZE = FIRST.data.nbytes
MINUTE = 60.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path, clock: Clock) -> DiskStore:
    return DiskStore(root, clock=clock)


def path_of(root: Path, one: Specimen) -> Path:
    return root / "objects" / one.name[:2] / one.name[2:4] / f"{one.name}.raw.safetensors"


def litter(root: Path, age: float, clock: Clock, size: int = 100) -> Path:
    """Leave what a writer leaves that was killed in the middle of a write."""
    path = path_of(root, THIRD).with_name(f"{path_of(root, THIRD).name}.{'0' * 16}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(THIRD.data[:size]).ljust(size, b"\0"))
    os.utime(path, (clock.now - age, clock.now - age))
    return path


def files(root: Path) -> set[str]:
    return {path.name for path in root.rglob("*") if path.is_file()} - {"settings.json", "settings.lock"}


def failing(code: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def test_files_lie_two_levels_deep_and_belong_to_their_owner_alone(store: DiskStore, root: Path) -> None:
    put(store, FIRST)
    path = path_of(root, FIRST)
    assert path.read_bytes() == FIRST.data
    for file in (path, root / "settings.json", root / "settings.lock"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for made in (root, root / "quarantine", *path.parents[:3]):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_objects_and_settings_survive_a_restart(store: DiskStore, root: Path, clock: Clock) -> None:
    put(store, FIRST)
    store.keep_setting("sink", [1, 2])
    again = DiskStore(root, clock=clock)
    assert again.names() == {FIRST.name}
    assert again.stats().used_bytes == SIZE
    assert again.setting("sink") == [1, 2]
    assert again.keep_setting("sink", [3]) == [1, 2]
    assert again.get(FIRST.name, ["raw"]).object.decode().equals(FIRST.entry)


def test_the_order_of_use_survives_a_restart(store: DiskStore, root: Path, clock: Clock) -> None:
    put(store, FIRST, SECOND)
    os.utime(path_of(root, FIRST), (clock.now - 10, clock.now - 10))
    os.utime(path_of(root, SECOND), (clock.now - 20, clock.now - 20))
    put(DiskStore(root, budget_bytes=2 * SIZE, clock=clock), THIRD)
    assert store.names() == {FIRST.name, THIRD.name}


def test_a_use_is_noted_at_most_once_a_minute(store: DiskStore, root: Path, clock: Clock) -> None:
    put(store, FIRST)
    put_at = clock.now
    for later, noted in ((30, put_at), (59, put_at), (60, put_at + 60), (100, put_at + 60), (121, put_at + 121)):
        clock.now = put_at + later
        assert store.get(FIRST.name, ["raw"])
        assert path_of(root, FIRST).stat().st_mtime == noted


def test_a_clock_set_back_neither_blinds_nor_empties_the_store(store: DiskStore, root: Path, clock: Clock) -> None:
    put(store, FIRST)
    fresh = litter(root, 0, clock)
    clock.now -= 100_000
    store.gc()
    assert fresh.exists()
    assert store.get(FIRST.name, ["raw"])
    assert path_of(root, FIRST).stat().st_mtime == clock.now
    again = DiskStore(root, budget_bytes=4 * SIZE, clock=clock)
    put(store, THIRD)
    clock.now -= 100_000
    put(again, SECOND)
    assert again.stats().used_bytes == 3 * SIZE + 100


def test_what_other_processes_add_is_seen_at_once(store: DiskStore, root: Path, clock: Clock) -> None:
    put(DiskStore(root, clock=clock), FIRST)
    assert store.names() == {FIRST.name}
    assert store.get(FIRST.name, ["raw"])


def test_what_other_processes_remove_is_a_miss(store: DiskStore, root: Path) -> None:
    put(store, FIRST, SECOND)
    path_of(root, FIRST).unlink()
    shutil.rmtree(path_of(root, SECOND).parents[1])
    assert store.get(FIRST.name, ["raw"]) is store.get(SECOND.name, ["raw"]) is None
    assert store.stat(FIRST.name) == {}
    assert store.names() == set()
    assert store.stats().quarantined == 0


def test_a_store_whose_whole_folder_was_deleted_goes_on(store: DiskStore, root: Path, clock: Clock) -> None:
    put(store, FIRST)
    shutil.rmtree(root)
    assert store.get(FIRST.name, ["raw"]) is None
    assert store.setting("sink") is None
    assert list(store.verify()) == []
    put(store, SECOND)
    store.keep_setting("sink", 1)
    assert DiskStore(root, clock=clock).names() == {SECOND.name}
    shutil.rmtree(root)
    assert store.keep_setting("sink", 2) == 2


def test_bytes_of_other_processes_count_at_the_latest_after_half_a_minute(root: Path, clock: Clock) -> None:
    store = DiskStore(root, budget_bytes=2 * SIZE, clock=clock)
    put(DiskStore(root, clock=clock), FIRST, SECOND)
    assert store.stats().used_bytes == 0
    clock.now += 31
    put(store, THIRD)
    assert len(store.names()) == 2
    assert THIRD.name in store.names()
    assert store.stats().used_bytes == 2 * SIZE


def test_room_that_other_processes_made_is_found_before_anything_is_evicted(root: Path, clock: Clock) -> None:
    store = DiskStore(root, budget_bytes=2 * SIZE, clock=clock)
    put(store, FIRST, SECOND)
    path_of(root, FIRST).unlink()
    put(store, THIRD)
    assert store.names() == {SECOND.name, THIRD.name}
    assert store.stats().evictions == 0


def test_what_others_evict_at_the_same_moment_is_room_as_well(
    root: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(root, budget_bytes=2 * SIZE, clock=clock)
    put(store, FIRST)
    clock.now += 100
    put(store, SECOND)
    rescan = store._room.rescan

    def rescan_and_lose() -> object:
        found = rescan()
        path_of(root, FIRST).unlink()
        return found

    monkeypatch.setattr(store._room, "rescan", rescan_and_lose)
    put(store, THIRD)
    assert store.names() == {SECOND.name, THIRD.name}
    assert (store.stats().evictions, store.stats().used_bytes) == (0, 2 * SIZE)


def test_a_lease_does_not_see_what_happens_to_its_file(store: DiskStore, root: Path) -> None:
    put(store, FIRST)
    with store.get(FIRST.name, ["raw"]) as lease:
        path_of(root, FIRST).write_bytes(bytes(SIZE))
        assert lease.object.decode().equals(FIRST.entry)


def test_a_file_renamed_to_another_fingerprint_is_quarantined(store: DiskStore, root: Path) -> None:
    put(store, FIRST, SECOND)
    path_of(root, FIRST).replace(path_of(root, SECOND))
    assert store.get(SECOND.name, ["raw"]) is None
    assert [path.name for path in (root / "quarantine").iterdir()] == [path_of(root, SECOND).name]


def test_swapped_files_are_both_quarantined(store: DiskStore, root: Path) -> None:
    put(store, FIRST, SECOND)
    path_of(root, FIRST).write_bytes(SECOND.data)
    path_of(root, SECOND).write_bytes(FIRST.data)
    assert store.get(FIRST.name, ["raw"]) is store.get(SECOND.name, ["raw"]) is None
    assert store.stats().quarantined == 2


@pytest.mark.parametrize("length", [0, 1, 8, 100, SIZE - 1])
def test_a_truncated_file_is_quarantined(store: DiskStore, root: Path, length: int) -> None:
    put(store, FIRST)
    os.truncate(path_of(root, FIRST), length)
    assert store.get(FIRST.name, ["raw"]) is None
    assert store.stats().quarantined == 1


def link(path: Path) -> None:
    elsewhere = path.parents[4] / "elsewhere"
    elsewhere.write_bytes(FIRST.data)
    path.symlink_to(elsewhere)


def dangle(path: Path) -> None:
    path.symlink_to("nowhere")


def listen(path: Path) -> None:
    # The path of a socket has at most 107 characters, a name in a store is longer: make it elsewhere.
    with socket.socket(socket.AF_UNIX) as listener:
        here = Path.cwd()
        os.chdir(path.parent)
        try:
            listener.bind("s")
        finally:
            os.chdir(here)
    path.with_name("s").replace(path)


def stretch(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**36)


@pytest.mark.parametrize("squat", [link, dangle, os.mkfifo, Path.mkdir, listen, stretch])
def test_what_is_no_plain_file_of_sane_size_is_set_aside_unread(
    store: DiskStore, root: Path, squat: Callable[[Path], None]
) -> None:
    path_of(root, FIRST).parent.mkdir(parents=True)
    squat(path_of(root, FIRST))
    assert store.get(FIRST.name, ["raw"]) is None
    assert store.stats().quarantined == 1
    assert not os.path.lexists(path_of(root, FIRST))
    put(store, FIRST)
    assert store.get(FIRST.name, ["raw"]).object.decode().equals(FIRST.entry)


def test_the_target_of_a_link_is_not_touched(store: DiskStore, root: Path, tmp_path: Path) -> None:
    path_of(root, FIRST).parent.mkdir(parents=True)
    link(path_of(root, FIRST))
    put(store, FIRST)
    assert not path_of(root, FIRST).is_symlink()
    assert (tmp_path / "elsewhere").read_bytes() == FIRST.data


def test_deleting_removes_what_is_quarantined_too(store: DiskStore, root: Path) -> None:
    put(store, FIRST)
    os.truncate(path_of(root, FIRST), 100)
    store.get(FIRST.name, ["raw"])
    put(store, FIRST, SECOND)
    assert store.delete(FIRST.name) == 1
    assert files(root) == {path_of(root, SECOND).name}
    assert not path_of(root, FIRST).parent.exists()


def test_a_folder_that_another_process_removes_while_it_is_listed_holds_nothing_to_delete(
    store: DiskStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, FIRST)
    seen = Path.is_dir

    def then_removed(path: Path) -> bool:
        try:
            return seen(path)
        finally:
            if path == path_of(root, FIRST).parent:
                shutil.rmtree(path)

    monkeypatch.setattr(Path, "is_dir", then_removed)  # asked by glob before it lists
    assert store.delete(FIRST.name) == 0
    assert not path_of(root, FIRST).parent.exists()


def test_an_object_quarantined_twice_is_kept_and_counted_once(store: DiskStore, root: Path) -> None:
    for _ in range(2):
        put(store, FIRST)
        os.truncate(path_of(root, FIRST), SIZE - 1)
        assert store.get(FIRST.name, ["raw"]) is None
    before = store.stats()
    assert before.quarantined == 2
    store.gc()
    assert before.used_bytes == SIZE + 1  # what was cut off is noticed by the next scan
    assert store.stats().used_bytes == 0


def test_what_is_quarantined_counts_and_goes_first(root: Path, clock: Clock) -> None:
    store = DiskStore(root, budget_bytes=2 * SIZE, clock=clock)
    put(store, FIRST)
    clock.now += 100
    put(store, SECOND)
    os.utime(path_of(root, SECOND), (clock.now + 1, clock.now + 1))
    data = bytearray(SECOND.data)
    data[-1] ^= 1
    path_of(root, SECOND).write_bytes(data)
    assert store.get(SECOND.name, ["raw"]) is None
    assert store.stats().used_bytes == 2 * SIZE
    put(store, THIRD)
    assert store.names() == {FIRST.name, THIRD.name}
    assert list((root / "quarantine").iterdir()) == []
    assert store.stats().evictions == 0


def test_litter_of_a_killed_writer_is_invisible_counted_and_removed_when_old(root: Path, clock: Clock) -> None:
    store = DiskStore(root, budget_bytes=2 * SIZE, clock=clock)
    fresh = litter(root, age=3599, clock=clock)
    settings = root / "settings.json.0123456789abcdef.tmp"
    settings.write_bytes(b"{")
    os.utime(settings, (0, 0))
    again = DiskStore(root, budget_bytes=2 * SIZE, clock=clock)
    assert files(root) == {fresh.name}
    assert again.names() == set()
    assert list(again.verify()) == []
    assert again.get(THIRD.name, ["raw"]) is None
    assert again.stats().used_bytes == 100
    clock.now += 2
    assert store.gc().num_litter == 1
    assert files(root) == set()


def test_a_file_that_is_being_written_is_never_evicted(root: Path, clock: Clock) -> None:
    store = DiskStore(root, budget_bytes=2 * SIZE, clock=clock)
    fresh = litter(root, age=0, clock=clock, size=2 * SIZE)
    clock.now += MINUTE
    with pytest.raises(StoreFull, match=f"needs {SIZE} bytes, and {2 * SIZE} of the budget of {2 * SIZE} are in use"):
        put(store, FIRST)
    clock.now += 3600
    put(store, FIRST)
    assert not fresh.exists()


def test_gc_removes_litter_quarantine_empty_folders_and_what_is_over_the_budget(root: Path, clock: Clock) -> None:
    store = DiskStore(root, clock=clock)
    for one in (FIRST, SECOND, THIRD):
        put(store, one)
        clock.now += 100
    os.truncate(path_of(root, SECOND), SIZE - 1)
    store.get(SECOND.name, ["raw"])
    litter(root, age=4000, clock=clock)
    (root / "objects" / "00" / "11").mkdir(parents=True)
    report = DiskStore(root, clock=clock).gc()  # opening has removed the litter
    assert (report.num_litter, report.num_quarantined, report.num_evicted, report.num_folders) == (0, 1, 0, 2)
    assert report.freed_bytes == SIZE - 1
    report = DiskStore(root, budget_bytes=SIZE, clock=clock).gc()
    assert (report.num_evicted, report.freed_bytes) == (1, SIZE)
    assert store.names() == {THIRD.name}
    assert sorted((root / "objects").rglob("*")) == [*sorted(path_of(root, THIRD).parents[:2]), path_of(root, THIRD)]


def test_verify_reports_every_file_and_moves_none(store: DiskStore, root: Path) -> None:
    objects = [specimen(seed) for seed in range(7)]
    put(store, *objects)
    before = [path_of(root, one) for one in objects]
    os.truncate(before[1], 10)
    before[2].write_bytes(objects[3].data)
    misplaced = before[3].replace(root / "objects" / before[3].name)
    newer = before[4].replace(before[4].with_name(f"{objects[4].name}.zip.safetensors"))
    before[5].unlink()
    before[5].symlink_to(before[6])
    verdicts = {verdict.path: verdict for verdict in store.verify()}
    assert set(verdicts) == {before[0], before[1], before[2], misplaced, newer, before[5], before[6]}
    assert {path for path, verdict in verdicts.items() if verdict.error is None} == {before[0], before[6]}
    assert (verdicts[before[0]].name, verdicts[before[0]].codec) == (objects[0].name, "raw")
    assert verdicts[before[0]].num_bytes == SIZE
    assert "claims" in verdicts[before[1]].error
    assert objects[3].name in verdicts[before[2]].error
    for path in (misplaced, newer):
        assert (verdicts[path].name, verdicts[path].codec) == (None, None)
        assert "name and place" in verdicts[path].error
    assert "link" in verdicts[before[5]].error
    assert store.stats().quarantined == 0
    assert store.names() == {objects[seed].name for seed in (0, 1, 2, 5, 6)}


def test_verify_reports_what_cannot_be_read_and_skips_what_vanished(
    store: DiskStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, FIRST, SECOND)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing(errno.EACCES))
        assert {verdict.error for verdict in store.verify()} == {"[Errno 13] Permission denied"}
    with monkeypatch.context() as patch:
        patch.setattr("kvlink.store.disk.read_whole", lambda *_, **__: None)
        assert list(store.verify()) == []
    verdicts = store.verify()
    next(verdicts)
    for one in (FIRST, SECOND):
        path_of(root, one).unlink()
    assert list(verdicts) == []


def test_objects_of_codecs_this_version_does_not_know_are_left_alone_but_deleted_by_name(
    store: DiskStore, root: Path
) -> None:
    put(store, FIRST, SECOND)
    newer = path_of(root, FIRST).replace(path_of(root, FIRST).with_name(f"{FIRST.name}.zip.safetensors"))
    assert store.names() == {SECOND.name}
    assert store.stat(FIRST.name) == {}
    store.gc()
    assert newer.exists()
    assert store.delete(FIRST.name) == 1
    assert not newer.exists()


@pytest.mark.parametrize("entry", ["photo.jpg", ".git", "objects"])
def test_a_foreign_folder_is_refused_and_left_as_it_is(root: Path, entry: str) -> None:
    (root / entry).mkdir(parents=True)
    with pytest.raises(StoreUnusable, match=rf"{root} .*holds {entry}.*choose a new or an empty folder"):
        DiskStore(root)
    assert [path.name for path in root.iterdir()] == [entry]


def test_an_empty_folder_and_one_whose_maker_was_killed_are_taken(root: Path) -> None:
    root.mkdir()
    (root / "settings.lock").touch()
    (root / "settings.json.0123.tmp").touch()
    put(DiskStore(root), FIRST)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": 2, "settings": {}}', "is of format 2, and this version reads 1"),
        ('{"format": 1, "settings": []}', "is not the settings of a store"),
        ("{", "is not the settings of a store"),
        ("[]", "is not the settings of a store"),
        ("", "is not the settings of a store"),
        ("\udcff", "is not the settings of a store"),
    ],
)
def test_a_folder_of_another_format_is_refused(store: DiskStore, root: Path, text: str, message: str) -> None:
    (root / "settings.json").write_bytes(text.encode(errors="surrogateescape"))
    for call in (lambda: DiskStore(root), lambda: store.setting("a"), lambda: store.keep_setting("a", 1)):
        with pytest.raises(StoreUnusable, match=f"settings.json {message}; choose another folder"):
            call()


def test_many_can_open_a_new_folder_at_once_and_no_setting_is_lost(root: Path) -> None:
    def work(number: int) -> object:
        DiskStore(root).keep_setting(f"own {number}", number)
        return DiskStore(root).keep_setting("first", number)

    with ThreadPoolExecutor(8) as pool:
        firsts = set(pool.map(work, range(24)))
    store = DiskStore(root)
    assert firsts == {store.setting("first")}
    assert [store.setting(f"own {number}") for number in range(24)] == list(range(24))


def test_settings_are_readable_for_humans(store: DiskStore, root: Path) -> None:
    store.keep_setting("sink", [1])
    assert json.loads((root / "settings.json").read_text()) == {"format": 1, "settings": {"sink": [1]}}


def test_a_path_through_a_file_is_unusable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "store"):
        with pytest.raises(StoreUnusable, match=f"cannot open {root}"):
            DiskStore(root)


def test_a_file_in_place_of_a_folder_is_unusable(store: DiskStore, root: Path) -> None:
    path_of(root, FIRST).parents[1].touch()
    for call in (
        lambda: put(store, FIRST),
        lambda: store.get(FIRST.name, ["raw"]),
        lambda: store.stat(FIRST.name),
    ):
        with pytest.raises(StoreUnusable, match=f"{FIRST.name}.raw"):
            call()
    assert store.stats().quarantined == 0


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.EMFILE])
def test_a_folder_that_refuses_is_unusable(store: DiskStore, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    put(store, FIRST)
    monkeypatch.setattr(os, "open", failing(code))
    for call in (lambda: put(store, FIRST), lambda: store.get(FIRST.name, ["raw"])):
        with pytest.raises(StoreUnusable, match=os.strerror(code)):
            call()


@pytest.mark.parametrize("call", ["write", "fsync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_with_figures_and_nothing_is_left_behind(
    store: DiskStore, root: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    put(store, FIRST)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(code))
        with pytest.raises(StoreFull, match=rf"{SECOND.name}.*\({SIZE} bytes\).* bytes are free"):
            put(store, SECOND)
        with pytest.raises(StoreFull):
            put(store, FIRST)
    assert files(root) == {path_of(root, FIRST).name}
    assert not path_of(root, SECOND).parents[1].exists()
    assert store.stats().used_bytes == SIZE
    assert store.get(FIRST.name, ["raw"]).object.decode().equals(FIRST.entry)


def test_short_writes_and_short_reads_are_continued(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    write, readv = os.write, os.readv
    monkeypatch.setattr(os, "write", lambda to, data: write(to, data[:100]))
    monkeypatch.setattr(os, "readv", lambda at, buffers: readv(at, [buffers[0][:77]]))
    put(store, FIRST)
    assert store.get(FIRST.name, ["raw"]).object.decode().equals(FIRST.entry)


def test_a_file_that_shrinks_while_it_is_read_is_a_miss(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, FIRST)
    monkeypatch.setattr(os, "readv", lambda *_: 0)
    assert store.get(FIRST.name, ["raw"]) is None


def test_a_sector_that_cannot_be_read_is_damage(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, FIRST)
    monkeypatch.setattr(os, "readv", failing(errno.EIO))
    assert store.get(FIRST.name, ["raw"]) is None
    assert store.stats().quarantined == 1


def test_another_failure_to_read_is_no_damage(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, FIRST)
    monkeypatch.setattr(os, "readv", failing(errno.ENOMEM))
    with pytest.raises(StoreUnusable):
        store.get(FIRST.name, ["raw"])
    assert store.names() == {FIRST.name}


def test_of_two_readers_of_a_damaged_object_one_quarantines_it(
    store: DiskStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, FIRST)

    def lose(path: Path, **_: object) -> None:
        path.unlink()
        raise DamagedObject

    monkeypatch.setattr("kvlink.store.disk.read_whole", lose)
    assert store.get(FIRST.name, ["raw"]) is None
    assert store.stats().quarantined == 0


@pytest.mark.parametrize("losses", [8, 9])
def test_a_folder_removed_while_it_is_written_to_is_made_again(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, losses: int
) -> None:
    write_whole, left = folder.write_whole, iter(range(losses))

    def sweep(path: Path, *args: object, **kwargs: object) -> None:
        if next(left, None) is not None:
            path.parent.rmdir()
        write_whole(path, *args, **kwargs)

    monkeypatch.setattr(folder, "write_whole", sweep)
    if losses < 9:
        put(store, FIRST)
        assert store.names() == {FIRST.name}
    else:
        with pytest.raises(StoreUnusable):
            put(store, FIRST)


def test_removing_a_file_that_is_gone_is_no_error(store: DiskStore, root: Path) -> None:
    assert store._room.remove(path_of(root, FIRST)) is False


def test_a_real_disk_of_256_kib_fills_up_and_stays_sound(small_disk: Path, clock: Clock) -> None:
    store = DiskStore(small_disk / "store", clock=clock)
    objects = [specimen(seed, tokens=400) for seed in range(8)]
    size = objects[0].data.nbytes
    with pytest.raises(StoreFull, match=rf"\({size} bytes\).*No space left.* \d+ bytes are free"):
        put(store, *objects)
    kept = store.stats().puts
    assert kept > 1
    assert files(small_disk / "store") == {path_of(small_disk, one).name for one in objects[:kept]}
    assert all(verdict.error is None for verdict in store.verify())
    store.delete(objects[0].name)
    put(store, objects[kept])
    with pytest.raises(StoreFull):
        store.keep_setting("note", "x" * 300_000)
    assert store.setting("note") is None


def test_a_read_only_disk_can_be_read_and_says_that_it_cannot_be_written(
    small_disk: Path, clock: Clock, remount: Callable[[str], None]
) -> None:
    root = small_disk / "store"
    writer = DiskStore(root, clock=clock)
    put(writer, FIRST, SECOND)
    os.truncate(path_of(root, SECOND), 100)
    litter(root, age=4000, clock=clock)
    writer.keep_setting("sink", 1)
    clock.now += 1000
    remount("ro")
    store = DiskStore(root, clock=clock)
    assert store.get(FIRST.name, ["raw"]).object.decode().equals(FIRST.entry)
    assert store.get(SECOND.name, ["raw"]) is None
    assert store.stats().quarantined == 1
    assert store.keep_setting("sink", 2) == 1
    for call in (
        lambda: put(store, THIRD),
        lambda: store.delete(FIRST.name),
        lambda: store.keep_setting("other", 1),
        store.gc,
    ):
        with pytest.raises(StoreUnusable, match="Read-only file system"):
            call()


@pytest.mark.parametrize(("begun", "opened"), [(b"ours", b"theirs"), (b"ours", None), (None, b"ours")])
def test_a_folder_begun_with_another_secret_is_refused_and_left_as_it_is(root: Path, begun, opened) -> None:
    signed = specimen(secret=begun)
    DiskStore(root, secret=begun).put(signed.name, "raw", signed.data)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with pytest.raises(StoreUnusable, match="pass what the store was begun with"):
        DiskStore(root, secret=opened)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
    assert DiskStore(root, secret=begun).get(signed.name, ["raw"]) is not None
