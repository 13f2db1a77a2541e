"""mpfs.formats.torch_file: state dicts are found, nothing is executed, and damage is reported as damage."""

from __future__ import annotations

import os
import pickle
import tarfile
import tempfile
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from mpfs.errors import BadInputError, FormatError, MPFSError, NotFoundError, UnsafeInputError
from mpfs.formats.safetensors import build_header
from mpfs.formats.torch_file import dtype_name, read_state_dict, tensor_bytes, tensor_shape

MODEL = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}


class Custom:
    pass


class Payload:
    """Runs a command in whoever unpickles it."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, ...]:
        return (os.system, (self.command,))


@pytest.fixture(params=["zip", "legacy"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[object], Path]:
    """Saves an object as a torch file, in both containers."""

    def save_object(value: object) -> Path:
        path = tmp_path / "model.pt"
        torch.save(value, path, _use_new_zipfile_serialization=request.param == "zip")
        return path

    return save_object


Saved = Callable[[object], Path]


class TestStateDict:
    def test_plain(self, saved: Saved) -> None:
        state = read_state_dict(saved(OrderedDict(MODEL)))
        assert list(state.tensors) == ["w", "b"]
        assert all(torch.equal(state.tensors[name], MODEL[name]) for name in MODEL)
        assert (state.key, state.skipped) == (None, ())

    def test_entries_that_are_no_tensors_are_listed(self, saved: Saved) -> None:
        state = read_state_dict(saved({**MODEL, "_extra_state": None, "n": 3, "meta": {"a": 1}}))
        assert list(state.tensors) == ["w", "b"]
        assert state.skipped == ("_extra_state", "n", "meta")

    def test_parameters_become_tensors_and_aliases_keep_their_memory(self, saved: Saved) -> None:
        tied = torch.nn.Parameter(torch.zeros(3))
        tensors = read_state_dict(saved({"a": tied, "b": tied})).tensors
        assert type(tensors["a"]) is torch.Tensor
        assert not tensors["a"].requires_grad
        assert tensors["a"].data_ptr() == tensors["b"].data_ptr()

    def test_training_checkpoint_has_one_candidate(self, saved: Saved) -> None:
        module = torch.nn.Linear(2, 2)
        adam = torch.optim.Adam(module.parameters())
        module(torch.ones(2)).sum().backward()
        adam.step()
        state = read_state_dict(
            saved(
                {
                    "epoch": 3,
                    "model": {"state_dict": module.state_dict(), "args": {"width": 2}},
                    "optimizer": adam.state_dict(),
                    "solver": adam.state_dict(),
                    "optimizer_states": [adam.state_dict()],
                    "lr_scheduler": {"best": torch.tensor(1.0)},
                    "callbacks": {"best": {"score": torch.tensor(1.0)}},
                }
            )
        )
        assert state.key == "model.state_dict"
        assert list(state.tensors) == ["weight", "bias"]
        assert state.skipped == (
            *("epoch", "optimizer", "solver", "optimizer_states", "lr_scheduler", "callbacks"),
            "model.args",
        )

    def test_several_candidates_are_listed_and_none_is_preferred(self, saved: Saved) -> None:
        path = saved({"state_dict": dict(MODEL), "ema": {"w": torch.zeros(1)}, "step": torch.tensor(1)})
        with pytest.raises(BadInputError) as caught:
            read_state_dict(path)
        assert caught.value.details["candidates"] == {".": 1, "state_dict": 2, "ema": 1}
        assert '--key: "." (1 tensor); "state_dict" (2 tensors); "ema" (1 tensor)' in caught.value.message
        assert list(read_state_dict(path, "state_dict").tensors) == ["w", "b"]
        assert list(read_state_dict(path, ".").tensors) == ["step"]
        assert read_state_dict(path, "ema").skipped == ("state_dict", "step")

    def test_wrong_key(self, saved: Saved) -> None:
        with pytest.raises(NotFoundError, match=r'no state dict at the key "nope"; the file has "a\.b" \(2 tensors\)'):
            read_state_dict(saved({"a": {"b": dict(MODEL)}}), "nope")

    def test_ambiguous_key(self, saved: Saved) -> None:
        with pytest.raises(BadInputError, match="ambiguous"):
            read_state_dict(saved({"a": {"b": dict(MODEL)}, "a.b": dict(MODEL)}), "a.b")

    def test_trainer_state_is_taken_only_when_it_is_named(self, saved: Saved) -> None:
        path = saved({"optimizer": {"momentum": {"w": torch.ones(1)}}, "epoch": 1})
        with pytest.raises(FormatError, match=r'only the state of a trainer: "optimizer.momentum" \(1 tensor\)'):
            read_state_dict(path)
        assert list(read_state_dict(path, "optimizer.momentum").tensors) == ["w"]

    def test_too_deep_or_with_other_keys_is_no_candidate(self, saved: Saved) -> None:
        for value in (
            {"a": {"b": {"c": {"d": {"e": MODEL}}}}},
            {0: torch.ones(1)},
            {"state": {0: MODEL}},
            {},
            {"a": 1},
        ):
            with pytest.raises(FormatError, match="no state dict"):
                read_state_dict(saved(value))
        assert read_state_dict(saved({"a": {"b": {"c": {"d": dict(MODEL)}}}})).key == "a.b.c.d"

    def test_a_mapping_that_holds_itself(self, saved: Saved) -> None:
        loop: dict[str, object] = {"model": dict(MODEL)}
        loop["self"] = loop
        assert read_state_dict(saved(loop)).key == "model"

    @pytest.mark.parametrize("value", [torch.ones(3), [torch.ones(3)], 3, "text"])
    def test_not_a_mapping(self, saved: Saved, value: object) -> None:
        with pytest.raises(FormatError, match="not a state dict"):
            read_state_dict(saved(value))


class TestUnsupportedTensors:
    @pytest.mark.parametrize(
        ("tensor", "said"),
        [
            (torch.zeros(2, dtype=torch.complex128), "complex128"),
            (torch.eye(2).to_sparse(), "sparse_coo"),
            (torch.zeros(2, device="meta"), "meta device"),
            (torch.zeros(1).expand(2**30), "expanded"),
        ],
    )
    def test_named(self, saved: Saved, tensor: torch.Tensor, said: str) -> None:
        with pytest.raises(FormatError, match=said) as caught:
            read_state_dict(saved({"layer.x": tensor}))
        assert '"layer.x"' in caught.value.message
        assert caught.value.details["tensor"] == "layer.x"

    @pytest.mark.filterwarnings("ignore")
    def test_quantised(self, saved: Saved) -> None:
        with pytest.raises(FormatError, match="quantised"):
            read_state_dict(saved({"q": torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.qint8)}))

    @pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
    def test_names_that_safetensors_cannot_hold(self, saved: Saved, name: str) -> None:
        with pytest.raises(FormatError, match="name"):
            read_state_dict(saved({name: torch.zeros(1)}))


class TestUnsafe:
    def test_python_objects(self, saved: Saved) -> None:
        with pytest.raises(UnsafeInputError) as caught:
            read_state_dict(saved({**MODEL, "x": Custom()}))
        assert str(caught.value.details["global"]).endswith("Custom")
        assert "MPFS never does" in caught.value.message
        assert "weights_only" not in caught.value.message

    def test_nothing_is_executed(self, saved: Saved, tmp_path: Path) -> None:
        with pytest.raises(UnsafeInputError, match="system"):
            read_state_dict(saved({**MODEL, "x": Payload(f"touch {tmp_path / 'executed'}")}))
        assert not (tmp_path / "executed").exists()

    def test_modules(self, saved: Saved) -> None:
        with pytest.raises(UnsafeInputError, match="Linear"):
            read_state_dict(saved(torch.nn.Linear(2, 2)))


class TestDamage:
    def refused(self, path: Path, content: bytes) -> str:
        path.write_bytes(content)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(FormatError) as caught:
                read_state_dict(path)
        assert str(path) in caught.value.message
        return caught.value.message

    def test_cut_off(self, saved: Saved) -> None:
        path = saved(MODEL)
        whole = path.read_bytes()
        for size in (1, 3, 10, 100, len(whole) // 2, len(whole) - 1):
            self.refused(path, whole[:size])

    def test_empty_pointer_page_text(self, tmp_path: Path) -> None:
        path = tmp_path / "pytorch_model.bin"
        assert "empty" in self.refused(path, b"")
        assert "git lfs pull" in self.refused(path, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
        assert "web page" in self.refused(path, b"<!DOCTYPE html>")
        assert "no torch file" in self.refused(path, b"hello, world")

    def test_foreign_archives_and_pickles(self, tmp_path: Path) -> None:
        path = tmp_path / "x.pt"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.txt", "hello")
        assert "not one that torch.save wrote" in self.refused(path, path.read_bytes())
        with tarfile.open(path, "w") as tar:
            tar.add(__file__, "storages")
        assert "tar archive" in self.refused(path, path.read_bytes())
        assert "torch.save did not write" in self.refused(path, pickle.dumps({"a": 1}, protocol=4))
        self.refused(path, pickle.dumps({"a": 1}, protocol=2))

    def test_one_flipped_bit_of_a_tensor_is_found_though_torch_does_not_look(self, tmp_path: Path) -> None:
        path = tmp_path / "x.pt"
        torch.save({"a": torch.full((1000,), 1.5)}, path)
        whole = bytearray(path.read_bytes())
        at = whole.find(b"\x00\x00\xc0\x3f" * 10)
        whole[at] ^= 1
        path.write_bytes(whole)
        torch.load(path, weights_only=True)  # as it were nothing
        assert "CRC" in self.refused(path, bytes(whole))

    def test_archives_without_checksums_are_read(self, tmp_path: Path) -> None:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(MODEL, tmp_path / "x.pt")
        finally:
            torch.serialization.set_crc32_options(before)
        assert torch.equal(read_state_dict(tmp_path / "x.pt").tensors["w"], MODEL["w"])

    def test_compressed_archives_are_refused_as_they_cannot_be_mapped(self, tmp_path: Path) -> None:
        torch.save({"a": torch.zeros(1000)}, tmp_path / "x.pt")
        with (
            zipfile.ZipFile(tmp_path / "x.pt") as old,
            zipfile.ZipFile(tmp_path / "y.pt", "w", zipfile.ZIP_DEFLATED) as new,
        ):
            for name in old.namelist():
                new.writestr(name, old.read(name))
        assert "compressed" in self.refused(tmp_path / "y.pt", (tmp_path / "y.pt").read_bytes())

    def test_a_record_shorter_than_the_pickle_says_is_not_read_past_its_end(self, tmp_path: Path) -> None:
        torch.save({"a": torch.zeros(1000), "b": torch.zeros(5000)}, tmp_path / "x.pt")
        with zipfile.ZipFile(tmp_path / "x.pt") as old, zipfile.ZipFile(tmp_path / "y.pt", "w") as new:
            for name in old.namelist():
                content = old.read(name)
                new.writestr(name, content[:100] if name.endswith("data/0") else content)
        assert '"a" claims 4,000 bytes' in self.refused(tmp_path / "y.pt", (tmp_path / "y.pt").read_bytes())

    def test_not_a_file(self, tmp_path: Path) -> None:
        with pytest.raises(NotFoundError):
            read_state_dict(tmp_path / "nope.pt")
        with pytest.raises(BadInputError, match="not a regular file"):
            read_state_dict(tmp_path)

    @pytest.mark.filterwarnings("ignore")
    @settings(deadline=None, max_examples=150)
    @given(st.booleans(), st.data())
    def test_any_damage_is_our_error_or_harmless(self, is_zip: bool, data: st.DataObject) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "x.pt"
            torch.save(MODEL, path, _use_new_zipfile_serialization=is_zip)
            whole = bytearray(path.read_bytes())
            for _ in range(data.draw(st.integers(1, 3))):
                whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
            path.write_bytes(whole)
            try:
                state = read_state_dict(path)
            except MPFSError:
                return
            for tensor in state.tensors.values():
                assert len(tensor_bytes(tensor)) == tensor.numel() * tensor.element_size()


class TestTensors:
    @pytest.mark.parametrize("dtype", [getattr(torch, name) for name in ("float64", "bfloat16", "bool", "complex64")])
    def test_bytes_are_the_library_s(self, dtype: torch.dtype) -> None:
        tensor = torch.arange(6).reshape(2, 3).to(dtype)
        raw, _ = build_header([("t", dtype_name(dtype), tensor_shape(tensor))], None)
        assert save({"t": tensor}) == raw + bytes(tensor_bytes(tensor))

    def test_float4(self) -> None:
        tensor = torch.arange(6, dtype=torch.uint8).reshape(2, 3).view(torch.float4_e2m1fn_x2)
        raw, _ = build_header([("t", dtype_name(tensor.dtype), tensor_shape(tensor))], None)
        assert tensor_shape(tensor) == (2, 6)
        assert save({"t": tensor}) == raw + bytes(tensor_bytes(tensor))

    def test_contiguous_memory_is_shared_and_read_only(self) -> None:
        tensor = torch.zeros(4)
        view = tensor_bytes(tensor[1:3])
        tensor[1] = 1.0
        assert bytes(view) == b"\x00\x00\x80\x3f\x00\x00\x00\x00"
        assert view.readonly
        assert (view.format, view.ndim) == ("B", 1)

    @pytest.mark.parametrize(
        "tensor",
        [
            torch.arange(6.0).reshape(2, 3).t(),
            torch.arange(6.0)[::2],
            torch.ones(1).expand(3),
            torch.tensor([1 + 2j]).conj(),
            torch.tensor([1 + 2j]).conj().imag,
            torch.tensor(3.0),
            torch.zeros(0),
            torch.zeros(2, 0, dtype=torch.int64),
            torch.ones(2, requires_grad=True),
        ],
    )
    def test_layouts(self, tensor: torch.Tensor) -> None:
        assert bytes(tensor_bytes(tensor)) == tensor.detach().resolve_conj().resolve_neg().numpy().tobytes()

    def test_dtypes_of_torch_alone(self) -> None:
        for dtype in (torch.complex128, torch.complex32, torch.qint8):
            with pytest.raises(FormatError, match=str(dtype)):
                dtype_name(dtype)
