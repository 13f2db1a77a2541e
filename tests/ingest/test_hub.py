"""Models of the hub, from a small server that speaks its API: no hub can be reached here."""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from ingest_cases import digests, directory_digests, new_repository, refused

from mpfs.errors import BadInputError, NotFoundError
from mpfs.ingest.hub import is_hub_model
from mpfs.objects import Commit
from mpfs.repository import Repository
from mpfs.testing.checkpoints import TensorContent, safetensors_bytes

pytest.importorskip("huggingface_hub")

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "model.safetensors": safetensors_bytes([TensorContent("w", "F32", (5000,), bytes(range(200)) * 100)]),
    "config.json": b'{"a": 1}',
    "1_Pooling/config.json": b"{}",
    "README.md": b"---\nbase_model: org/base\n---\n",
}


class Hub(http.server.BaseHTTPRequestHandler):
    """One model, `org/name`, with the revisions main, v1 and its commit."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        api = path.removeprefix("/api/models/org/name")
        if path in ("/api/models/org/name", *(f"/api/models/org/name/revision/{r}" for r in ("main", "v1", COMMIT))):
            self.answer({"id": "org/name", "modelId": "org/name", "sha": COMMIT, "siblings": [], "private": False})
        elif api.startswith(f"/tree/{COMMIT}"):
            inside = api.removeprefix(f"/tree/{COMMIT}").strip("/")
            self.answer(self.tree(inside, "recursive=true" in self.path.lower()))
        elif path.startswith(f"/org/name/resolve/{COMMIT}/"):
            self.content(FILES[path.removeprefix(f"/org/name/resolve/{COMMIT}/")])
        else:
            self.answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        paths = [path for path in FILES if path in unquote(body)]
        self.answer([self.entry(path) for path in paths])

    def tree(self, inside: str, recursive: bool) -> list[dict[str, Any]]:
        below = [path for path in FILES if not inside or path.startswith(f"{inside}/")]
        start = len(inside) + 1 if inside else 0
        entries = [self.entry(path) for path in below if recursive or "/" not in path[start:]]
        folders = sorted({path.rpartition("/")[0] for path in below if "/" in path[start:]})
        return entries + [{"type": "directory", "oid": "0" * 40, "size": 0, "path": folder} for folder in folders]

    def entry(self, path: str) -> dict[str, Any]:
        return {"type": "file", "oid": f"{len(path):040d}", "size": len(FILES[path]), "path": path}

    def content(self, data: bytes) -> None:
        asked = self.headers.get("Range")
        first, _, last = (asked or "bytes=0-").removeprefix("bytes=").partition("-")
        piece = data[int(first) : int(last) + 1 if last else len(data)]
        self.send_response(206 if asked else 200)
        self.send_header("Content-Range", f"bytes {first}-{int(first) + len(piece) - 1}/{len(data)}")
        self.send_header("ETag", '"0123"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.finish_with(piece)

    def answer(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        for name, text in (headers or {}).items():
            self.send_header(name, text)
        self.finish_with(json.dumps(value).encode())

    def finish_with(self, data: bytes) -> None:
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[dict[str, str | bool]]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield {"endpoint": f"http://127.0.0.1:{running.server_address[1]}", "token": False}
        running.shutdown()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    monkeypatch.chdir(tmp_path)
    with new_repository(tmp_path / "repo") as made:
        yield made


@pytest.mark.parametrize(
    "source", ["org/name", "org/name@v1", f"org/name@{COMMIT}", "hf://org/name", "hf://org/name@v1"]
)
def test_a_model(repository: Repository, tmp_path: Path, hub: dict[str, Any], source: str) -> None:
    report = repository.import_checkpoint(source, "main", storage_options=hub)
    assert report.stated_bases == ("org/base",)
    commit = repository._store.objects.get(Commit, report.commit)
    assert commit.source == f"hf://org/name@{COMMIT}"
    assert {item.path: item.sha256 for item in commit.manifest} == digests(FILES)
    assert repository.verify("main", source, storage_options=hub).ok
    repository.checkout("main", tmp_path / "out")
    assert directory_digests(tmp_path / "out") == digests(FILES)


def test_one_file(repository: Repository, hub: dict[str, Any]) -> None:
    repository.import_checkpoint("hf://org/name@v1/model.safetensors", "main", storage_options=hub)
    assert list(repository.tensors("main")) == ["w"]


def test_what_is_not_there(repository: Repository, hub: dict[str, Any]) -> None:
    with refused(repository, NotFoundError, match=r"no such path, and the hub shows us no such model .*HTTP 404"):
        repository.import_checkpoint("org/other", "main", storage_options=hub)
    with refused(repository, NotFoundError, match="HTTP 404"):
        repository.import_checkpoint("org/name@v9", "main", storage_options=hub)
    with refused(repository, BadInputError, match="not a model's id"):
        repository.import_checkpoint("hf://name", "main", storage_options=hub)
    gone = {"endpoint": "http://127.0.0.1:9", "token": False}
    with refused(repository, BadInputError, match="the hub cannot be reached"):
        repository.import_checkpoint("org/name", "main", storage_options=gone)


@pytest.fixture
def silent() -> Iterator[dict[str, str | bool]]:
    """A hub that takes connections, and never says anything."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield {"endpoint": f"http://127.0.0.1:{listening.getsockname()[1]}", "token": False}


def test_a_hub_that_does_not_answer_is_given_up(
    repository: Repository, silent: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = time.monotonic()
    with refused(
        repository, BadInputError, match="no such path, and the hub cannot be reached .*(timed out|no answer)"
    ):
        repository.import_checkpoint("org/name", "main", storage_options=silent)
    assert 4.0 < time.monotonic() - started < 9.0
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT", 1)
    started = time.monotonic()
    with refused(repository, BadInputError, match="the hub cannot be reached"):
        repository.import_checkpoint("org/name", "main", storage_options=silent)
    assert time.monotonic() - started < 4.0


def test_name_servers_that_do_not_answer_are_given_up(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking an address up knows no timeout."""
    asked = threading.Event()

    def nothing(*_: object, **__: object) -> list[Any]:
        asked.set()
        time.sleep(3.0)
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", nothing)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT", 1)
    started = time.monotonic()
    with refused(repository, BadInputError, match=r"TimeoutError: no answer from the hub in 1 s"):
        repository.import_checkpoint("org/name", "main", storage_options={"endpoint": "http://hub.invalid"})
    assert asked.is_set()
    assert time.monotonic() - started < 2.9


def linear(*models: str) -> dict[str, Any]:
    """A recipe."""
    return {"merge_method": "linear", "models": [{"model": name} for name in models], "parameters": {"weight": 0.125}}


def in_a_process(repository: Repository, hub: dict[str, Any], recipe: dict[str, Any], *, into: str) -> dict[str, Any]:
    """`mpfs merge --json` with the hub where huggingface_hub's environment variables say that it is."""
    path = repository.path.parent / "recipe.json"
    path.write_text(json.dumps(recipe))
    script = "from mpfs_cli.main import main; main()"
    arguments = ["-r", str(repository.path), "merge", str(path), "--into", into, "--json"]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "HF_ENDPOINT": hub["endpoint"], "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def test_models_in_recipes(repository: Repository, hub: dict[str, Any]) -> None:
    """One that is neither ref, commit nor path is imported from the hub, at the commit that its revision is."""
    repository.import_checkpoint("org/name", "mine", storage_options=hub)
    repository.branch("org/other", "mine")
    repository.tag("org/v1", "mine")
    models = ("mine", "org/name@v1", "org/other", "org/other@org/v1")
    report = in_a_process(repository, hub, linear(*models), into="merged")
    assert repository.tensors("merged") == repository.tensors("mine")
    plan = repository.find_plan(report["plan"]).plan
    assert [model.name for model in plan.models] == list(models)
    commit = repository._store.objects.get(Commit, plan.models[1].commit)
    assert commit.source == f"hf://org/name@{COMMIT}"
    assert repository.resolve("imported/org/name-v1") == plan.models[1].commit
    assert [ref.name for ref in repository.refs() if ref.name.startswith("imported/")] == ["imported/org/name-v1"]
    failed = in_a_process(repository, hub, linear("mine", "org/nothing"), into="other")
    assert failed["error"]["kind"] == "not_found"
    assert "HTTP 404" in failed["error"]["message"]


def test_a_revision_that_is_not_here(repository: Repository, hub: dict[str, Any]) -> None:
    """Where MODEL is a ref, MODEL@REVISION is not asked of the hub."""
    repository.import_checkpoint("org/name", "org/other", storage_options=hub)
    with pytest.raises(NotFoundError, match="no-such"):
        repository.plan(linear("org/other", "org/other@no-such"))


def test_recipes_without_the_extra(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, hub: dict[str, Any]
) -> None:
    repository.import_checkpoint("org/name", "mine", storage_options=hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(NotFoundError, match=r"org/name: there is no such path; .*mpfs\[hub\]"):
        repository.plan(linear("mine", "org/name"))


def test_paths_are_no_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for path in ("models/none", "name", "./org/name", "/org/name", "a/b/c", "org/name/model.safetensors", "../a/b", ""):
        assert not is_hub_model(path)
    assert is_hub_model("org/name")
    assert is_hub_model("Qwen/Qwen3-0.6B@main")
