"""Which files a merged model has for its tokenizer, and what its configs say of tokens. Pure: bytes in, bytes out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from mpfs.formats.tokenizer import Files, Vocabulary, chat_template, is_tokenizer_file, with_chat_template
from mpfs.merge.config import config_with, parse_config, set_vocabulary
from mpfs.merge.recipe.chat_templates import AUTO, chat_template_text

CONFIG = "config.json"
GENERATION = "generation_config.json"

Changes: TypeAlias = dict[str, "bytes | None"]
"""Contents by path; None: there is no such file."""

_IDS = ("_token_id", "_token_ids", "_token_index")
"""How keys end whose values are the numbers of tokens."""

_SPOKEN = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id")
"""Keys that belong to the tokenizer, so that they go with it."""


def is_wanted(path: str) -> bool:
    """Whether a model's file is looked at here."""
    return path in (CONFIG, GENERATION) or is_tokenizer_file(path)


def donated(template: Files, donor: Files) -> Changes:
    """What changes in the template's files when tokenizer and generation config are the donor's."""
    changes: Changes = {path: None for path in template if is_tokenizer_file(path)}
    changes |= {path: content for path, content in donor.items() if is_tokenizer_file(path) or path == GENERATION}
    return changes


def applied(files: Files, changes: Mapping[str, bytes | None]) -> dict[str, bytes]:
    """Files with changes."""
    return {path: content for path, content in {**files, **changes}.items() if content is not None}


def config_changes(
    files: Files, donor: Files | None, before: Vocabulary | None, after: Mapping[str, int], rows: int
) -> tuple[Changes, list[str]]:
    """What changes in config.json and generation_config.json, and notes.

    Args:
        files: the output's, so far.
        donor: the files of the model that the tokenizer is from; None if that is the template.
        before: the template's own vocabulary, if it has one.
        after: the output's ids by token.
        rows: of the output's embedding.
    """
    changes: Changes = {}
    notes: list[str] = []
    ids = {} if before is None else {index: token for token, index in before.tokens.items()}
    config = parse_config(files.get(CONFIG, b""))
    if config is not None:
        set_vocabulary(config, rows)
        if donor is not None:
            theirs = parse_config(donor.get(CONFIG, b"")) or {}
            notes += _renumber(config, theirs, ids, after, CONFIG)
        changes[CONFIG] = config_with(files[CONFIG], config)
    generation = parse_config(files.get(GENERATION, b""))
    if generation is not None and donor is not None and GENERATION not in donor:
        notes += _renumber(generation, {}, ids, after, GENERATION)
        changes[GENERATION] = config_with(files[GENERATION], generation)
    return changes, notes


def _renumber(
    config: dict[str, Any], donor: Mapping[str, Any], before: Mapping[int, str], after: Mapping[str, int], name: str
) -> list[str]:
    """Numbers of tokens as they are in the output: the donor's, or those of the same tokens; else none."""
    notes: list[str] = []

    def number(value: Any) -> Any:
        if isinstance(value, list):
            return [new for new in (number(item) for item in value) if new is not None] or None
        return after.get(before.get(value, "")) if isinstance(value, int) else None

    def visit(part: dict[str, Any], theirs: Mapping[str, Any]) -> None:
        for key, value in list(part.items()):
            if isinstance(value, dict):
                inner = theirs.get(key)
                visit(value, inner if isinstance(inner, dict) else {})
            elif key.endswith(_IDS) and value is not None:
                part[key] = theirs[key] if theirs.get(key) is not None else number(value)
                if part[key] is None:
                    notes.append(f"{name}: {key} {value} is no token of the output: taken out")

    visit(config, donor)
    config.update({key: donor[key] for key in _SPOKEN if donor.get(key) is not None and key not in config})
    return notes


def template_changes(
    given: str, files: Files, models: Sequence[tuple[str, Files]], where: str
) -> tuple[Changes, str | None]:
    """What changes by a recipe's chat_template, and a note.

    Args:
        given: the recipe's: `auto`, a name or jinja text.
        files: the output's, so far.
        models: names and files of the models, the most important first.
        where: what the files are called in messages.
    """
    if given != AUTO:
        return dict(with_chat_template(files, chat_template_text(given), where)), None
    found = {name: template for name, theirs in models if (template := chat_template(theirs, name)) is not None}
    if not found:
        return {}, "chat_template: none of the models has one"
    counts = Counter(found.values())
    most = max(counts.values())
    name, template = next((name, template) for name, template in found.items() if counts[template] == most)
    note = f"chat_template: that of {name}, which {most} of {len(models)} models have"
    return dict(with_chat_template(files, template, where)), note
