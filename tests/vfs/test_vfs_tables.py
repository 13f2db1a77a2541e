"""pandas and pyarrow read a repository's files as they read any others, by their fsspec support."""

from __future__ import annotations

from pathlib import Path

import fsspec  # type: ignore[import-untyped]  # ships no types
import pandas as pd
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

import mpfs


def test_tables_are_read_by_url(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    save_file({"a": torch.ones(4, 4)}, source / "model.safetensors")
    (source / "scores.jsonl").write_text('{"task": "a", "score": 1}\n{"task": "b", "score": 2}\n', encoding="utf-8")
    (source / "scores.csv").write_text("task,score\na,1\nb,2\n", encoding="utf-8")
    table = pd.DataFrame({"task": ["a", "b"], "score": [1, 2]})
    table.to_parquet(source / "scores.parquet")
    repository = str(tmp_path / "repo")
    with mpfs.open(repository, create=True) as repo:
        repo.import_checkpoint(source, "team/base")
    options = {"repo": repository}
    root = "mpfs://team/base/scores"
    assert pd.read_json(f"{root}.jsonl", lines=True, storage_options=options).equals(table)
    assert pd.read_csv(f"{root}.csv", storage_options=options).equals(table)
    assert pd.read_parquet(f"{root}.parquet", storage_options=options).equals(table)
    files = fsspec.filesystem("mpfs", repo=repository)
    assert pq.read_table("team/base/scores.parquet", filesystem=files).to_pydict() == table.to_dict(orient="list")
