"""Reading corpora: every accepted shape, damaged files, bad rows by line."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeless.errors import DataError
from moeless.train.data import Document, load_corpus, parse_cut_json_array

TURNS = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def write(path: Path, value: object) -> str:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return str(path)


def test_sharegpt_whole(tmp_path: Path) -> None:
    corpus = load_corpus(write(tmp_path / "a.json", [{"id": "1", "conversations": TURNS}] * 3))
    assert corpus.documents == [Document(messages=MESSAGES)] * 3
    assert corpus.notes == []


def test_sharegpt_cut_off_says_how_many_were_recovered(tmp_path: Path) -> None:
    whole = json.dumps([{"id": str(i), "conversations": TURNS} for i in range(5)])
    corpus = load_corpus(write(tmp_path / "a.json", whole[:-40]))
    assert len(corpus.documents) == 4
    assert "4 conversations recovered" in corpus.notes[0]


@given(st.lists(st.text() | st.integers() | st.dictionaries(st.text(), st.text())), st.data())
def test_every_prefix_of_an_array_gives_its_whole_items(items: list[object], data: st.DataObject) -> None:
    text = json.dumps(items)
    cut = data.draw(st.integers(1, len(text)))
    found, error = parse_cut_json_array(text[:cut])
    # A number at the very end may be a longer number cut short; everything before it is certain.
    assert found[: len(found) - 1] == items[: max(0, len(found) - 1)]
    assert len(found) <= len(items)
    assert (error is None) == (cut == len(text))


def test_jsonl_shapes_and_bad_rows(tmp_path: Path) -> None:
    lines = [
        json.dumps({"text": "plain"}),
        json.dumps({"prompt": "ask"}),
        json.dumps({"messages": MESSAGES}),
        "{not json",
        json.dumps({"messages": [{"role": "user"}]}),
        json.dumps({"other": 1}),
        json.dumps({"text": "   "}),
        json.dumps({"question_id": 1, "turns": ["first", "second"]}),
        json.dumps({"token_ids": [3, 4, 5]}),
        json.dumps({"token_ids": [3, -4]}),
        json.dumps({"messages": [{"role": "user", "content": [{"type": "text", "text": "part"}]}]}),
    ]
    path = write(tmp_path / "a.jsonl", "\n".join(lines))
    corpus = load_corpus(path)
    assert [d.text for d in corpus.documents if d.text] == ["plain"]
    assert [d.messages[0]["content"] for d in corpus.documents if d.messages] == ["ask", "Hi", "first", "part"]
    assert [d.token_ids for d in corpus.documents if d.token_ids] == [[3, 4, 5]]
    assert corpus.num_bad_rows == 5
    assert [row.split(": ")[0] for row in corpus.bad_rows] == [f"{path}:{n}" for n in (4, 5, 6, 7, 10)]


def test_plain_text_folder_and_stdin(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub" / "a.txt", "word " * 1000 + "\n\n" + "more " * 1000)
    write(tmp_path / "b.jsonl", json.dumps({"text": "row"}))
    write(tmp_path / "ignored.csv", "x,y")
    assert len(load_corpus(str(tmp_path)).documents) == 3
    assert load_corpus("-", stdin=io.StringIO("just text")).documents == [Document(text="just text")]
    assert load_corpus("-", stdin=io.StringIO('{"text": "row"}\n')).documents == [Document(text="row")]


def test_default_corpus_says_what_it_is() -> None:
    corpus = load_corpus(None)
    assert len(corpus.documents) > 50
    assert "no --data given" in corpus.notes[0]


def test_text_starting_with_a_bracket_is_text(tmp_path: Path) -> None:
    assert load_corpus(write(tmp_path / "a.txt", "[not json")).documents == [Document(text="[not json")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", "", "no usable text"),
        ("blank.txt", " \n ", "no usable text"),
        ("bad.jsonl", "{\n{\n", "bad.jsonl:1: not JSON"),
        ("list.json", "[1, 2]", "item 1: a row must be an object"),
    ],
)
def test_nothing_usable_is_an_error(tmp_path: Path, name: str, content: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_corpus(write(tmp_path / name, content))


def test_missing_path_and_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load_corpus(str(tmp_path / "nowhere.json"))
    with pytest.raises(DataError, match="in folder"):
        load_corpus(str(tmp_path))


def test_deeply_nested_json_is_a_bad_row_not_a_crash(tmp_path: Path) -> None:
    corpus = load_corpus(write(tmp_path / "a.jsonl", "[" * 100_000 + '\n{"text": "row"}'))
    assert corpus.documents == [Document(text="row")]
    assert "a.jsonl:1: not JSON" in corpus.bad_rows[0]
