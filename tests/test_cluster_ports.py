"""Ports and temp folders of jobs that share a node: acceptance cases P-01 to P-09."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmlight.cluster.ports import (
    BLOCK,
    PortError,
    Ports,
    caches,
    candidates,
    check_sockets,
    container_name,
    ephemeral_range,
    forget,
    job_folder,
    make_caches,
    reserve,
    temp_folder,
)
from slurmlight.errors import UserError

USUAL = (32_768, 60_999)


def all_ports(ports: Ports) -> set[int]:
    return {*ports.named().values(), *ports.workers}


def test_p01_two_jobs_on_a_node() -> None:
    with reserve(1000000, 1) as first, reserve(1001024, 1) as second:
        assert all_ports(first.ports).isdisjoint(all_ports(second.ports))


def test_p01_second_job_moves_on_from_a_taken_block() -> None:
    with reserve(7, 1) as first, reserve(7, 1) as second:
        assert all_ports(first.ports).isdisjoint(all_ports(second.ports))
        assert any(str(first.ports.guard) in note for note in second.notes)


def test_block_is_free_again_after_close() -> None:
    with reserve(7, 1) as first:
        base = first.ports.base
    with reserve(7, 1) as again:
        assert again.ports.base == base


def test_p02_foreign_port_in_the_block() -> None:
    wanted = next(candidates(7, 1, ephemeral_range()[0]))
    with socket.socket() as foreign:
        foreign.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        foreign.bind(("127.0.0.1", wanted.workers[50]))  # bound, not even listening yet
        with reserve(7, 1) as mine:
            assert mine.ports.base != wanted.base
            assert any(str(wanted.workers[50]) in note for note in mine.notes)


@given(job=st.integers(1, 2**34), attempt=st.integers(1, 999), low=st.sampled_from([9000, 15000, 32768, 49152]))
def test_block_lies_below_the_ephemeral_range(job: int, attempt: int, low: int) -> None:
    ports = next(candidates(job, attempt, low))
    assert min(all_ports(ports)) >= 1024 and max(all_ports(ports)) < low


def test_p03_federated_job_id() -> None:
    with reserve(4227858999, 1) as mine:
        assert all(1024 <= port < ephemeral_range()[0] for port in all_ports(mine.ports))


def test_p04_low_ephemeral_range() -> None:
    with reserve(5, 1, (9000, 65000)) as mine:
        assert all(1024 <= port <= 8999 for port in all_ports(mine.ports))
        assert not any("safe" in note for note in mine.notes)


def test_p04_no_safe_range() -> None:
    with reserve(5, 1, (1024, 65535)) as mine:
        assert "no safe ports" in mine.notes[0]


def test_p05_no_port_has_two_roles() -> None:
    ports = Ports(20_000)
    single = list(ports.named().values())
    assert len(single) == len(set(single))
    assert set(single).isdisjoint(ports.workers)
    assert max(all_ports(ports)) < ports.base + BLOCK
    assert "dashboard" not in ports.named()
    assert len(ports.workers) >= 200


def test_nothing_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurmlight.cluster.ports._bind", lambda port: None)
    with pytest.raises(PortError, match="no 256 free ports"):
        reserve(7, 1)


@given(job=st.integers(1, 2**34), attempts=st.integers(1, 60))
def test_attempts_move_through_the_blocks(job: int, attempts: int) -> None:
    assert len({ports.base for ports in candidates(job, attempts, USUAL[0])}) == (USUAL[0] - 10_000) // BLOCK


# temp folders


def test_p06_temp_folder_does_not_follow_tmpdir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/lustre/project-text2sql/user1/scratch/jobs/tmp.t0016")
    folder = job_folder(4227858999) / "99"
    assert folder.parts[:2] == ("/", "tmp")
    check_sockets(folder)
    ray = f"{folder}/session_2026-11-29_17-26-47_592207_2944448/sockets/plasma_store"
    assert len(ray.encode()) <= 107


@pytest.mark.parametrize(
    ("letter", "length", "fits"),
    [("a", 43, True), ("a", 44, False), ("é", 43, False)],
    ids=["P-07-43", "P-07-44", "P-07-bytes"],
)
def test_p07_socket_length(letter: str, length: int, fits: bool) -> None:
    folder = "/tmp/" + letter * (length - 5)
    if fits:
        check_sockets(folder)
        return
    with pytest.raises(UserError, match=r"1\d\d > 107"):
        check_sockets(folder)


def test_p07_44_bytes_are_108() -> None:
    with pytest.raises(UserError, match="108 > 107"):
        check_sockets("/tmp/" + "a" * 39)


def test_p08_folder_of_another_user_is_not_touched(tmp_path: Path) -> None:
    root = Path("/tmp") / f"sl{os.getpid()}"
    root.mkdir()
    try:
        (root / "ray").mkdir(mode=0o700)
        folder = temp_folder(7, 1, root)
        assert list((root / "ray").iterdir()) == [] and "ray" not in folder.parts
        assert folder.stat().st_mode & 0o777 == 0o700
        assert temp_folder(7, 1, root) == folder  # the same attempt again
        assert temp_folder(7, 2, root) != folder  # P-09
        stranger = job_folder(8, root)
        stranger.symlink_to(tmp_path)
        with pytest.raises(UserError, match="belongs to someone else"):
            temp_folder(8, 1, root)
        if os.getuid() == 0:
            os.mkdir(job_folder(9, root))
            os.chown(job_folder(9, root), 12345, 12345)
            with pytest.raises(UserError, match="belongs to someone else"):
                temp_folder(9, 1, root)
    finally:
        import shutil

        shutil.rmtree(root)


def test_unwritable_root() -> None:
    with pytest.raises(UserError, match="cannot be made"):
        temp_folder(7, 1, Path("/proc"))


def test_p09_names_hold_the_attempt() -> None:
    assert container_name(7, 1) != container_name(7, 2)
    names = caches(7)
    assert set(names) == {"TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT"}
    assert all(path.startswith(str(job_folder(7))) for path in names.values())
    assert len(set(names.values())) == 3


def test_cache_folders_are_made_for_us_alone_and_forgotten_with_the_job(tmp_path: Path) -> None:
    made = make_caches(7, tmp_path)
    assert made == caches(7, tmp_path) == make_caches(7, tmp_path)
    assert all(Path(folder).stat().st_mode & 0o777 == 0o700 for folder in made.values())
    forget(7, tmp_path)
    forget(7, tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "elsewhere").mkdir()
    job_folder(8, tmp_path).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="someone else"):
        make_caches(8, tmp_path)
