"""Names of tensors: which of one model's is which of another's, where the two are named differently; and near misses.

Pure. The table has what libraries have renamed: what wrappers put before names, the heads of transformers' classes, `gamma`
and `beta` (BERT checkpoints of TensorFlow's time), vision-language models before and after transformers 4.52 and in 5,
and torch's two ways to keep weight normalisation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

PREFIXES = (
    *("module.", "_orig_mod.", "model._orig_mod.", "module._orig_mod.", "model.", "model.model.", "base_model.model."),
    *("transformer.", "bert.", "roberta.", "distilbert.", "electra.", "deberta.", "gpt_neox.", "encoder.", "decoder."),
    *(
        "language_model.",
        "model.language_model.",
        "language_model.model.",
        "net.",
        "network.",
        "backbone.",
        "state_dict.",
    ),
    *("0.auto_model.", "auto_model.", "student.", "teacher.", "ema.", "model_ema.", "ema_model."),
)
"""What may stand before every name of a model, or be missing there."""

_MULTIMODAL = (
    (r"^language_model\.model\.", "model.language_model."),
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^(visual|vision_tower|vision_model|multi_modal_projector|audio_tower|image_newline)(\.|$)", r"model.\1\2"),
    (r"^model\.(layers|embed_tokens|norm)\.", r"model.language_model.\1."),
)
"""transformers before 4.52 to 4.52 and 5: `Qwen2_5_VLForConditionalGeneration`, Llava and others of that kind."""

_SUFFIXES = (
    (r"(LayerNorm|layer_norm|layernorm|norm)\.gamma$", r"\1.weight"),
    (r"(LayerNorm|layer_norm|layernorm|norm)\.beta$", r"\1.bias"),
    (r"\.weight_g$", ".parametrizations.weight.original0"),
    (r"\.weight_v$", ".parametrizations.weight.original1"),
)


@dataclass(frozen=True, slots=True)
class Renaming:
    """How one model's names lead to another's. `names` has those that differ: this model's to the other's. `rules`
    say why, for a person."""

    names: Mapping[str, str]
    rules: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.names)


def rename(ours: Iterable[str], theirs: Iterable[str]) -> Renaming:
    """Find out under which of their names our tensors are known.

    A name that both have stays. A rule is applied to the names that are left if it leads to names that they have, and
    that no other of ours leads to; the rule that finds the most goes first. So the result depends on the names alone.

    Args:
        ours: the names of a model.
        theirs: the names of the model that it is to be fitted to.
    """
    known = set(theirs)
    left = [name for name in dict.fromkeys(ours) if name not in known]
    free = known.difference(ours)
    names: dict[str, str] = {}
    rules: list[str] = []
    while left and free:
        best: dict[str, str] = {}
        why = ""
        for described, rule in _rules(left, free):
            found = _applied(rule, left, free)
            if len(found) > len(best):
                best, why = found, described
        if not best:
            break
        names |= best
        rules.append(why)
        left = [name for name in left if name not in best]
        free.difference_update(best.values())
    return Renaming(names, tuple(rules))


def near(name: str, known: Sequence[str], limit: int = 3) -> list[str]:
    """The names most like one that is not known, the nearest first."""
    tail = name.rpartition(".")[2]
    # Names of layers are much alike; those that end alike are the likelier ones.
    alike = [item for item in known if item.rpartition(".")[2] == tail]
    return get_close_matches(name, alike[:20_000], limit, 0.6) or get_close_matches(name, known[:20_000], limit, 0.6)


def _rules(ours: Sequence[str], theirs: Iterable[str]) -> Iterable[tuple[str, Callable[[str], str | None]]]:
    """What may lead from our names to theirs."""
    there = {prefix for prefix in PREFIXES if any(name.startswith(prefix) for name in theirs)}
    here = {prefix for prefix in PREFIXES if any(name.startswith(prefix) for name in ours)}
    # Shorter prefixes first, so that of rules that find as much the simplest wins.
    for old in sorted({*here, ""}, key=lambda prefix: (len(prefix), prefix)):
        for new in sorted({*there, ""}, key=lambda prefix: (len(prefix), prefix)):
            if old != new:
                yield _of_prefixes(old, new)
    for pattern, target in (*_SUFFIXES, *_MULTIMODAL):
        yield f"{_plain(pattern)} → {_plain(target)}", _substitution(pattern, target)
    for pattern, target in _SUFFIXES:
        back = _reversed_suffix(pattern, target)
        yield f"{_plain(target)} → {_plain(pattern)}", back
    yield from _MULTIMODAL_BACK


def _of_prefixes(old: str, new: str) -> tuple[str, Callable[[str], str | None]]:
    described = f"{old}* → {new}*" if old and new else f"without {old}" if old else f"with {new}"

    def rule(name: str) -> str | None:
        return new + name[len(old) :] if name.startswith(old) else None

    return described, rule


def _substitution(pattern: str, target: str) -> Callable[[str], str | None]:
    compiled = re.compile(pattern)

    def rule(name: str) -> str | None:
        changed, found = compiled.subn(target, name, count=1)
        return changed if found else None

    return rule


def _reversed_suffix(pattern: str, target: str) -> Callable[[str], str | None]:
    """From a suffix's new form to the old one."""
    if pattern.startswith("("):
        group, old = pattern.removesuffix("$").rsplit("\\.", 1)
        return _substitution(f"{group}\\.{target.rpartition('.')[2]}$", f"\\1.{old}")
    return _substitution(re.escape(target) + "$", pattern.removesuffix("$").replace("\\", ""))


_MULTIMODAL_BACK: tuple[tuple[str, Callable[[str], str | None]], ...] = (
    (
        "model.language_model.* → language_model.model.*",
        _substitution(r"^model\.language_model\.", "language_model.model."),
    ),
    ("lm_head.* → language_model.lm_head.*", _substitution(r"^lm_head\.", "language_model.lm_head.")),
    (
        "model.visual.* → visual.*",
        _substitution(
            r"^model\.(visual|vision_tower|vision_model|multi_modal_projector|audio_tower|image_newline)(\.|$)", r"\1\2"
        ),
    ),
    (
        "model.language_model.layers.* → model.layers.*",
        _substitution(r"^model\.language_model\.(layers|embed_tokens|norm)\.", r"model.\1."),
    ),
)


def _applied(rule: Callable[[str], str | None], ours: Iterable[str], free: set[str]) -> dict[str, str]:
    """Where a rule leads; names that two of ours lead to are left out."""
    targets: dict[str, list[str]] = {}
    for name in ours:
        target = rule(name)
        if target is not None and target in free:
            targets.setdefault(target, []).append(name)
    return {names[0]: target for target, names in targets.items() if len(names) == 1}


def _plain(pattern: str) -> str:
    """A pattern for a person."""
    return (
        re.sub(r"\(([^)|]*)[^)]*\)", r"\1", pattern)
        .replace("\\.", ".")
        .replace("\\1", "…")
        .strip("^$")
        .replace("\\2", "")
    )
