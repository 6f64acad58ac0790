"""Text for capture: prompts and conversations from files, folders, stdin or the standard library.

A `Document` is one conversation (`messages`) or one piece of plain text; it is the unit of the train/held-out split,
so no text ever lies on both sides. Bad rows are counted and named by line, not fatal; nothing usable is an error.
Knows nothing about models: tokenizers come in `train.tokens`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from moeless.errors import DataError

Message = dict[str, str]

_ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant", "bard": "assistant"}
_SUFFIXES = {".json", ".jsonl", ".ndjson", ".txt", ".md", ".text"}
_MAX_NAMED_BAD_ROWS = 5
_PLAIN_TEXT_CHARACTERS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One conversation (`messages`), one plain `text`, or `token_ids` given as they are; exactly one is set."""

    messages: list[Message] | None = None
    text: str | None = None
    token_ids: list[int] | None = None


@dataclass(slots=True, kw_only=True)
class Corpus:
    """What was read, what could not be used, and what a reader should know about it."""

    name: str
    documents: list[Document] = field(default_factory=list)
    num_bad_rows: int = 0
    bad_rows: list[str] = field(default_factory=list)
    """The first few bad rows, as `file:row: reason`."""
    notes: list[str] = field(default_factory=list)

    def add_bad_row(self, where: str, reason: str) -> None:
        """Count a row that cannot be used and keep the first few by name."""
        self.num_bad_rows += 1
        if len(self.bad_rows) < _MAX_NAMED_BAD_ROWS:
            self.bad_rows.append(f"{where}: {reason}")


def load_corpus(source: str | None, *, stdin: TextIO | None = None) -> Corpus:
    """Read a corpus.

    Args:
        source: a file (ShareGPT or other JSON array, JSONL, plain text), a folder of such files, `-` for stdin, or
            None for the standard library's own documentation.
        stdin: stands in for `sys.stdin`.

    Raises:
        DataError: nothing there, not readable, or no usable row.
    """
    if source is None:
        corpus = _standard_library_corpus()
    elif source == "-":
        corpus = Corpus(name="stdin")
        _read_stream(corpus, "stdin", (stdin or sys.stdin).read())
    else:
        corpus = Corpus(name=source)
        for path in _files(Path(source)):
            _read_stream(corpus, str(path), _read_text(path, corpus), suffix=path.suffix.lower())
    if not corpus.documents:
        bad = f"; bad rows: {'; '.join(corpus.bad_rows)}" if corpus.bad_rows else ""
        raise DataError(
            f"no usable text in {corpus.name!r}{bad}; give ShareGPT JSON, JSONL with text, prompt or messages, "
            "or plain text"
        )
    return corpus


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix.lower() in _SUFFIXES and p.is_file())
        if not files:
            raise DataError(f"no {', '.join(sorted(_SUFFIXES))} file in folder {str(path)!r}")
        return files
    if not path.exists():
        raise DataError(f"data file {str(path)!r} does not exist; --data takes a file, a folder or - for stdin")
    return [path]


def _read_text(path: Path, corpus: Corpus) -> str:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {str(path)!r}: {error.strerror}") from error
    text = raw.decode("utf-8-sig", errors="replace")
    if "\ufffd" in text and b"\xef\xbf\xbd" not in raw:
        corpus.notes.append(f"{path}: bytes that are not UTF-8 were replaced")
    return text


def _read_stream(corpus: Corpus, name: str, text: str, suffix: str = "") -> None:
    """Add one file's documents; what kind of file it is follows from its first character, then its suffix."""
    start = text.lstrip()[:1]
    plain = suffix in {".txt", ".md", ".text"}
    if start == "[" and not plain:
        _read_json_array(corpus, name, text)
    elif (start == "{" and not plain) or (start and suffix in {".json", ".jsonl", ".ndjson"}):
        _read_json_lines(corpus, name, text)
    else:
        corpus.documents += [Document(text=block) for block in _blocks(text)]


def _read_json_array(corpus: Corpus, name: str, text: str) -> None:
    items, error = parse_cut_json_array(text)
    if error and not items:  # not an array at all, perhaps lines that begin with a bracket
        _read_json_lines(corpus, name, text)
        return
    before = len(corpus.documents)
    for index, item in enumerate(items):
        _add_row(corpus, f"{name}:item {index + 1}", item)
    if error:
        recovered = len(corpus.documents) - before
        corpus.notes.append(f"{name}: cut off or damaged ({error}); {recovered:,} conversations recovered")


def _read_json_lines(corpus: Corpus, name: str, text: str) -> None:
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        whole = None
    if isinstance(whole, dict):
        rows = next((v for v in whole.values() if isinstance(v, list) and v and isinstance(v[0], dict)), None)
        nested = rows is not None and not set(whole) & set(_ROW_READERS)
        for index, row in enumerate(rows if nested and rows else [whole]):
            _add_row(corpus, f"{name}:item {index + 1}", row)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                corpus.add_bad_row(f"{name}:{number}", f"not JSON ({str(error).split(':')[0]})")
            else:
                _add_row(corpus, f"{name}:{number}", row)


def parse_cut_json_array(text: str) -> tuple[list[Any], str | None]:
    """Every whole item of a JSON array, and what stopped the reading (None for a sound array).

    A file cut off mid-string still gives all items before the cut.
    """
    decoder = json.JSONDecoder()
    items: list[Any] = []
    position = text.index("[") + 1
    while True:
        while position < len(text) and text[position] in " \t\r\n,":
            position += 1
        if position >= len(text):
            return items, "the closing bracket is missing"
        if text[position] == "]":
            return items, None
        try:
            item, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            return items, str(error).split(":")[0]
        items.append(item)


def parse_sharegpt(text: str) -> tuple[list[list[Message]], str | None]:
    """Conversations of a ShareGPT dump, whole or cut off, and what stopped the reading if anything did."""
    items, error = parse_cut_json_array(text)
    conversations = []
    for item in items:
        try:
            document = _row_to_document(item)
        except ValueError:
            continue
        if document.messages:
            conversations.append(document.messages)
    return conversations, error


def _add_row(corpus: Corpus, where: str, row: Any) -> None:
    try:
        corpus.documents.append(_row_to_document(row))
    except ValueError as error:
        corpus.add_bad_row(where, str(error))


def _row_to_document(row: Any) -> Document:
    """One row of any of the accepted shapes.

    Raises:
        ValueError: with the reason, when the row cannot be used.
    """
    if isinstance(row, str):
        row = {"text": row}
    if isinstance(row, list):
        row = {"messages": row}
    if not isinstance(row, dict):
        raise ValueError(f"a row must be an object or a string, not {type(row).__name__}")
    for key, reader in _ROW_READERS.items():
        if row.get(key) is not None:
            return reader(row[key])
    raise ValueError(f"none of {', '.join(_ROW_READERS)} among its keys ({', '.join(map(str, row)) or 'none'})")


def _read_plain(value: Any) -> Document:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("empty text" if isinstance(value, str) else f"text is {type(value).__name__}, not a string")
    return Document(text=value)


def _read_prompt(value: Any) -> Document:
    if isinstance(value, list):
        return _read_messages(value)
    return Document(messages=[{"role": "user", "content": _read_plain(value).text or ""}])


def _read_token_ids(value: Any) -> Document:
    if not isinstance(value, list) or not value or not all(type(i) is int and i >= 0 for i in value):
        raise ValueError("token_ids must be a list of whole numbers from 0, with at least one")
    return Document(token_ids=value)


def _read_turns(value: Any) -> Document:
    """MT-bench style: a list of user turns; the first alone is a whole prompt."""
    if not isinstance(value, list) or not value:
        raise ValueError("turns must be a list of strings with at least one")
    return _read_prompt(value[0])


def _read_messages(value: Any) -> Document:
    if not isinstance(value, list):
        raise ValueError(f"a conversation must be a list of turns, not {type(value).__name__}")
    messages = [_read_turn(turn) for turn in value]
    if not any(m["content"].strip() for m in messages):
        raise ValueError("empty conversation")
    return Document(messages=messages)


def _read_turn(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise ValueError(f"a turn must be an object, not {type(turn).__name__}")
    role = turn.get("role", turn.get("from"))
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list):
        content = "".join(p.get("text", "") for p in content if isinstance(p, dict) and p.get("type") == "text")
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError("a turn needs role and content (or from and value) as strings")
    return {"role": _ROLES.get(role, role), "content": content}


_ROW_READERS: dict[str, Callable[[Any], Document]] = {
    "messages": _read_messages,
    "conversations": _read_messages,
    "conversation": _read_messages,
    "prompt": _read_prompt,
    "turns": _read_turns,
    "text": _read_plain,
    "content": _read_plain,
    "token_ids": _read_token_ids,
    "prompt_token_ids": _read_token_ids,
}


def _blocks(text: str) -> Iterator[str]:
    """Plain text in pieces of about 2,000 characters that end at blank lines, so that one file makes many documents."""
    block = ""
    for paragraph in text.split("\n\n"):
        block = f"{block}\n\n{paragraph}" if block else paragraph
        if len(block) >= _PLAIN_TEXT_CHARACTERS:
            yield block
            block = ""
    if block.strip():
        yield block


def _standard_library_corpus() -> Corpus:
    from pydoc_data.topics import topics  # type: ignore[import-not-found,unused-ignore]

    corpus = Corpus(name="pydoc_data.topics")
    corpus.documents = [Document(text=text) for _, text in sorted(topics.items())]
    corpus.notes.append("no --data given: profiling on the Python language reference, not on your traffic")
    return corpus
