"""Text of a growing list of tokens: whole characters, the same as decoding at once, and stop strings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from moeless.engine.request import SamplingParams
from moeless.engine.text import TextStream, find_stop
from tests.engine.serving import make_sequence

TEXTS = ["Hello, world!", "naïve café — 你好 🙂🙃 x", "  spaces   and\n\nlines\t", "日本語のテキスト", "a"]


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(demo_model)


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text_and_never_split_a_character(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in ids]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == text == stream.whole(ids)
    assert stream.finish() == ""


def test_an_incomplete_character_comes_at_the_end_only(tokenizer: Any) -> None:
    ids = tokenizer("x🙂", add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in ids[:-1]]
    assert "".join(pieces) == "x"
    assert "\ufffd" in stream.finish()


@pytest.mark.parametrize(
    ("text", "num_new", "stops", "expected"),
    [
        ("abc END", 3, ["END"], ("END", 4)),
        ("abc END", 1, ["END"], ("END", 4)),
        ("END abc", 1, ["END"], None),
        ("aXbY", 4, ["Y", "Xb"], ("Xb", 1)),
        ("ab", 1, ["b", "ab"], ("ab", 0)),
        ("abc", 1, [], None),
    ],
)
def test_stop_strings(text: str, num_new: int, stops: list[str], expected: tuple[str, int] | None) -> None:
    assert find_stop(text, num_new, stops) == expected


@pytest.mark.parametrize("include", [False, True])
def test_a_sequence_stops_inside_a_token(tokenizer: Any, include: bool) -> None:
    text = "The quick brown fox jumps over the lazy dog."
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    params = SamplingParams(max_tokens=99, stop=["own fo"], include_stop_str_in_output=include)
    sequence = make_sequence(0, [5], params, tokenizer=tokenizer)
    for token in ids:
        if sequence.finish_reason is None:
            sequence.append(token)
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", "own fo")
    assert sequence.output().text == ("The quick brown fo" if include else "The quick br")
    assert sequence.num_output < len(ids)


@pytest.mark.parametrize(
    ("params", "tokens", "reason", "stop_reason"),
    [
        ({"max_tokens": 3}, [9, 9, 9], "length", None),
        ({"max_tokens": 9}, [9, 2], "stop", None),
        ({"max_tokens": 3, "ignore_eos": True}, [9, 2, 9], "length", None),
        ({"max_tokens": 9, "stop_token_ids": [8]}, [9, 8], "stop", 8),
        ({"max_tokens": 2}, [9, 2], "stop", None),
        ({"max_tokens": 9, "min_tokens": 2, "stop_token_ids": [8]}, [8, 8], "stop", 8),
    ],
)
def test_ends(params: dict[str, Any], tokens: list[int], reason: str, stop_reason: int | None) -> None:
    sequence = make_sequence(0, [5], SamplingParams(**params), eos_ids=[2])
    for token in tokens:
        assert sequence.finish_reason is None
        sequence.append(token)
    assert (sequence.finish_reason, sequence.stop_reason) == (reason, stop_reason)


def test_a_sequence_that_goes_on_elsewhere_knows_its_text(tokenizer: Any) -> None:
    ids = tokenizer("one two three STOP four", add_special_tokens=False)["input_ids"]
    params = SamplingParams(max_tokens=99, stop="three STOP")
    whole = make_sequence(0, [5], params, tokenizer=tokenizer)
    for token in ids:
        if whole.finish_reason is None:
            whole.append(token)
    half = whole.num_output // 2
    resumed = make_sequence(0, [5], params, tokenizer=tokenizer, made=ids[:half])
    for token in ids[half:]:
        if resumed.finish_reason is None:
            resumed.append(token)
    assert resumed.output() == whole.output()
    assert whole.output().text == "one two "
