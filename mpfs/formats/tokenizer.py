"""Tokenizers of checkpoints: their files, vocabularies, added tokens and chat templates.

Files come in and go out as bytes by path; the work is done by the `tokenizers` library, an extra. A vocabulary is what
transformers makes of the files: that of tokenizer.json, then what only tokenizer_config.json tells of.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from mpfs.errors import BadInputError, UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_PATH = "tokenizer.json"
CONFIG_PATH = "tokenizer_config.json"
TEMPLATE_PATH = "chat_template.jinja"
ADDED_PATH = "added_tokens.json"
SPECIAL_PATH = "special_tokens_map.json"

MAX_FILE_BYTES = 1 << 28
"""Larger files are no tokenizer's."""

MAX_TOKENS = 1 << 24
"""No vocabulary has more; a larger number of a token is a mistake, or an attempt to fill the memory."""

_PROCESSOR_TEMPLATE_PATH = "chat_template.json"
_OTHER_TEMPLATES = "additional_chat_templates/"
_VOCABULARY_PATHS = ("vocab.json", "vocab.txt")
_SENTENCEPIECE_PATHS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")

_PATHS = frozenset(
    [
        TOKENIZER_PATH,
        CONFIG_PATH,
        TEMPLATE_PATH,
        _PROCESSOR_TEMPLATE_PATH,
        ADDED_PATH,
        SPECIAL_PATH,
        "merges.txt",
        *_VOCABULARY_PATHS,
        *_SENTENCEPIECE_PATHS,
    ]
)

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Where tokenizer_config.json names special tokens, in the order in which transformers adds those that are new."""

Files: TypeAlias = Mapping[str, bytes]
"""A tokenizer's files by path."""


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is found in text as it is, before the tokenizer's model sees it."""

    content: str
    special: bool = False
    normalized: bool = True
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Ids by token, and which of the tokens are added ones."""

    tokens: Mapping[str, int]
    added: Mapping[str, AddedToken]

    @property
    def size(self) -> int:
        """One more than the largest id."""
        return max(self.tokens.values(), default=-1) + 1


def is_tokenizer_file(path: str) -> bool:
    """Whether a checkpoint's file belongs to its tokenizer."""
    return path in _PATHS or path.startswith(_OTHER_TEMPLATES) or ("/" not in path and path.endswith(".tiktoken"))


def read_vocabulary(files: Files, where: str) -> Vocabulary | None:
    """The vocabulary of a tokenizer; None if there are no files of one.

    Args:
        files: the tokenizer's.
        where: whose they are, for messages.

    Raises:
        BadInputError: they cannot be read, are of a kind that does not list its tokens, or number them beyond all bounds.
        UsageError: the `tokenizers` library is not installed.
    """
    found = _read(files, where)
    if found is not None and found.size > MAX_TOKENS:
        raise BadInputError(
            f"{where}: its tokenizer numbers tokens up to {found.size - 1:,}, beyond the {MAX_TOKENS:,} allowed"
        )
    return found


def _read(files: Files, where: str) -> Vocabulary | None:
    if TOKENIZER_PATH in files:
        return _vocabulary_of(_complete(_load(files[TOKENIZER_PATH], where), files, where))
    tokens: dict[str, int] = {}
    if "vocab.json" in files:
        tokens = _ids(_mapping(files["vocab.json"], f"{where}: vocab.json"), f"{where}: vocab.json")
    elif "vocab.txt" in files:
        lines = files["vocab.txt"].decode("utf-8", "replace").splitlines()
        tokens = {line: index for index, line in enumerate(lines)}
    else:
        found = next((path for path in _SENTENCEPIECE_PATHS if path in files), None)
        if found is not None:
            raise BadInputError(
                f"{where}: of its tokenizer there is only {found}, and tokens are read from tokenizer.json; make one with "
                f"transformers: AutoTokenizer.from_pretrained(…).save_pretrained(…)"
            )
        return None
    added = {token.content: (index, token) for index, token in _told_tokens(files, where)}
    if ADDED_PATH in files:
        path = f"{where}: {ADDED_PATH}"
        for content, index in _ids(_mapping(files[ADDED_PATH], path), path).items():
            added.setdefault(content, (index, AddedToken(content, normalized=False)))
    for content, (index, _) in added.items():
        tokens.setdefault(content, index)
    return Vocabulary(tokens, {content: token for content, (_, token) in added.items()})


def with_tokens(files: Files, tokens: Sequence[AddedToken], where: str) -> dict[str, bytes]:
    """The files that change when tokens are added to a tokenizer.

    Those that are new get the next ids, in this order; one that is there becomes an added token and keeps its id.

    Raises:
        BadInputError: it has no tokenizer.json, or cannot take them.
        UsageError: the `tokenizers` library is not installed.
    """
    if not tokens:
        return {}
    if TOKENIZER_PATH not in files:
        raise BadInputError(
            f"{where}: tokens are to be added to its tokenizer, which has no {TOKENIZER_PATH}; make one with "
            "transformers: AutoTokenizer.from_pretrained(…).save_pretrained(…)"
        )
    tokenizer = _complete(_load(files[TOKENIZER_PATH], where), files, where)
    before = _vocabulary_of(tokenizer)
    ids, following = dict(before.tokens), before.size
    for token in tokens:
        if token.content not in ids:
            ids[token.content] = following
            following += 1
    _add(tokenizer, tokens)
    after = _vocabulary_of(tokenizer).tokens
    wrong = [token.content for token in tokens if after.get(token.content) != ids[token.content]]
    if wrong:
        raise BadInputError(
            f"{where}: its tokenizer cannot take the token {wrong[0]!r}: it has ids that no token has, or the token counts "
            "as one that it has already"
        )
    changed = {TOKENIZER_PATH: (tokenizer.to_str(pretty=True) + "\n").encode()}
    config = _config(files, where)
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        for token in tokens:
            decoder[str(ids[token.content])] = asdict(token)
        changed[CONFIG_PATH] = _dump(config)
    if ADDED_PATH in files:
        listed = _mapping_at(files, ADDED_PATH, where)
        listed.update({token.content: ids[token.content] for token in tokens})
        changed[ADDED_PATH] = _dump(listed)
    return changed


def chat_template(files: Files, where: str) -> str | None:
    """The chat template, without white space around it: of several the default one; None if there is none.

    Raises:
        BadInputError: tokenizer_config.json is not what it should be.
    """
    if TEMPLATE_PATH in files:
        return files[TEMPLATE_PATH].decode("utf-8", "replace").strip() or None
    found = _config(files, where).get("chat_template")
    if found is None and _PROCESSOR_TEMPLATE_PATH in files:
        found = _mapping(files[_PROCESSOR_TEMPLATE_PATH], f"{where}: {_PROCESSOR_TEMPLATE_PATH}").get("chat_template")
    if isinstance(found, list):
        named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
        found = named.get("default")
    return (found.strip() or None) if isinstance(found, str) else None


def with_chat_template(files: Files, template: str, where: str) -> dict[str, bytes | None]:
    """The files that change (None: are removed) so that `template` is the only one: it goes where one was.

    Raises:
        BadInputError: tokenizer_config.json is not what it should be.
    """
    changed: dict[str, bytes | None] = {path: None for path in files if path.startswith(_OTHER_TEMPLATES)}
    config = _config(files, where)
    if TEMPLATE_PATH in files or CONFIG_PATH not in files:
        changed[TEMPLATE_PATH] = template.encode()
        if config.pop("chat_template", None) is not None:
            changed[CONFIG_PATH] = _dump(config)
    else:
        changed[CONFIG_PATH] = _dump({**config, "chat_template": template})
    if _PROCESSOR_TEMPLATE_PATH in files:
        changed[_PROCESSOR_TEMPLATE_PATH] = _dump({"chat_template": template})
    return changed


def _load(content: bytes, where: str) -> Tokenizer:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise UsageError(
            "recipes with tokenizer_source or tokenizer need the tokenizers library: pip install 'mpfs[tokenizers]'"
        ) from error
    try:
        return Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises nothing narrower
        raise BadInputError(
            f"{where}: {TOKENIZER_PATH} cannot be read: {' '.join(str(error).split())[:200]}"
        ) from error


def _complete(tokenizer: Tokenizer, files: Files, where: str) -> Tokenizer:
    """With the tokens that only the other files tell of, in the order in which transformers adds them."""
    known = tokenizer.get_vocab(with_added_tokens=True)
    told = [token for _, token in _told_tokens(files, where)]
    if not told and ADDED_PATH in files:
        path = f"{where}: {ADDED_PATH}"
        ids = _ids(_mapping(files[ADDED_PATH], path), path)
        told += [AddedToken(content) for content in sorted(ids, key=ids.__getitem__)]
    config = {**_mapping_at(files, SPECIAL_PATH, where), **_mapping_at(files, CONFIG_PATH, where)}
    named = [config.get(name) for name in _NAMED_TOKENS]
    more = config.get("additional_special_tokens", config.get("extra_special_tokens"))
    named += more if isinstance(more, list) else []
    contents = [item.get("content") if isinstance(item, dict) else item for item in named]
    told += [AddedToken(content, special=True, normalized=False) for content in contents if isinstance(content, str)]
    new = {token.content: token for token in reversed(told) if token.content not in known}
    _add(tokenizer, list(reversed(new.values())))
    return tokenizer


def _add(tokenizer: Tokenizer, tokens: Iterable[AddedToken]) -> None:
    from tokenizers import AddedToken as Added

    # All at once: each call builds the library's search structure anew.
    tokenizer.add_tokens(
        [
            Added(
                token.content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=token.special,
            )
            for token in tokens
        ]
    )


def _vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    decoder = tokenizer.get_added_tokens_decoder()
    added = {
        item.content: AddedToken(
            item.content, item.special, item.normalized, item.single_word, item.lstrip, item.rstrip
        )
        for _, item in sorted(decoder.items())
    }
    return Vocabulary(tokenizer.get_vocab(with_added_tokens=True), added)


def _told_tokens(files: Files, where: str) -> list[tuple[int, AddedToken]]:
    """The tokens of tokenizer_config.json's added_tokens_decoder, by id."""
    decoder = _config(files, where).get("added_tokens_decoder")
    if not isinstance(decoder, dict):
        return []
    found = [
        (int(index), item)
        for index, item in decoder.items()
        if index.isascii() and index.isdigit() and isinstance(item, dict) and isinstance(item.get("content"), str)
    ]
    return [
        (
            index,
            AddedToken(
                item["content"],
                special=item.get("special") is True,
                normalized=item.get("normalized") is not False,
                single_word=item.get("single_word") is True,
                lstrip=item.get("lstrip") is True,
                rstrip=item.get("rstrip") is True,
            ),
        )
        for index, item in sorted(found, key=lambda pair: pair[0])
    ]


def _config(files: Files, where: str) -> dict[str, Any]:
    return _mapping_at(files, CONFIG_PATH, where)


def _mapping_at(files: Files, path: str, where: str) -> dict[str, Any]:
    return _mapping(files[path], f"{where}: {path}") if path in files else {}


def _mapping(content: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{where}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadInputError(f"{where}: not a JSON object")
    return value


def _ids(value: Mapping[str, Any], where: str) -> dict[str, int]:
    if not all(isinstance(index, int) and not isinstance(index, bool) and index >= 0 for index in value.values()):
        raise BadInputError(f"{where}: not a vocabulary, which gives each token its number")
    return dict(value)


def _dump(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
