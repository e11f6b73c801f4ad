"""Folders of replicas: each its own, gone with it, and never with another one."""

import subprocess
import sys
from pathlib import Path

from kvlink.cluster.ray_app.own_folder import LOCK, PREFIX, own_folder

VICTIM = """
import sys
from pathlib import Path
from kvlink.cluster.ray_app.own_folder import own_folder
with own_folder(Path(sys.argv[1])) as own:
    (own / "library").mkdir()
    (own / "library" / "texts").write_text("secret")
    print(own, flush=True)
    sys.stdin.read()
"""


def replicas(shared: Path) -> set[Path]:
    return set(shared.glob(f"{PREFIX}*"))


def test_a_folder_is_gone_with_its_block_and_all_else_stays(tmp_path: Path) -> None:
    shared = tmp_path / "a" / "library"
    with own_folder(shared) as one, own_folder(shared) as other:
        (shared / "library.db").touch()
        (one / "library").mkdir()
        assert replicas(shared) == {one, other}
        assert one.stat().st_mode & 0o777 == 0o700
    assert replicas(shared) == set()
    assert (shared / "library.db").exists()


def test_what_a_killed_replica_left_goes_with_the_next_one_and_the_living_keep_theirs(tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}unlocked").mkdir()
    with own_folder(tmp_path) as living:
        with subprocess.Popen(
            [sys.executable, "-c", VICTIM, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as victim:
            assert victim.stdout is not None
            left = Path(victim.stdout.readline().strip())
            assert replicas(tmp_path) == {living, left}
            with own_folder(tmp_path) as third:
                assert replicas(tmp_path) == {living, left, third}
            victim.kill()
        assert (left / "library" / "texts").exists()
        with own_folder(tmp_path) as last:
            assert replicas(tmp_path) == {living, last}
            assert (living / LOCK).exists()
