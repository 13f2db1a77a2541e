"""The model card of a merged model, and its recipe as a file: README.md and mergekit_config.yml, as mergekit writes them.

Pure, and a function of the plan alone, so that the same plan gives the same snapshot wherever and whenever it is run.
The merge's own commit can therefore not be named: its id covers the card. The plan leads to it (`mpfs log`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import yaml

from mpfs.merge.operators import get_operator
from mpfs.objects import Budget, Plan, object_id

CARD = "README.md"
RECIPE = "mergekit_config.yml"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
"""A name that the Hugging Face hub would know, and that its cards may give as a base."""

_ARXIV = re.compile(r"(?:arXiv )?\b(\d{4}\.\d{4,5})\b")

_FIRST = ("name", "merge_method", "base_model", "models", "slices", "modules", "model", "filter")
"""Keys of a recipe that come before the others, which are in alphabetical order."""

_MARKUP = re.compile(r"([\\`*_\[\]<>|#])")


def card_files(plan: Plan) -> dict[str, bytes]:
    """Content by path."""
    return {CARD: _card(plan).encode(), RECIPE: _recipe(plan).encode()}


def _card(plan: Plan) -> str:
    base = None if plan.base is None else plan.models[plan.base].name
    others = [model.name for index, model in enumerate(plan.models) if index != plan.base]
    title = f"Merge of {_listed(others or [model.name for model in plan.models])}"
    intro = f"Made by [MPFS](https://arxiv.org/abs/2602.13273) with the method `{plan.method}`"
    intro += "." if base is None else f", starting from {_text(base)}."
    source = get_operator(plan.method).source
    if source:
        intro += " Method: " + _ARXIV.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", _text(source))
    parts = [
        _front_matter(plan),
        f"# {title}",
        intro,
        "## Models",
        _models(plan),
        f"Configuration, tokenizer and other files are those of {_text(plan.models[plan.template].name)}, unless the recipe "
        "says otherwise.",
        "## Plan",
        _plan(plan),
    ]
    if plan.notes:
        parts += ["Noted when the models were fitted together:", "\n".join(f"- {_text(note)}" for note in plan.notes)]
    recipe = _recipe(plan)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", recipe)), default=0))
    parts += ["## Recipe", f"{fence}yaml\n{recipe}{fence}"]
    return "\n\n".join(parts) + "\n"


def _recipe(plan: Plan) -> str:
    """The recipe as YAML. A plan that was stored has its keys in another order than one that was just compiled."""
    return _yaml(_in_order(plan.recipe))


def _in_order(value: object) -> object:
    if isinstance(value, Mapping):
        keys = sorted(value, key=lambda key: (_FIRST.index(key) if key in _FIRST else len(_FIRST), str(key)))
        return {key: _in_order(value[key]) for key in keys}
    if isinstance(value, list | tuple):
        return [_in_order(item) for item in value]
    return value


def _front_matter(plan: Plan) -> str:
    names = [model.name.partition("+")[0].partition("@")[0] for model in plan.models]
    known = list(dict.fromkeys(name for name in names if _HUB_ID.fullmatch(name)))
    value: dict[str, object] = {"tags": ["mpfs", "merge"]}
    if known:
        value = {"base_model": known, "base_model_relation": "merge", **value}
    return f"---\n{_yaml(value)}---"


def _models(plan: Plan) -> str:
    rows = ["| model | | commit |", "|---|---|---|"]
    for index, model in enumerate(plan.models):
        role = "base" if index == plan.base else "merged"
        rows.append(f"| {_text(model.name)} | {role} | `{model.commit}` |")
    return "\n".join(rows)


def _plan(plan: Plan) -> str:
    rows = [f"- plan: `{object_id(plan.encode())}`", f"- budget: {_budget(plan.budget)}"]
    rows.append(
        f"- expert bytes: at most {plan.cost.expert_bytes_planned:,} of the {plan.cost.expert_bytes_full:,} that the merge "
        "without a budget reads"
    )
    rows.append(f"- fidelity, predicted: {plan.fidelity_predicted:.6g} (1 is the merge without a budget)")
    if get_operator(plan.method).draws:
        rows.append(f"- seed: {plan.seed}")
    return "\n".join(rows)


def _budget(budget: Budget) -> str:
    if budget.kind == "none":
        return "none"
    if budget.kind == "bytes":
        return f"{int(budget.value):,} bytes of the experts"
    if budget.kind == "percent":
        return f"{budget.value:g}% of the experts' bytes"
    return f"as much as a fidelity of {budget.value:g} takes"


def _listed(names: list[str]) -> str:
    shown = [_text(name) for name in names]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _text(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return _MARKUP.sub(r"\\\1", " ".join(text.split()))


def _yaml(value: object) -> str:
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=False, width=120)
    return text
