"""What is damaged, or changes while it is read, is refused; refs and objects stay as they were."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ingest_cases import assert_clean, directory_digests, new_repository, object_counts, refused

from mpfs.errors import BadInputError, FormatError, MPFSError, NoSpaceError, NotFoundError
from mpfs.formats import huggingface
from mpfs.ingest import pipeline
from mpfs.ingest import source as source_module
from mpfs.objects import Tensor
from mpfs.repository import Repository
from mpfs.stats import staging
from mpfs.store import StagedBlock
from mpfs.testing.checkpoints import DAMAGES, TensorContent, index_bytes, safetensors_bytes, write

CONTENT = safetensors_bytes(
    [
        TensorContent("a", "F32", (4, 4), bytes(64)),
        TensorContent("big", "BF16", (100, 80), bytes(range(250)) * 64),
        TensorContent("c", "U8", (3,), b"abc"),
    ],
    {"format": "pt"},
)


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    """A repository with one commit in it."""
    with new_repository(tmp_path / "repo") as made:
        write(tmp_path / "first", {"model.safetensors": CONTENT, "config.json": b"{}"})
        made.import_checkpoint(tmp_path / "first", "main")
        yield made


class TestDamage:
    @pytest.mark.parametrize("damage", DAMAGES)
    @pytest.mark.parametrize("ref", ["main", "new"])
    def test_of_safetensors(self, repository: Repository, tmp_path: Path, damage: str, ref: str) -> None:
        broken = DAMAGES[damage](CONTENT)
        assert broken != CONTENT
        write(tmp_path / "in", {"a.safetensors": safetensors_bytes([]), "model.safetensors": broken})
        with refused(repository, FormatError, match="model.safetensors"):
            repository.import_checkpoint(tmp_path / "in", ref)
        with refused(repository, FormatError, match="model.safetensors"):
            repository.import_checkpoint(tmp_path / "in/model.safetensors", ref)

    @settings(max_examples=60)
    @given(data=st.data())
    def test_any_byte_of_a_header(self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
        """A changed byte either gives an error of ours, or a file that comes back as it is."""
        folder = tmp_path_factory.mktemp("byte")
        header = 8 + int.from_bytes(CONTENT[:8], "little")
        content = bytearray(CONTENT)
        content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
        write(folder / "in", {"model.safetensors": bytes(content)})
        with new_repository(folder / "repo") as repository:
            try:
                repository.import_checkpoint(folder / "in", "main")
            except BadInputError:
                assert not any(object_counts(repository).values())
                return
            repository.checkout("main", folder / "out")
            assert directory_digests(folder / "out") == directory_digests(folder / "in")

    def test_of_an_index(self, repository: Repository, tmp_path: Path) -> None:
        files = {
            "m-1.safetensors": CONTENT,
            "model.safetensors.index.json": index_bytes({"m-1.safetensors": ["a", "z"]}),
        }
        with refused(repository, FormatError, match='"z"'):
            repository.import_checkpoint(write(tmp_path / "in", files), "main")
        files["model.safetensors.index.json"] = index_bytes({"m-2.safetensors": ["a"]})
        with refused(repository, FormatError, match=r'lacks: "m-2\.safetensors"'):
            repository.import_checkpoint(write(tmp_path / "in", files), "main")

    def test_sources_that_are_none(self, repository: Repository, tmp_path: Path) -> None:
        (tmp_path / "folder").mkdir()
        (tmp_path / "text.txt").write_text("x")
        os.mkfifo(tmp_path / "pipe.safetensors")
        cases: list[tuple[Path, type[MPFSError]]] = [
            (tmp_path / "nowhere", NotFoundError),
            (tmp_path / "nul\0", NotFoundError),
            (tmp_path / "folder", BadInputError),
            (tmp_path / "text.txt", BadInputError),
            (tmp_path / "pipe.safetensors", BadInputError),
        ]
        for path, error in cases:
            with refused(repository, error):
                repository.import_checkpoint(path, "new")

    def test_names_that_no_snapshot_can_hold(self, repository: Repository, tmp_path: Path) -> None:
        write(tmp_path / "in", {"model.safetensors": CONTENT, "back\\slash.txt": b""})
        with refused(repository, BadInputError, match="back"):
            repository.import_checkpoint(tmp_path / "in", "main")
        odd = tmp_path / os.fsdecode(b"m\xff.safetensors")
        odd.write_bytes(CONTENT)
        with refused(repository, BadInputError, match="UTF-8"):
            repository.import_checkpoint(odd, "main")


Change = Callable[[Path], object]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1000)


def rewrite(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def replace(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    os.replace(other, path)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


CHANGES = [truncate, rewrite, replace, grow, os.remove]


class TestChangesMeanwhile:
    @pytest.mark.parametrize("change", CHANGES)
    @pytest.mark.parametrize("name", ["model.safetensors", "notes.txt"])
    def test_after_some_was_read(self, repository: Repository, tmp_path: Path, change: Change, name: str) -> None:
        root = write(tmp_path / "in", {"model.safetensors": CONTENT, "notes.txt": b"x" * 50_000})

        def progress(done: int, total: int) -> None:
            if not changed:
                changed.append(done)
                change(root / name)

        changed: list[int] = []
        with refused(repository, FormatError, match=name):
            repository.import_checkpoint(root, "main", progress=progress)
        assert changed

    @pytest.mark.parametrize("change", [truncate, replace, os.remove])
    def test_before_a_read(
        self, repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change
    ) -> None:
        root = write(tmp_path / "in", {"model.safetensors": CONTENT})
        once = threading.Lock()
        original = source_module.SourceFile._pread

        def pread(self: source_module.SourceFile, offset: int, size: int) -> bytes | memoryview:
            if once.acquire(blocking=False):
                change(root / "model.safetensors")
            return original(self, offset, size)

        monkeypatch.setattr(source_module.SourceFile, "_pread", pread)
        with refused(repository, FormatError):
            repository.import_checkpoint(root, "main")

    def test_the_header_after_it_was_parsed(
        self, repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root = write(tmp_path / "in", {"model.safetensors": CONTENT})
        scan = huggingface.scan

        def scan_then_change(path: Path) -> huggingface.Layout:
            layout = scan(path)
            write(root, {"model.safetensors": CONTENT.replace(b'"a"', b'"b"')})
            return layout

        monkeypatch.setattr(huggingface, "scan", scan_then_change)
        with refused(repository, FormatError, match="changed"):
            repository.import_checkpoint(root, "main")

    @pytest.mark.parametrize("change", CHANGES)
    @pytest.mark.parametrize("is_zip", [True, False])
    def test_of_a_torch_file(
        self, repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change, is_zip: bool
    ) -> None:
        """A mapped file that becomes shorter is not touched any more: that would be the end of the process."""
        path = tmp_path / "x.pt"
        torch.save({"w": torch.randn(50_000)}, path, _use_new_zipfile_serialization=is_zip)
        reads: list[int] = []
        original = source_module.TensorBytes.read

        def read(self: source_module.TensorBytes, offset: int, size: int) -> bytes:
            reads.append(offset)
            if len(reads) == 5:
                os.truncate(path, 100) if change is truncate else change(path)
            return original(self, offset, size)

        monkeypatch.setattr(source_module.TensorBytes, "read", read)
        with refused(repository, FormatError, match="changed"):
            repository.import_checkpoint(path, "main", threads=1)


def open_descriptors() -> list[str]:
    return sorted(
        target
        for target in (os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _exists(fd))
        if "/in/" in target
    )


def _exists(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def import_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("mpfs-import", "mpfs-writer"))]


class TestFailures:
    """Whatever ends an import: no ref, no thread and no descriptor is left, and the next import works."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        tensors = [TensorContent(f"t{n}", "F32", (5000,), os.urandom(20_000)) for n in range(20)]
        return write(tmp_path / "in", {"model.safetensors": safetensors_bytes(tensors), "notes": b"x" * 9000})

    @pytest.fixture(autouse=True)
    def _nothing_is_left(self, repository: Repository, root: Path, tmp_path: Path) -> Iterator[None]:
        before = object_counts(repository), repository.refs()
        yield
        assert (object_counts(repository), repository.refs()) == before
        assert open_descriptors() == []
        assert import_threads() == []
        report = repository.import_checkpoint(root, "new")
        assert report.new_commit
        repository.checkout("new", tmp_path / "out")
        assert directory_digests(tmp_path / "out") == directory_digests(root)
        assert_clean(repository)

    @pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, MemoryError])
    def test_in_the_progress_callback(self, repository: Repository, root: Path, error: type[BaseException]) -> None:
        def progress(done: int, total: int) -> None:
            if done > total // 2:
                raise error

        with pytest.raises(error):
            repository.import_checkpoint(root, "new", progress=progress)

    def test_in_a_worker(self, repository: Repository, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[int] = []

        def stage(data: bytes, dtype: str, first: int) -> StagedBlock:
            calls.append(first)
            if len(calls) == 30:
                raise MemoryError("no more")
            return original(data, dtype, first)

        original = staging.stage_block
        monkeypatch.setattr(pipeline, "stage_block", stage)
        with pytest.raises(MemoryError, match="no more"):
            repository.import_checkpoint(root, "new")
        monkeypatch.undo()

    def test_of_the_disk_under_the_source(
        self, repository: Repository, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def pread(fd: int, size: int, offset: int) -> bytes:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "pread", pread)
        with pytest.raises(BadInputError, match=r"cannot be read: Input/output error"):
            repository.import_checkpoint(root, "new")
        monkeypatch.undo()

    def test_while_describing(self, repository: Repository, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def encode(self: Tensor) -> bytes:
            raise MemoryError

        monkeypatch.setattr(Tensor, "encode", encode)
        with pytest.raises(MemoryError):
            repository.import_checkpoint(root, "new")
        monkeypatch.undo()


def test_a_full_map(tmp_path: Path) -> None:
    large = [TensorContent(f"t{n}", "U8", (1 << 20,), os.urandom(1 << 20)) for n in range(12)]
    write(tmp_path / "large", {"model.safetensors": safetensors_bytes(large)})
    write(tmp_path / "small", {"model.safetensors": CONTENT})
    with Repository.create(tmp_path / "repo", block_size=4096, map_size=8 << 20) as repository:
        with refused(repository, NoSpaceError):
            repository.import_checkpoint(tmp_path / "large", "main")
        assert repository.import_checkpoint(tmp_path / "small", "main").new_commit
        assert_clean(repository)
