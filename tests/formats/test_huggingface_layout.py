"""mpfs.formats.huggingface: what each file of a directory is taken for, and which directories are refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from mpfs.errors import BadInputError, FormatError, NotFoundError, UnsafeInputError
from mpfs.formats.huggingface import Layout, read_index, scan
from mpfs.formats.safetensors import read_header

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"


def weights(*names: str) -> bytes:
    return save({name: torch.zeros(1) for name in names})


def index(weight_map: object) -> bytes:
    return json.dumps({"metadata": {"total_size": 4}, "weight_map": weight_map}).encode()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "model"


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def torch_file(path: Path) -> bytes:
    torch.save({"a": torch.zeros(1)}, path)
    content = path.read_bytes()
    path.unlink()
    return content


@pytest.fixture
def archive(tmp_path: Path) -> bytes:
    return torch_file(tmp_path / "scratch")


def taken(layout: Layout) -> dict[str, str]:
    return {weight.path: weight.prefix for weight in layout.weights}


def others(layout: Layout) -> list[str]:
    return [file.path for file in layout.files]


class TestSafetensors:
    def test_one_file(self, root: Path) -> None:
        write(root, {"model.safetensors": weights("a"), "config.json": b"{}", ".gitattributes": b"", "1/x.json": b""})
        layout = scan(root)
        (weight,) = layout.weights
        assert (weight.path, weight.format, weight.prefix) == ("model.safetensors", "safetensors", "")
        assert weight.location == root / "model.safetensors"
        assert (weight.header, weight.raw_header) == read_header(weight.location)
        assert others(layout) == [".gitattributes", "1/x.json", "config.json"]
        assert layout.files[1].location == root / "1/x.json"
        assert layout.root == str(root)

    def test_relative_directory(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write(root, {"model.safetensors": weights("a")})
        monkeypatch.chdir(root.parent)
        assert scan(Path("model")).weights[0].location == root / "model.safetensors"

    def test_adapter(self, root: Path) -> None:
        write(root, {"adapter_model.safetensors": weights("a"), "adapter_config.json": b"{}"})
        assert taken(scan(root)) == {"adapter_model.safetensors": ""}

    def test_sub_directories_have_prefixes(self, root: Path) -> None:
        write(
            root,
            {
                "unet/diffusion_pytorch_model.safetensors": weights("a"),
                "unet/diffusion_pytorch_model.fp16.safetensors": weights("a"),
                "vae/deep/model.safetensors": weights("a"),
                "model_index.json": b"{}",
            },
        )
        assert taken(scan(root)) == {
            "unet/diffusion_pytorch_model.fp16.safetensors": "unet/diffusion_pytorch_model.fp16.safetensors:",
            "unet/diffusion_pytorch_model.safetensors": "unet/",
            "vae/deep/model.safetensors": "vae/deep/",
        }

    def test_shards_of_an_index_and_a_file_beside_it(self, root: Path) -> None:
        write(
            root,
            {
                "model-1.safetensors": weights("a", "b"),
                "model-2.safetensors": weights("c"),
                "consolidated.safetensors": weights("a", "b", "c"),
                "model.safetensors.index.json": index(
                    {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
                ),
            },
        )
        layout = scan(root)
        assert taken(layout) == {
            "consolidated.safetensors": "consolidated.safetensors:",
            "model-1.safetensors": "",
            "model-2.safetensors": "",
        }
        assert others(layout) == ["model.safetensors.index.json"]

    def test_files_without_collisions_are_one_model(self, root: Path) -> None:
        write(root, {"x.safetensors": weights("a"), "y.safetensors": weights("b")})
        assert taken(scan(root)) == {"x.safetensors": "", "y.safetensors": ""}

    def test_model_safetensors_wins_a_collision(self, root: Path) -> None:
        write(root, {"model.safetensors": weights("a"), "ema.safetensors": weights("a"), "z.safetensors": weights("c")})
        assert taken(scan(root)) == {
            "ema.safetensors": "ema.safetensors:",
            "model.safetensors": "",
            "z.safetensors": "z.safetensors:",
        }

    def test_unclear_collision(self, root: Path) -> None:
        write(root, {"x.safetensors": weights("a", "b"), "y.safetensors": weights("a")})
        with pytest.raises(
            FormatError, match=r'more than one file has 1 tensor of the same name: "a" \(files: "x.*", "y'
        ):
            scan(root)

    def test_names_that_collide_through_their_prefix(self, root: Path) -> None:
        write(root, {"model.safetensors": weights("unet/a"), "unet/model.safetensors": weights("a")})
        with pytest.raises(FormatError, match="unet/a"):
            scan(root)

    @pytest.mark.parametrize("content", [POINTER, b"", weights("a")[:-1], b"<!doctype html>"])
    def test_damaged_weights_are_an_error_not_a_side_file(self, root: Path, content: bytes) -> None:
        write(root, {"model.safetensors": weights("a"), "sub/extra.safetensors": content})
        with pytest.raises(FormatError, match=r"extra\.safetensors"):
            scan(root)


class TestIndex:
    def refused(self, root: Path, weight_map: object, **files: bytes) -> str:
        write(root, {f"{name}.safetensors": content for name, content in files.items()})
        write(root, {"model.safetensors.index.json": index(weight_map)})
        with pytest.raises(FormatError) as caught:
            scan(root)
        assert "index.json" in caught.value.message
        return caught.value.message

    def test_missing_shards(self, root: Path) -> None:
        said = self.refused(root, {"a": "m1.safetensors", "b": "m2.safetensors"}, m1=weights("a"))
        assert '"m2.safetensors"' in said
        assert '"m1.safetensors"' not in said

    def test_missing_shards_when_there_is_no_shard_at_all(self, root: Path) -> None:
        assert '"m1.safetensors"' in self.refused(root, {"a": "m1.safetensors"})

    def test_tensor_in_another_shard(self, root: Path) -> None:
        weight_map = {"a": "m1.safetensors", "b": "m1.safetensors"}
        assert '"b" should be in "m1.safetensors"' in self.refused(root, weight_map, m1=weights("a"), m2=weights("b"))

    def test_tensor_in_two_shards(self, root: Path) -> None:
        weight_map = {"a": "m1.safetensors", "b": "m2.safetensors"}
        said = self.refused(root, weight_map, m1=weights("a"), m2=weights("a", "b"))
        assert '"a" (files: "m1.safetensors", "m2.safetensors")' in said

    def test_shard_that_is_not_safetensors(self, root: Path) -> None:
        write(root, {"config.json": b"{}"})
        assert '"config.json"' in self.refused(root, {"a": "config.json"})

    @pytest.mark.parametrize("shard", ["../m.safetensors", "/etc/passwd", "sub/m.safetensors", "..", "", "a\\b", "a\0"])
    def test_shard_outside(self, root: Path, shard: str) -> None:
        write(root, {"model.safetensors": weights("a"), "model.safetensors.index.json": index({"a": shard})})
        with pytest.raises(UnsafeInputError, match="not a file beside it"):
            scan(root)

    @pytest.mark.parametrize(
        "content",
        [b"", b"[]", b"{}", b"\xff", b"{", index([]), index({"a": 1}), POINTER, b'{"weight_map":{"a":"x","a":"x"}}'],
    )
    def test_not_an_index(self, root: Path, content: bytes) -> None:
        write(root, {"model.safetensors": weights("a"), "model.safetensors.index.json": content})
        with pytest.raises(FormatError, match=r"index\.json"):
            scan(root)

    def test_several_indexes(self, root: Path) -> None:
        files = {"m.safetensors": weights("a"), "x.safetensors.index.json": index({"a": "m.safetensors"})}
        write(root, {**files, "y.safetensors.index.json": index({"a": "gone.safetensors"})})
        with pytest.raises(FormatError, match="several indexes"):
            scan(root)
        write(root, {"model.safetensors.index.json": index({"a": "m.safetensors"})})
        assert taken(scan(root)) == {"m.safetensors": ""}

    def test_read_index(self, root: Path) -> None:
        write(root, {"i.json": index({"b": "x.bin", "a": "y.bin"})})
        assert list(read_index(root / "i.json").items()) == [("b", "x.bin"), ("a", "y.bin")]
        with pytest.raises(NotFoundError):
            read_index(root / "nope.json")


class TestTorch:
    def test_side_files_beside_safetensors(self, root: Path, archive: bytes) -> None:
        write(root, {"model.safetensors": weights("a"), "pytorch_model.bin": archive, "x.pt": b"anything"})
        layout = scan(root)
        assert taken(layout) == {"model.safetensors": ""}
        assert others(layout) == ["pytorch_model.bin", "x.pt"]

    def test_pytorch_model(self, root: Path, archive: bytes) -> None:
        write(
            root, {"pytorch_model.bin": archive, "optimizer.pt": archive, "rng_state_0.pth": archive, "x.pth": archive}
        )
        (weight,) = scan(root).weights
        assert (weight.path, weight.format, weight.header, weight.raw_header) == (
            "pytorch_model.bin",
            "torch",
            None,
            b"",
        )

    def test_shards(self, root: Path, archive: bytes) -> None:
        write(root, {"unet/p1.bin": archive, "unet/p2.bin": archive, "unet/training_args.bin": archive})
        write(root, {"unet/pytorch_model.bin.index.json": index({"a": "p1.bin", "b": "p2.bin", "c": "p1.bin"})})
        assert taken(scan(root)) == {"unet/p1.bin": "unet/", "unet/p2.bin": "unet/"}
        (root / "unet/p2.bin").unlink()
        with pytest.raises(FormatError, match=r"p2\.bin"):
            scan(root)

    @pytest.mark.parametrize("name", ["a.pt", "a.pth", "a.bin", "a.ckpt", "a.pth.tar"])
    def test_single_file_in_the_root(self, root: Path, archive: bytes, name: str) -> None:
        write(root, {name: archive, "vocab.bin": b"not torch", "optimizer.pt": archive, "sub/b.pt": archive})
        assert taken(scan(root)) == {name: ""}

    def test_several_files(self, root: Path, archive: bytes) -> None:
        write(root, {"a.pt": archive, "b.ckpt": archive})
        with pytest.raises(FormatError, match=r'several torch files.*"a\.pt", "b\.ckpt"'):
            scan(root)

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "a.pt", "b.bin"])
    def test_pointer(self, root: Path, name: str) -> None:
        with pytest.raises(FormatError, match="git lfs pull"):
            scan(write(root, {name: POINTER}))

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "a.pt"])
    def test_empty(self, root: Path, name: str) -> None:
        with pytest.raises(FormatError, match="the file is empty"):
            scan(write(root, {name: b""}))


class TestTree:
    def test_no_weights(self, root: Path) -> None:
        write(root, {"config.json": b"{}", "model.h5": b"x", "sub/a.pt": b"\x80", "words.bin": b"words"})
        with pytest.raises(BadInputError, match=r'no weights found; looked for .*does not read "model\.h5"') as caught:
            scan(root)
        assert str(root) in caught.value.message

    def test_not_a_directory(self, root: Path) -> None:
        with pytest.raises(NotFoundError):
            scan(root)
        write(root, {"model.safetensors": weights("a")})
        with pytest.raises(BadInputError, match="not a directory"):
            scan(root / "model.safetensors")

    def test_skipped(self, root: Path) -> None:
        write(root, {"model.safetensors": weights("a"), ".hidden": b"", ".github/x.yml": b""})
        write(root, {".git/config": b"", ".cache/x/model.safetensors": b"", ".mpfs/data.mdb": b""})
        write(root, {"a.lock": b"", "sub/b.incomplete": b"", "sub/.git": b""})
        layout = scan(root)
        assert others(layout) == [".github/x.yml", ".hidden"]
        assert layout.skipped == (".cache", ".git", ".mpfs", "a.lock", "sub/.git", "sub/b.incomplete")

    @pytest.mark.parametrize(
        "name", ["model.safetensors.incomplete", "model.safetensors.part", "a.bin.part", "a.pt.part"]
    )
    def test_unfinished_download(self, root: Path, name: str) -> None:
        with pytest.raises(FormatError, match="unfinished download"):
            scan(write(root, {"model.safetensors": weights("a"), name: b""}))

    def test_the_hub_s_cache(self, root: Path, tmp_path: Path) -> None:
        write(tmp_path, {"blobs/1": weights("a"), "blobs/2": b"{}"})
        root.mkdir()
        (root / "model.safetensors").symlink_to("../blobs/1")
        (root / "config.json").symlink_to("../blobs/2")
        layout = scan(root)
        assert taken(layout) == {"model.safetensors": ""}
        assert layout.weights[0].location == root / "model.safetensors"
        assert others(layout) == ["config.json"]

    def test_dangling_symlink(self, root: Path) -> None:
        write(root, {"model.safetensors": weights("a")})
        (root / "config.json").symlink_to("../blobs/gone")
        with pytest.raises(FormatError, match=r"config\.json: this symlink leads nowhere \(to \.\./blobs/gone"):
            scan(root)
        (root / "config.json").unlink()
        (root / "config.json").symlink_to("config.json")
        with pytest.raises(FormatError, match="leads nowhere"):
            scan(root)

    def test_symlinked_directories(self, root: Path, tmp_path: Path) -> None:
        write(tmp_path, {"shared/model.safetensors": weights("a")})
        write(root, {"config.json": b"{}"})
        (root / "unet").symlink_to(tmp_path / "shared")
        (root / "vae").symlink_to(tmp_path / "shared")
        assert taken(scan(root)) == {"unet/model.safetensors": "unet/", "vae/model.safetensors": "vae/"}
        (root / "loop").symlink_to(root)
        with pytest.raises(FormatError, match="leads back"):
            scan(root)

    def test_pipes_and_undecodable_names(self, root: Path) -> None:
        write(root, {"model.safetensors": weights("a")})
        os.mkfifo(root / "pipe")
        with pytest.raises(BadInputError, match="neither a file nor a directory"):
            scan(root)
        (root / "pipe").unlink()
        with open(os.fsencode(root) + b"/\xff.json", "wb"):
            pass
        with pytest.raises(BadInputError, match="not valid UTF-8"):
            scan(root)
