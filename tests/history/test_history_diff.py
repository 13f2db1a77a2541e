"""diff: what is equal is told without reading; what changed is measured exactly, or estimated from sketches."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from history_cases import BLOCK_SIZE, Models, counted_reads, new_repository
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfs.errors import IntegrityError, NotFoundError
from mpfs.history import Diff, TensorDiff
from mpfs.repository import Repository

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    """A repository with small blocks."""
    with new_repository(tmp_path / "repo") as made:
        yield made


@pytest.fixture
def models(repository: Repository, tmp_path: Path) -> Models:
    """Imports into `repository`."""
    return Models(repository, tmp_path)


def only(diff: Diff, status: str = "changed") -> TensorDiff:
    (item,) = (item for item in diff.tensors if item.status == status)
    return item


def normal(*shape: int, seed: int = 0, std: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std


class TestIdentical:
    @pytest.mark.parametrize("exact", [False, True])
    def test_nothing_is_read(self, models: Models, monkeypatch: pytest.MonkeyPatch, exact: bool) -> None:
        state = {"w": normal(3000), "none": torch.empty(0), "n": torch.tensor(math.nan), "i": torch.arange(9)}
        models.put("a", state)
        models.put("b", state, {"config.json": b"{}"})
        with counted_reads(monkeypatch) as read:
            diff = models.repository.diff("a", "b", exact=exact)
        assert read == []
        assert diff.summary == dict.fromkeys(diff.summary, 0) | {"identical": 4}
        assert {(item.relative_l2, item.cosine, item.max_abs, item.elements_changed) for item in diff.tensors} == {
            (0.0, 1.0, 0.0, 0)
        }
        assert not diff.is_empty
        assert models.repository.diff("a", "a", exact=exact).is_empty

    @pytest.mark.parametrize("exact", [False, True])
    def test_the_same_under_another_header(self, models: Models, exact: bool) -> None:
        """Files may differ where no tensor and no side file does."""
        first, second = normal(2000), normal(2000, seed=1)
        models.put("a", {"x": first, "y": second})
        models.put("b", {"y": second, "x": first})
        assert models.repository.diff("a", "b", exact=exact).is_empty


class TestExact:
    def test_one_of_six_elements(self, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
        """Case D1."""
        w = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
        changed = w.clone()
        changed[1, 2] = 8.5
        rest = {"same": normal(5000), "also": torch.ones(7)}
        models.put("a", {"w": w, **rest})
        models.put("b", {"w": changed, **rest})
        with counted_reads(monkeypatch) as read:
            diff = models.repository.diff("a", "b", exact=True)
        item = only(diff)
        assert (item.name, item.elements_changed, item.blocks_changed, item.blocks_total) == ("w", 1, 1, 1)
        assert item.max_abs == 2.5
        assert item.relative_l2 == pytest.approx(2.5 / math.sqrt(91), rel=1e-15)
        dot = (w * changed).sum().item()
        assert item.cosine == pytest.approx(dot / (w.norm().item() * changed.norm().item()), rel=1e-6)
        assert not item.estimated
        assert diff.summary["identical"] == 2
        assert len(read) == 2

    def test_only_blocks_that_differ_are_read(self, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
        w = normal(10 * BLOCK_SIZE // 4)
        changed = w.clone()
        changed[3 * BLOCK_SIZE // 4] += 1
        changed[-1] += 1
        models.put("a", {"w": w})
        models.put("b", {"w": changed})
        with counted_reads(monkeypatch) as read:
            item = only(models.repository.diff("a", "b", exact=True))
        assert (item.blocks_changed, item.blocks_total, item.elements_changed) == (2, 10, 2)
        a, b = (models.repository.tensors(name)["w"].blocks for name in "ab")
        assert read == [a[3], b[3], a[9], b[9]]

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_equals_torch(self, models: Models, dtype: torch.dtype) -> None:
        a, b = normal(50, 90).to(dtype), (normal(50, 90) + normal(50, 90, seed=2, std=0.1)).to(dtype)
        models.put("a", {"w": a})
        models.put("b", {"w": b})
        item = only(models.repository.diff("a", "b", exact=True))
        wide_a, wide_b = a.double(), b.double()
        delta = wide_b - wide_a
        assert item.max_abs == delta.abs().max().item()
        assert item.elements_changed == int((a != b).sum())
        assert item.relative_l2 == pytest.approx((delta.norm() / wide_a.norm()).item(), rel=1e-12)
        cosine = (wide_a * wide_b).sum() / (wide_a.norm() * wide_b.norm())
        assert item.cosine == pytest.approx(cosine.item(), abs=1e-12)

    @pytest.mark.parametrize(
        "dtype", [torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]
    )
    def test_what_has_no_numbers(self, models: Models, dtype: torch.dtype) -> None:
        a = torch.zeros(5000).to(dtype)
        b = a.clone()
        b[[3, 4000]] = torch.ones(2).to(dtype)
        models.put("a", {"w": a})
        models.put("b", {"w": b})
        for exact in (False, True):
            item = only(models.repository.diff("a", "b", exact=exact))
            assert (item.relative_l2, item.cosine, item.max_abs, item.estimated) == (None, None, None, False)
            assert item.elements_changed == (2 if exact else None)

    def test_zeros_infinities_and_nan(self, models: Models) -> None:
        cases = {
            "from_zero": (torch.zeros(4), torch.tensor([0.0, 3.0, 0.0, 4.0])),
            "sign_of_zero": (torch.zeros(4), torch.tensor([0.0, -0.0, 0.0, 0.0])),
            "to_nan": (torch.tensor([1.0, 2.0]), torch.tensor([1.0, math.nan])),
            "to_inf": (torch.tensor([1.0, 2.0]), torch.tensor([2.0, math.inf])),
            "huge": (torch.tensor([1e300, 0.0], dtype=torch.float64), torch.tensor([-1e300, 0.0], dtype=torch.float64)),
        }
        models.put("a", {name: pair[0] for name, pair in cases.items()})
        models.put("b", {name: pair[1] for name, pair in cases.items()})
        for exact in (False, True):
            diff = models.repository.diff("a", "b", exact=exact)
            json.dumps(diff.as_json(), allow_nan=False)
            found = {item.name: item for item in diff.tensors}
            assert found["from_zero"].relative_l2 is None
            assert found["from_zero"].cosine is None
            assert found["sign_of_zero"].relative_l2 == 0.0
        assert (found["from_zero"].max_abs, found["from_zero"].elements_changed) == (4.0, 2)
        assert found["sign_of_zero"].elements_changed == 1
        assert (found["to_nan"].max_abs, found["to_nan"].elements_changed) == (0.0, 1)
        assert (found["to_inf"].max_abs, found["to_inf"].elements_changed) == (1.0, 2)
        assert found["huge"].relative_l2 is None
        assert found["huge"].max_abs == 2e300

    def test_a_damaged_block_is_named(self, models: Models) -> None:
        models.put("a", {"w": normal(2000)})
        models.put("b", {"w": normal(2000, seed=1)})
        block = models.repository.tensors("b")["w"].blocks[1]
        with models.repository._store.environment.write() as txn:
            txn.put("blocks", block, b"\0" * BLOCK_SIZE)
        with pytest.raises(IntegrityError, match=f"w: block {block.hex()} is damaged"):
            models.repository.diff("a", "b", exact=True)
        assert only(models.repository.diff("a", "b")).estimated


class TestEstimated:
    def test_no_block_is_read(self, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
        models.put("a", {"w": normal(5000), "i": torch.arange(5000)})
        models.put("b", {"w": normal(5000, seed=1), "i": torch.arange(5000) + 1})
        with counted_reads(monkeypatch) as read:
            diff = models.repository.diff("a", "b")
        assert read == []
        w, i = (next(item for item in diff.tensors if item.name == name) for name in "wi")
        assert w.estimated
        assert (w.max_abs, w.elements_changed) == (None, None)
        assert (i.status, i.relative_l2, i.estimated) == ("changed", None, False)

    @settings(max_examples=25)
    @given(
        seed=st.integers(0, 1000),
        std=st.sampled_from([1e-4, 1e-2, 1.0]),
        dtype=st.sampled_from([torch.bfloat16, torch.float32]),
        share=st.sampled_from([0.02, 1.0]),
    )
    def test_agrees_with_the_exact_figures(
        self, tmp_path_factory: pytest.TempPathFactory, seed: int, std: float, dtype: torch.dtype, share: float
    ) -> None:
        folder = tmp_path_factory.mktemp("estimate")
        with new_repository(folder / "repo") as repository:
            models = Models(repository, folder)
            a = normal(64, 1024, seed=seed).to(dtype)
            delta = normal(64, 1024, seed=seed + 1, std=std) * (torch.rand(64, 1024) < share)
            b = (a.float() + delta).to(dtype)
            models.put("a", {"w": a, "rest": torch.ones(1)})
            models.put("b", {"w": b, "rest": torch.zeros(1)})
            guess, truth = (
                {item.name: item for item in repository.diff("a", "b", exact=exact).tensors}["w"]
                for exact in (False, True)
            )
            if truth.status == "identical":
                assert guess == truth
                return
            assert truth.relative_l2 is not None
            assert truth.cosine is not None
            # 32 or more blocks of 18% error each, in the square: 5 sigma is well below a third, unless few differ.
            few = truth.blocks_changed < 16
            assert guess.relative_l2 == pytest.approx(truth.relative_l2, rel=0.7 if few else 0.33)
            assert guess.cosine == pytest.approx(truth.cosine, abs=1e-9 + 0.7 * (1 - truth.cosine))


class TestTensorsThatComeAndGo:
    def test_added_removed_renamed_reshaped_retyped(self, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
        moved, kept = normal(3000), normal(100, seed=1)
        models.put(
            "a", {"old": moved, "kept": kept, "gone": torch.ones(5), "shape": torch.zeros(6), "type": torch.zeros(6)}
        )
        models.put(
            "b",
            {
                "new": moved,
                "kept": kept,
                "tied": kept.clone(),
                "shape": torch.zeros(2, 3, dtype=torch.float16),
                "type": torch.zeros(6, dtype=torch.float16),
            },
        )
        for exact in (False, True):
            with counted_reads(monkeypatch) as read:
                diff = models.repository.diff("a", "b", exact=exact)
            assert read == []
            found = {item.name: (item.status, item.before, item.after, item.same_as) for item in diff.tensors}
            assert found == {
                "gone": ("removed", "F32 [5]", None, None),
                "kept": ("identical", "F32 [100]", "F32 [100]", None),
                "new": ("added", None, "F32 [3000]", "old"),
                "old": ("removed", "F32 [3000]", None, "new"),
                "shape": ("reshaped", "F32 [6]", "F16 [2, 3]", None),
                "tied": ("added", None, "F32 [100]", "kept"),
                "type": ("retyped", "F32 [6]", "F16 [6]", None),
            }
            assert [item.name for item in diff.tensors] == sorted(found)
            assert diff.summary == {
                "identical": 1,
                "changed": 0,
                "added": 2,
                "removed": 2,
                "reshaped": 1,
                "retyped": 1,
            }
            assert all(item.relative_l2 is None for item in diff.tensors if item.status != "identical")

    def test_side_files(self, models: Models) -> None:
        w = {"w": torch.ones(3)}
        models.put("a", w, {"config.json": b"{}", "README.md": b"old", "sub/same.txt": b"1"})
        models.put("b", w, {"config.json": b'{"a": 1}', "sub/same.txt": b"1", "sub/new.txt": b""})
        diff = models.repository.diff("a", "b")
        assert (diff.files_added, diff.files_removed, diff.files_changed) == (
            ("sub/new.txt",),
            ("README.md",),
            ("config.json",),
        )
        assert not diff.is_empty
        assert diff.as_json()["files"] == {
            "added": ["sub/new.txt"],
            "removed": ["README.md"],
            "changed": ["config.json"],
        }

    def test_the_other_way_round(self, models: Models) -> None:
        models.put("a", {"w": normal(3000), "x": torch.ones(3)})
        models.put("b", {"w": normal(3000, seed=3), "y": torch.ones(3)})
        there, back = (models.repository.diff(*pair, exact=True) for pair in (("a", "b"), ("b", "a")))
        assert (there.summary["added"], there.summary["removed"]) == (back.summary["removed"], back.summary["added"])
        assert only(there).max_abs == only(back).max_abs
        assert only(there).cosine == pytest.approx(only(back).cosine, rel=1e-12)

    def test_progress_and_unknown_revisions(self, models: Models) -> None:
        models.put("a", {"w": torch.ones(3), "x": torch.ones(3)})
        calls: list[tuple[int, int]] = []
        models.repository.diff("a", "a", progress=lambda done, total: calls.append((done, total)))
        assert calls == [(1, 2), (2, 2)]
        with pytest.raises(NotFoundError, match="nothing"):
            models.repository.diff("a", "nothing")
