"""The command line as a user meets it: exit codes, one-line errors, JSON on stdout alone."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import save_tiny_checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from moeless.config.options import flag_name, parse_int_set, parse_names
from moeless.config.profile import ProfileConfig
from moeless.errors import UsageError


def moeless(*args: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moeless", *args], capture_output=True, text=True, timeout=120, input=stdin, check=False
    )


def one_line_error(done: subprocess.CompletedProcess[str], code: int) -> str:
    lines = [line for line in done.stderr.splitlines() if line.startswith("moeless: ")]
    assert done.returncode == code, done.stderr
    assert len(lines) == 1
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    return lines[0]


def test_help_and_version() -> None:
    for args in (["--help"], ["profile", "--help"], ["bench", "--help"]):
        done = moeless(*args)
        assert done.returncode == 0
        assert "Usage" in done.stdout
    assert moeless("--version").stdout.strip() == "0.1.0"


def test_every_field_is_a_flag() -> None:
    shown = moeless("profile", "--help").stdout
    for config_field in dataclasses.fields(ProfileConfig):
        assert flag_name(config_field) in shown


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--threshold", "0"], "--threshold must lie in (0, 1], got 0.0"),
        (["--threshold", "1.5"], "--threshold must lie in (0, 1], got 1.5"),
        (["--distance", "0"], "--distance takes ascending numbers from 1"),
        (["--distance", "x"], "--distance takes numbers and ranges"),
        (["--distance", "12"], "needs more than 12 MoE layers"),
        (["--max-tokens", "1"], "--max-tokens must be at least 64, got 1"),
        (["--max-length", "2000"], "does not fit in a batch"),
    ],
)
def test_wrong_flags_are_usage_errors(demo_model: Path, tmp_path: Path, args: list[str], message: str) -> None:
    done = moeless("profile", str(demo_model), *args, "--out", str(tmp_path / "out"))
    assert message in one_line_error(done, code=2)
    assert not (tmp_path / "out").exists()


def test_unknown_flag_is_a_usage_error() -> None:
    assert moeless("profile", "x", "--no-such-flag").returncode == 2


def test_models_and_data_that_cannot_be_used(demo_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "does not exist" in one_line_error(moeless("profile", "no/such/model", "--out", str(out)), code=1)
    dense = AutoConfig.for_model("llama", hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64)
    AutoModelForCausalLM.from_config(dense).save_pretrained(tmp_path / "dense")
    assert "dense model" in one_line_error(moeless("profile", str(tmp_path / "dense"), "--out", str(out)), code=1)
    (tmp_path / "empty.jsonl").write_text("")
    done = moeless("profile", str(demo_model), "--data", str(tmp_path / "empty.jsonl"), "--out", str(out))
    assert "no usable text" in one_line_error(done, code=1)
    (tmp_path / "file").write_text("")
    done = moeless("profile", str(demo_model), "--max-tokens", "64", "--out", str(tmp_path / "file" / "x"))
    assert "is not a folder" in one_line_error(done, code=1)
    assert not out.exists()


def test_model_without_tokenizer(tmp_path: Path) -> None:
    save_tiny_checkpoint("olmoe", tmp_path / "model")
    common = ["profile", str(tmp_path / "model"), "--out", str(tmp_path / "out"), "--json", "--distance", "1-2"]
    assert "no tokenizer" in one_line_error(moeless(*common), code=1)
    rows = "\n".join(json.dumps({"token_ids": list(range(5 + i, 60))}) for i in range(8))
    done = moeless(*common, "--data", "-", stdin=rows)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["num_tokens"]["prefill"] == sum(55 - i for i in range(8))
    outside = json.dumps({"token_ids": [1, 2, 128]})
    assert "outside the model's vocabulary" in one_line_error(moeless(*common, "--data", "-", stdin=outside), code=1)


def test_profile_prints_tables_and_names_bad_rows(demo_model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(
        "\n".join([json.dumps({"prompt": f"Tell me about the number {i}. " * 20}) for i in range(20)] + ["{"])
    )
    args = ["--data", str(data), "--max-tokens", "500", "--decode-tokens", "64", "--distance", "1"]
    done = moeless("profile", str(demo_model), *args, "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "prefill: token_recall" in done.stdout
    assert "1 bad rows left out" in done.stdout
    assert "(layer, distance) pairs are below token-recall 0.8" in " ".join(done.stdout.split())


def test_int_sets_and_names() -> None:
    assert parse_int_set("--d", "1-3,5", 1) == (1, 2, 3, 5)
    assert parse_names("--b", "a, b", ("a", "b", "c")) == ("a", "b")
    for text in ("", "3-1", "1-", "-1", "1,,2", "0", "1.5", "99999999999"):
        with pytest.raises(UsageError):
            parse_int_set("--d", text, 1)
    for text in ("", "a,a", "z"):
        with pytest.raises(UsageError):
            parse_names("--b", text, ("a", "b"))
