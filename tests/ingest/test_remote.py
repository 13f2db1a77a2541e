"""Sources that fsspec reads: the same commits as from a directory, each byte read once, and every failure ours."""

from __future__ import annotations

import functools
import http.server
import io
import itertools
import os
import random
import tarfile
import threading
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ingest_cases import assert_clean, digests, directory_digests, new_repository, refused

from mpfs.errors import BadInputError, FormatError, NotFoundError, UnsafeInputError
from mpfs.ingest.remote import RemoteFile, RemoteSource, _shown, open_source
from mpfs.objects import Commit
from mpfs.repository import Repository
from mpfs.testing.checkpoints import TensorContent, index_bytes, safetensors_bytes, write
from mpfs.testing.containers import npz_bytes


def shard(name: str, size: int = 30_000) -> bytes:
    rng = np.random.default_rng(len(name))
    return safetensors_bytes([TensorContent(f"{name}.{n}", "F32", (size,), rng.bytes(4 * size)) for n in range(3)])


FILES = {
    "model-00001-of-00002.safetensors": shard("a"),
    "model-00002-of-00002.safetensors": shard("bc"),
    "model.safetensors.index.json": index_bytes(
        {f"model-0000{n}-of-00002.safetensors": [f"{name}.{i}" for i in range(3)] for n, name in ((1, "a"), (2, "bc"))}
    ),
    "config.json": b"{}",
    "sub/empty.txt": b"",
    ".cache/x": b"skipped",
}
KEPT = {path: content for path, content in FILES.items() if not path.startswith(".cache")}


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    with new_repository(tmp_path / "repo") as made:
        yield made


def zipped(files: Mapping[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return stream.getvalue()


def tarred(files: Mapping[str, bytes], mode: Any = "w") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as archive:
        for path, content in files.items():
            info = tarfile.TarInfo(path)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def in_memory(name: str, files: Mapping[str, bytes]) -> str:
    system = fsspec.filesystem("memory")
    for path, content in files.items():
        system.pipe(f"/{name}/{path}", content)
    return f"memory://{name}"


@pytest.fixture(autouse=True)
def _clean_memory() -> Iterator[None]:
    yield
    fsspec.filesystem("memory").store.clear()


def same(repository: Repository, source: str | Path, tmp_path: Path) -> None:
    """A source gives the snapshot that the directory gives."""
    write(tmp_path / "plain", FILES)
    expected = repository.import_checkpoint(tmp_path / "plain", "plain")
    report = repository.import_checkpoint(source, "main")
    assert report.snapshot == expected.snapshot
    assert report.deduplicated_blocks > 0
    commits = [repository._store.objects.get(Commit, item.commit) for item in (report, expected)]
    assert commits[0].manifest == commits[1].manifest
    for one, other in (("main", source), ("plain", source), ("main", tmp_path / "plain")):
        found = repository.verify(one, other)
        assert found.ok, found.problems
        assert found.bytes == sum(len(content) for content in KEPT.values())
    repository.checkout("main", tmp_path / "out")
    assert directory_digests(tmp_path / "out") == digests(KEPT)
    assert_clean(repository)


class TestDirectories:
    def test_memory(self, repository: Repository, tmp_path: Path) -> None:
        same(repository, in_memory("m", FILES), tmp_path)
        (entry, *_) = repository.log("main")
        assert entry.commit.source == "memory://m"
        assert entry.commit.message == "Import m"

    def test_file(self, repository: Repository, tmp_path: Path) -> None:
        same(repository, f"file://{write(tmp_path / 'in', FILES)}", tmp_path)

    @pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
    def test_zip(self, repository: Repository, tmp_path: Path, compression: int) -> None:
        write(tmp_path, {"x.zip": zipped({f"top/model/{path}": data for path, data in FILES.items()}, compression)})
        same(repository, f"zip://top/model::file://{tmp_path / 'x.zip'}", tmp_path)

    @pytest.mark.parametrize("name", ["x.zip", "x.whl", "x.tar", "x.tar.gz", "x.tgz"])
    def test_archives_on_disk(self, repository: Repository, tmp_path: Path, name: str) -> None:
        files = {f"top/model/{path}": data for path, data in FILES.items()}
        if "zip" in name or "whl" in name:
            content = zipped({**files, "top-1.dist-info/METADATA": b"x"} if "whl" in name else files)
        else:
            content = tarred(files, "w" if name.endswith(".tar") else "w:gz")
        write(tmp_path, {name: content})
        same(repository, tmp_path / name, tmp_path)


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Answers ranges, as every real server of models does."""

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        asked = self.headers.get("Range")
        if asked is None or not path.is_file():
            super().do_GET()
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        data = path.read_bytes()
        piece = data[int(first) : int(last) + 1 if last else len(data)]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{int(first) + len(piece) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(piece)))
        self.end_headers()
        self.wfile.write(piece)

    def end_headers(self) -> None:
        self.send_header("Accept-Ranges", "bytes")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


class Whole(http.server.SimpleHTTPRequestHandler):
    """Knows no ranges."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@pytest.fixture(params=[Ranges, Whole])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    pytest.importorskip("aiohttp")
    write(tmp_path / "served", {"m.safetensors": shard("a"), "cut.safetensors": shard("a")[:-100]})
    (tmp_path / "served/page.safetensors").write_text("<!DOCTYPE html><html>Login</html>")
    handler = functools.partial(request.param, directory=str(tmp_path / "served"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


def test_http(repository: Repository, tmp_path: Path, server: str) -> None:
    repository.import_checkpoint(f"{server}/m.safetensors", "main")
    repository.checkout("main", tmp_path / "out")
    assert (tmp_path / "out/m.safetensors").read_bytes() == shard("a")
    assert repository.verify("main", f"{server}/m.safetensors").ok
    (cut,) = repository.verify("main", f"{server}/cut.safetensors").problems
    assert (cut.kind, cut.path) == ("size", "m.safetensors")
    with pytest.raises(NotFoundError, match="there is nothing"):
        repository.verify("main", f"{server}/none.safetensors")
    with refused(repository, FormatError, match=r"cut\.safetensors: .* 100 are missing"):
        repository.import_checkpoint(f"{server}/cut.safetensors", "main")
    with refused(repository, FormatError, match="web page"):
        repository.import_checkpoint(f"{server}/page.safetensors", "main")
    with refused(repository, NotFoundError, match="there is nothing"):
        repository.import_checkpoint(f"{server}/none.safetensors", "main")


def test_s3(repository: Repository, tmp_path: Path) -> None:
    """Ranges are asked for by the workers at the same time."""
    pytest.importorskip("s3fs", reason="NOT TESTED AGAINST S3: needs the extra s3 (s3fs)")
    server_module = pytest.importorskip("moto.server", reason="NOT TESTED AGAINST S3: needs moto[server]")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        options = {"key": "test", "secret": "test", "client_kwargs": {"endpoint_url": f"http://{host}:{port}"}}
        bucket = f"models-{uuid.uuid4()}"
        system = fsspec.filesystem("s3", **options)
        system.mkdir(bucket)
        for path, content in KEPT.items():
            system.pipe(f"{bucket}/team/m/{path}", content)
        first = repository.import_checkpoint(f"s3://{bucket}/team/m", "main", storage_options=options)
        repository.checkout("main", tmp_path / "out")
        assert directory_digests(tmp_path / "out") == digests(KEPT)
        # By their ETags the files are known again.
        assert repository.verify("main", f"s3://{bucket}/team/m", storage_options=options).ok
        again = repository.import_checkpoint(f"s3://{bucket}/team/m", "again", storage_options=options)
        assert (again.snapshot, again.known_bytes) == (first.snapshot, first.bytes)
        with refused(repository, NotFoundError):
            repository.import_checkpoint(f"s3://{bucket}/none", "other", storage_options=options)
    finally:
        server.stop()


def test_torch_and_npz_files(repository: Repository, tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save({"w": torch.arange(5000.0)}, stream)
    url = in_memory("m", {"pytorch_model.bin": stream.getvalue(), "config.json": b"{}"})
    report = repository.import_checkpoint(url, "main")
    assert torch.equal(repository.tensor("main", "w"), torch.arange(5000.0))
    manifest = repository._store.objects.get(Commit, report.commit).manifest
    assert {item.path: item.sha256 for item in manifest} == digests(
        {"pytorch_model.bin": stream.getvalue(), "config.json": b"{}"}
    )
    in_memory("n", {"m.npz": npz_bytes({"w": np.arange(3.0)})})
    repository.import_checkpoint("memory://n/m.npz", "other")
    assert repository.tensor("other", "w").tolist() == [0, 1, 2]


class TestVerify:
    def test_differences_in_a_place(self, repository: Repository) -> None:
        repository.import_checkpoint(in_memory("m", KEPT), "main")
        weights = bytearray(KEPT["model-00002-of-00002.safetensors"])
        weights[-1] ^= 1
        other = {**KEPT, "model-00002-of-00002.safetensors": bytes(weights), "new.txt": b"x"}
        del other["config.json"]
        report = repository.verify("main", in_memory("n", other))
        assert [(item.kind, item.path) for item in report.problems] == [
            ("missing", "config.json"),
            ("sha256", "model-00002-of-00002.safetensors"),
            ("extra", "new.txt"),
        ]

    def test_of_one_file_under_another_name(self, repository: Repository) -> None:
        repository.import_checkpoint(in_memory("m", {"m.safetensors": shard("a")}) + "/m.safetensors", "main")
        in_memory("n", {"copy.safetensors": shard("a"), "other.safetensors": shard("b")})
        assert repository.verify("main", "memory://n/copy.safetensors").ok
        assert [item.kind for item in repository.verify("main", "memory://n/other.safetensors").problems] == ["sha256"]

    def test_a_damaged_archive(self, repository: Repository, tmp_path: Path) -> None:
        repository.import_checkpoint(in_memory("m", KEPT), "main")
        content = bytearray(zipped(KEPT, zipfile.ZIP_STORED))
        content[100_000] ^= 1
        write(tmp_path, {"x.zip": bytes(content)})
        with pytest.raises(BadInputError, match="CRC"):
            repository.verify("main", tmp_path / "x.zip")

    def test_a_change_meanwhile(self, repository: Repository) -> None:
        url = in_memory("m", KEPT)
        repository.import_checkpoint(url, "main")
        with pytest.raises(FormatError, match="changed while"):
            repository.verify(
                "main", url, progress=lambda done, total: in_memory("m", {"config.json": b"{  }"}) and None
            )


class TestRefusals:
    @pytest.mark.parametrize(
        ("url", "error", "match"),
        [
            ("memory://none", NotFoundError, "there is nothing"),
            ("nope://x/y", BadInputError, "not a source that fsspec can read"),
            ("zip://a::memory://none.zip", NotFoundError, "there is nothing"),
        ],
    )
    def test_what_is_not_there(self, repository: Repository, url: str, error: Any, match: str) -> None:
        with refused(repository, error, match=match):
            repository.import_checkpoint(url, "main")

    @pytest.mark.parametrize("name", ["x.zip", "x.whl", "x.tar.gz"])
    @pytest.mark.parametrize(
        "content", [b"", b"<html>", os.urandom(3000), zipped(FILES)[:-500], tarred(FILES, "w:gz")[:900]]
    )
    def test_damaged_archives(self, repository: Repository, tmp_path: Path, name: str, content: bytes) -> None:
        write(tmp_path, {name: content})
        with pytest.raises(BadInputError):
            repository.import_checkpoint(tmp_path / name, "main")
        assert list(repository.refs()) == []
        assert_clean(repository)

    def test_a_damaged_record(self, repository: Repository, tmp_path: Path) -> None:
        content = bytearray(zipped(KEPT, zipfile.ZIP_STORED))
        content[100_000] ^= 1
        write(tmp_path, {"x.zip": bytes(content)})
        with refused(repository, BadInputError, match="CRC"):
            repository.import_checkpoint(tmp_path / "x.zip", "main")

    def test_an_encrypted_archive(self, repository: Repository, tmp_path: Path) -> None:
        content = bytearray(zipped(KEPT))
        for magic, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
            start = 0
            while (start := content.find(magic, start)) >= 0:
                content[start + at] |= 1
                start += 4
        write(tmp_path, {"x.zip": bytes(content)})
        with refused(repository, FormatError, match="encrypted"):
            repository.import_checkpoint(tmp_path / "x.zip", "main")

    def test_a_path_that_leads_out(self, repository: Repository, tmp_path: Path) -> None:
        write(
            tmp_path,
            {"x.zip": zipped({"a/../../model.safetensors": FILES["model-00001-of-00002.safetensors"], "b": b""})},
        )
        with refused(repository, UnsafeInputError, match="unsafe path"):
            repository.import_checkpoint(tmp_path / "x.zip", "main")

    def test_files_beside_the_model_are_left_out(self, repository: Repository, tmp_path: Path) -> None:
        files = {f"package/model/{path}": content for path, content in KEPT.items()}
        write(tmp_path, {"x.whl": zipped({**files, "package/__init__.py": b"x", "package-1.dist-info/METADATA": b"y"})})
        report = repository.import_checkpoint(tmp_path / "x.whl", "main")
        assert report.notes == ("x.whl: the model is in model; 2 files outside of it left out",)
        repository.checkout("main", tmp_path / "out")
        assert directory_digests(tmp_path / "out") == digests(KEPT)

    def test_components_keep_their_directories(self, repository: Repository, tmp_path: Path) -> None:
        files = {f"pipe/{part}/model.safetensors": shard("a") for part in ("unet", "vae")}
        write(tmp_path, {"x.zip": zipped({**files, "pipe/model_index.json": b"{}"})})
        assert repository.import_checkpoint(tmp_path / "x.zip", "main").notes == ()
        assert {name.partition("/")[0] for name in repository.tensors("main")} == {"unet", "vae"}

    def test_an_archive_without_weights(self, repository: Repository, tmp_path: Path) -> None:
        write(tmp_path, {"x.zip": zipped({"a.txt": b"x", "b.txt": b"y"})})
        with refused(repository, BadInputError, match="no weights"):
            repository.import_checkpoint(tmp_path / "x.zip", "main")

    def test_a_change_meanwhile(self, repository: Repository) -> None:
        url = in_memory("m", FILES)

        def progress(done: int, total: int) -> None:
            in_memory("m", {"config.json": b"{ }"})

        with refused(repository, FormatError, match="changed while it was being imported"):
            repository.import_checkpoint(url, "main", progress=progress)


@given(seed=st.integers(0, 1000), pieces=st.integers(1, 12))
def test_a_file_is_read_once_and_in_order(seed: int, pieces: int) -> None:
    """Whatever order its ranges are asked for in."""
    rng = random.Random(seed)
    content = rng.randbytes(rng.randrange(1, 5000))
    in_memory("m", {"x": content})
    tree = open_source("memory://m/x")
    assert not isinstance(tree, Path)
    file = tree.file()
    assert isinstance(file, RemoteFile)
    source = RemoteSource(file)
    edges = sorted({0, len(content), *(rng.randrange(len(content)) for _ in range(pieces))})
    ranges = [source.range(start, end - start) for start, end in itertools.pairwise(edges)]
    starts = edges[:-1]
    order = list(range(len(ranges)))
    rng.shuffle(order)
    for number in order:
        assert ranges[number].read(0, ranges[number].size) == content[starts[number] : edges[number + 1]]
    assert not source._forward.is_open
    assert source.sha256()
    source.close()


def test_secrets_are_not_shown() -> None:
    assert _shown("https://me:word@host/a/m.safetensors?X-Amz-Signature=1") == "https://host/a/m.safetensors"
    assert _shown("zip://in::https://u:p@host/x.zip?k=1") == "zip://in::https://host/x.zip"
    assert _shown("s3://bucket/key") == "s3://bucket/key"


def test_wheels_of_real_models(repository: Repository, real_models: Callable[[str], Path], tmp_path: Path) -> None:
    root = real_models("lpips")
    files = {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*.pth"))[:2]}
    name = sorted(files)[0]
    write(tmp_path, {"x.whl": zipped(files)})
    report = repository.import_checkpoint(f"zip://{name}::file://{tmp_path / 'x.whl'}", "main")
    expected = torch.load(root / name, map_location="cpu", weights_only=True)
    assert report.tensors == len(expected)
