"""TorchScript archives: names and bits of the module that was compiled, no code compiled, nothing hostile accepted."""

from __future__ import annotations

import io
import pickle
import struct
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfs.errors import FormatError, MPFSError, NotFoundError, UnsafeInputError
from mpfs.formats.torch_file import StateDict, read_state_dict, tensor_bytes
from mpfs.repository import Repository
from mpfs.testing.torch_checkpoints import with_records

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")


class Inner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(3, 2)
        self.register_buffer("run", torch.randn(2))
        self.plain = torch.ones(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.lin(x) + self.run + self.plain[:2] + torch.tensor([1.0, 2.0])
        return y


class Net(torch.nn.Module):
    """Nested modules, one of them used twice; a tied weight, a half, a double, numbers, a dict of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Inner()
        self.b = self.a
        self.seq = torch.nn.Sequential(torch.nn.Linear(2, 2).double(), torch.nn.BatchNorm1d(2))
        self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(2)])
        self.narrow = torch.nn.Parameter(torch.randn(3).half())
        self.brainy = torch.nn.Parameter(torch.randn(3).bfloat16())
        self.tied = torch.nn.Linear(3, 2)
        self.tied.weight = self.a.lin.weight
        self.n = 3
        self.extra = {"x": torch.ones(1)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (
            self.a(x)
            + self.tied(x)
            + self.b(x)
            + self.narrow[:2]
            + self.brainy[:2]
            + self.seq[0](x[:, :2].double()).float()
        )
        for layer in self.layers:
            y = layer(y)
        z: torch.Tensor = self.seq[1](y)
        return z


def saved(module: torch.nn.Module, *, trace: bool = False) -> bytes:
    """What torch.jit.save writes of a module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compile_module: Any = torch.jit.trace if trace else torch.jit.script
        program = compile_module(module, *([torch.ones(2, 3)] * trace))
        stream = io.BytesIO()
        torch.jit.save(program, stream)
    return stream.getvalue()


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(7)
    return Net().eval()


@pytest.fixture(scope="module")
def content(net: Net) -> bytes:
    return saved(net)


def read(tmp_path: Path, content: bytes, key: str | None = None) -> StateDict:
    path = tmp_path / "program.pt"
    path.write_bytes(content)
    return read_state_dict(path, key)


@pytest.mark.parametrize("trace", [False, True])
def test_names_and_bits_are_those_of_the_module(net: Net, tmp_path: Path, trace: bool) -> None:
    found = read(tmp_path, saved(net, trace=trace)).tensors
    expected = net.state_dict()
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bytes(tensor_bytes(found[name])) == bytes(tensor_bytes(tensor)), name


def test_what_is_no_parameter_is_listed(content: bytes, tmp_path: Path) -> None:
    assert set(read(tmp_path, content).skipped) == {"extra", "a.plain", "b.plain"}


def test_tied_weights_share_their_memory(content: bytes, tmp_path: Path) -> None:
    found = read(tmp_path, content).tensors
    assert found["tied.weight"].data_ptr() == found["a.lin.weight"].data_ptr() == found["b.lin.weight"].data_ptr()


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float8_e4m3fn,
        torch.complex64,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.int16,
        torch.int64,
    ],
)
def test_dtypes_and_views(tmp_path: Path, dtype: torch.dtype) -> None:
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.randn(6, 8).to(dtype)
            self.register_buffer("sliced", whole.t()[2:5, ::2])
            self.register_buffer("none", whole[:0])
            self.register_buffer("scalar", whole[1, 2])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    module = Holder()
    found = read(tmp_path, saved(module)).tensors
    for name, tensor in module.state_dict().items():
        assert bytes(tensor_bytes(found[name])) == bytes(tensor_bytes(tensor)), name


def test_a_program_is_imported(net: Net, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "net.pt").write_bytes(content)
    with Repository.create(tmp_path / "repo", block_size=4096, map_size=1 << 30, author="tester") as repository:
        report = repository.import_checkpoint(tmp_path / "net.pt", "main")
        assert set(report.skipped) == {"extra", "a.plain", "b.plain"}
        found = repository.load("main")
        assert sorted(found) == sorted(net.state_dict())
        assert all(torch.equal(found[name], tensor) for name, tensor in net.state_dict().items())
        assert repository.tensors("main")["tied.weight"] == repository.tensors("main")["a.lin.weight"]


def test_a_key_is_for_training_checkpoints(content: bytes, tmp_path: Path) -> None:
    assert read(tmp_path, content, ".").tensors
    with pytest.raises(NotFoundError, match="TorchScript"):
        read(tmp_path, content, "model")


def test_a_frozen_program_has_no_names(net: Net, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stream = io.BytesIO()
        torch.jit.save(torch.jit.freeze(torch.jit.script(net)), stream)
    with pytest.raises(FormatError, match=r"constants have no names \(torch\.jit\.freeze\)"):
        read(tmp_path, stream.getvalue())


class TestHostile:
    """Archives that were made to harm, or only damaged: nothing runs, nothing is taken for whole."""

    def test_a_pickle_that_names_what_runs_code(self, content: bytes, tmp_path: Path) -> None:
        mark = tmp_path / "executed"

        class Payload:
            def __reduce__(self) -> tuple[object, ...]:
                import os

                return (os.system, (f"touch {mark}",))

        evil = with_records(content, lambda name, old: pickle.dumps(Payload(), 2) if name == "data.pkl" else old)
        with pytest.raises(UnsafeInputError, match=r"system") as caught:
            read(tmp_path, evil)
        assert str(caught.value.details["global"]).endswith("system")
        assert not mark.exists()

    def test_code_is_not_looked_at_but_for_names(self, net: Net, content: bytes, tmp_path: Path) -> None:
        def edit(name: str, old: bytes) -> bytes:
            return old + b"\nthis is no code; import os; os.abort()\n" if name.endswith(".py") else old

        assert sorted(read(tmp_path, with_records(content, edit)).tensors) == sorted(net.state_dict())

    @pytest.mark.parametrize(
        ("record", "change", "message"),
        [
            ("data.pkl", lambda old: None, "no data.pkl"),
            ("data.pkl", lambda old: old[:-1], "makes no sense"),
            ("data.pkl", lambda old: b"\x80\x02}.", "no module"),
            ("data.pkl", lambda old: b"\x80\x02c__torch__\nNet\n).", "makes no sense"),
            ("data.pkl", lambda old: b"\x80\x04\x95" + b"\xff" * 8 + b".", "makes no sense"),
            ("data.pkl", lambda old: b"\x80\x02r\xff\xff\xff\x7f.", "makes no sense"),
            ("data.pkl", lambda old: b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b".", "makes no sense"),
            ("data.pkl", lambda old: b"\x80\x02" + b"N" * (1 << 24), "MPFS reads 16,777,216"),
            ("data.pkl", lambda old: b"\x80\x02" + b"(" * 300_000 + b".", "makes no sense"),
            ("data/0", lambda old: old[:-1], "no record"),
            ("data/0", lambda old: None, "no record"),
            ("byteorder", lambda old: b"big", "big-endian"),
            ("code/__torch__.py", lambda old: old.replace(b'["', b"[["), "makes no sense|no parameters"),
            ("code/__torch__.py", lambda old: None, "no module"),
        ],
    )
    def test_damage(
        self, content: bytes, tmp_path: Path, record: str, change: Callable[[bytes], bytes | None], message: str
    ) -> None:
        def edit(name: str, old: bytes) -> bytes | None:
            is_it = name == record or (record == "code/__torch__.py" and name.endswith("torchscript.py"))
            return change(old) if is_it else old

        with pytest.raises(FormatError, match=message):
            read(tmp_path, with_records(content, edit))

    def test_a_tensor_past_the_end_of_its_storage(self, tmp_path: Path) -> None:
        module = torch.nn.Module()
        module.register_buffer("w", torch.zeros(1000))
        # The pickle says that it has 1000 elements: BININT2, little-endian. The record stays as it is.
        evil = with_records(
            saved(_Called(module)),
            lambda name, old: old.replace(b"M\xe8\x03", b"M\xe9\x03") if name == "data.pkl" else old,
        )
        with pytest.raises(FormatError, match=r"claims 4,004 bytes"):
            read(tmp_path, evil)

    def test_modules_that_hold_each_other_are_not_followed_for_ever(self, tmp_path: Path) -> None:
        def module(inner: bytes = b"") -> bytes:
            return b"c__torch__\nM\n)\x81}(" + inner + b"ub"

        def wide(depth: int) -> bytes:
            """A module that holds one twice, that holds one twice, …: 2^depth names."""
            if not depth:
                return module()
            mark = bytes([depth])
            return module(b"X\x01\x00\x00\x00a" + wide(depth - 1) + b"q" + mark + b"X\x01\x00\x00\x00bh" + mark)

        begin = b"c__torch__\nM\n)\x81}(X\x01\x00\x00\x00a"
        code = "class M(Module):\n  __parameters__ = []\n  __buffers__ = []\n"
        for pickled, message in (
            (begin * 2000 + b"N" + b"ub" * 2000, "100 deep"),
            (b"c__torch__\nM\n)\x81q\x00}(X\x01\x00\x00\x00ah\x00ub", "100 deep"),
            (wide(40), "1,000,000 attributes"),
        ):
            stream = io.BytesIO()
            with zipfile.ZipFile(stream, "w") as archive:
                archive.writestr("m/data.pkl", b"\x80\x02" + pickled + b".")
                archive.writestr("m/code/__torch__.py", code)
                archive.writestr("m/constants.pkl", b"\x80\x02).")
            with pytest.raises(FormatError, match=message):
                read(tmp_path, stream.getvalue())

    @settings(deadline=None, max_examples=80)
    @given(data=st.data())
    def test_any_damage_is_our_error_or_harmless(self, content: bytes, data: st.DataObject) -> None:
        broken = bytearray(content)
        for _ in range(data.draw(st.integers(1, 3))):
            broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
        with tempfile.TemporaryDirectory() as folder:
            try:
                state = read(Path(folder), bytes(broken))
            except MPFSError:
                return
            for tensor in state.tensors.values():
                assert len(tensor_bytes(tensor)) == tensor.numel() * tensor.element_size()

    @settings(deadline=None, max_examples=80)
    @given(place=st.integers(0, 1 << 20), byte=st.integers(0, 255))
    def test_any_damage_of_the_pickle_behind_right_checksums(self, content: bytes, place: int, byte: int) -> None:
        def edit(name: str, old: bytes) -> bytes:
            if name != "data.pkl":
                return old
            at = place % len(old)
            return old[:at] + bytes([byte]) + old[at + 1 :]

        with tempfile.TemporaryDirectory() as folder:
            try:
                state = read(Path(folder), with_records(content, edit))
            except MPFSError:
                return
            for tensor in state.tensors.values():
                assert len(tensor_bytes(tensor)) == tensor.numel() * tensor.element_size()


class _Called(torch.nn.Module):
    """A module around another that holds only buffers."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        for name, tensor in inner.named_buffers():
            self.register_buffer(name, tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.fixture(autouse=True)
def no_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.jit.load must not be what reads them."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("torch.jit.load compiles code")

    monkeypatch.setattr(torch.jit, "load", load)
