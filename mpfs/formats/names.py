"""Names of tensors: which of one model's is which of another's, where the two are named differently; and near misses.

Pure. The table has what libraries have renamed: what wrappers put before names, the heads of transformers' classes, `gamma`
and `beta` (BERT checkpoints of TensorFlow's time), vision-language models before and after transformers 4.52 and in 5,
and torch's two ways to keep weight normalisation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TypeAlias

_Rule: TypeAlias = Callable[[str], "str | None"]
_NamedRule: TypeAlias = tuple[str, _Rule]

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


_NUMBERS = re.compile(r"\d+")

_ROLES = ("encoder.", "decoder.")
"""Prefixes that say what a part of a model is: none of them stands for another."""


@dataclass(frozen=True, slots=True)
class Renaming:
    """How one model's names lead to another's. `names` has those that differ: this model's to the other's. `rules`
    say why, for a person. `ambiguous` are names that rules of equal right lead to several of the other's, or several of
    this model's to one: each with what it could be."""

    names: Mapping[str, str]
    rules: tuple[str, ...]
    ambiguous: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.names)


def rename(ours: Iterable[str], theirs: Iterable[str], alike: Callable[[str, str], bool] | None = None) -> Renaming:
    """Find out under which of their names our tensors are known.

    A name that both have stays. A rule is applied to the names that are left if it leads to names that they have, and
    that no other of ours leads to; the rule that finds the most goes first. Where two rules find as much and contradict
    each other, neither is believed. So the result depends on the names (and on what is alike) alone.

    Args:
        ours: the names of a model.
        theirs: the names of the model that it is to be fitted to.
        alike: whether one of our tensors can be one of theirs, going by their shapes. A rule is only believed if that is so
            for half of what it finds, and counts for as many.
    """
    known = set(theirs)
    left = [name for name in dict.fromkeys(ours) if name not in known]
    free = known.difference(ours)
    names: dict[str, str] = {}
    accepted: list[_NamedRule] = []
    ambiguous: dict[str, tuple[str, ...]] = {}
    while left and free:
        candidates = [*_rules(left, free), *_combined(accepted)]
        found = [(rule, _applied(rule[1], left, free)) for rule in candidates]
        scored = [(_score(pairs, alike), rule, pairs) for rule, pairs in found if pairs]
        most = max((score for score, _, _ in scored), default=0)
        if not most:
            break
        first, *rivals = [(rule, pairs) for score, rule, pairs in scored if score == most]
        doubtful = _contradictions(first[1], [pairs for _, pairs in rivals], alike)
        ambiguous |= doubtful
        chosen = {name: target for name, target in first[1].items() if name not in doubtful}
        if chosen:
            names |= chosen
            accepted.append(first[0])
        left = [name for name in left if name not in chosen and name not in doubtful]
        free = free.difference(first[1].values(), *doubtful.values())
    return Renaming(names, tuple(described for described, _ in accepted), ambiguous)


def _score(pairs: Mapping[str, str], alike: Callable[[str, str], bool] | None) -> int:
    """How much speaks for a rule that leads to this."""
    if alike is None:
        return len(pairs)
    score = sum(alike(name, target) for name, target in pairs.items())
    return score if 2 * score >= len(pairs) else 0


def _contradictions(
    pairs: Mapping[str, str], rivals: Iterable[Mapping[str, str]], alike: Callable[[str, str], bool] | None
) -> dict[str, tuple[str, ...]]:
    """Names that rivals lead elsewhere, and names that lead where a rival leads another; each with all that it could be."""
    sources = {target: name for name, target in pairs.items()}
    could: dict[str, dict[str, None]] = {}
    for rival in rivals:
        for name, target in rival.items():
            mine, owner = pairs.get(name), sources.get(target)
            if alike is not None and not alike(name, target):
                continue
            if mine is not None and mine != target:
                could.setdefault(name, {}).update({mine: None, target: None})
            if owner is not None and owner != name:
                could.setdefault(name, {})[target] = None
                could.setdefault(owner, {})[target] = None
    return {name: tuple(sorted(targets)) for name, targets in sorted(could.items())}


def near(name: str, known: Sequence[str], limit: int = 3) -> list[str]:
    """The names most like one that is not known, the nearest first."""
    tail, numbers = name.rpartition(".")[2], _NUMBERS.findall(name)
    # Names of layers are much alike; those of the same layer that end alike are the likelier ones, and soon compared.
    ending = [item for item in known if item.rpartition(".")[2] == tail]
    same = [item for item in ending if _NUMBERS.findall(item) == numbers]
    groups = (group[:20_000] for group in (same, ending, known))
    return next((found for group in groups if (found := get_close_matches(name, group, limit, 0.6))), [])


def _rules(ours: Sequence[str], theirs: Iterable[str]) -> Iterator[_NamedRule]:
    """What may lead from our names to theirs."""
    there = {prefix for prefix in PREFIXES if any(name.startswith(prefix) for name in theirs)}
    here = {prefix for prefix in PREFIXES if any(name.startswith(prefix) for name in ours)}
    # Shorter prefixes first, so that of rules that find as much the simplest wins.
    for old in sorted({*here, ""}, key=lambda prefix: (len(prefix), prefix)):
        for new in sorted({*there, ""}, key=lambda prefix: (len(prefix), prefix)):
            if old != new and not (old in _ROLES and new in _ROLES):
                yield _of_prefixes(old, new)
    yield from _suffix_rules()
    for pattern, target in _MULTIMODAL:
        yield f"{_plain(pattern)} → {_plain(target)}", _substitution(pattern, target)
    yield from _MULTIMODAL_BACK


def _suffix_rules() -> Iterator[_NamedRule]:
    for pattern, target in _SUFFIXES:
        yield f"{_plain(pattern)} → {_plain(target)}", _substitution(pattern, target)
        yield f"{_plain(target)} → {_plain(pattern)}", _reversed_suffix(pattern, target)


def _combined(accepted: Iterable[_NamedRule]) -> Iterator[_NamedRule]:
    """What was found to be so, and another ending besides."""
    for described, rule in accepted:
        for ending, change in _suffix_rules():
            yield f"{described} with {ending}", _after(rule, change)


def _after(first: _Rule, second: _Rule) -> _Rule:
    def rule(name: str) -> str | None:
        found = first(name)
        return None if found is None else second(found)

    return rule


def _of_prefixes(old: str, new: str) -> _NamedRule:
    described = f"{old}* → {new}*" if old and new else f"without {old}" if old else f"with {new}"

    def rule(name: str) -> str | None:
        return new + name[len(old) :] if name.startswith(old) else None

    return described, rule


def _substitution(pattern: str, target: str) -> _Rule:
    compiled = re.compile(pattern)

    def rule(name: str) -> str | None:
        changed, found = compiled.subn(target, name, count=1)
        return changed if found else None

    return rule


def _reversed_suffix(pattern: str, target: str) -> _Rule:
    """From a suffix's new form to the old one."""
    if pattern.startswith("("):
        group, old = pattern.removesuffix("$").rsplit("\\.", 1)
        return _substitution(f"{group}\\.{target.rpartition('.')[2]}$", f"\\1.{old}")
    return _substitution(re.escape(target) + "$", pattern.removesuffix("$").replace("\\", ""))


_MULTIMODAL_BACK: tuple[tuple[str, _Rule], ...] = (
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


def _applied(rule: _Rule, ours: Iterable[str], free: set[str]) -> dict[str, str]:
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
