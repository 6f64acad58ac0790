"""The end of `make demo`: a real server on two ranks, one streamed answer printed as it comes, and a clean end.

    python benchmarks/demo.py [MODEL] [--predictors DIR] [--ep 2] [--out demo-results/serve]

The server ends with this program, whatever happens; no answer, or an end other than exit code 0, is an error.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import httpx

from moeless.bench.serve_process import running_server
from moeless.errors import MoelessError, RankError

QUESTION = "What is a list?"


def ask(url: str, question: str, max_tokens: int) -> int:
    """Print a chat answer token by token; how many tokens it has. Raises `RankError` when there is none."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    num_tokens, last = 0, ""
    with (
        httpx.Client(base_url=url, timeout=120) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        if answer.status_code != 200:
            raise RankError(f"the server says {answer.status_code}: {answer.read().decode()}")
        for line in answer.iter_lines():
            last = line.removeprefix("data: ") or last
            if not line or last == "[DONE]":
                continue
            event = json.loads(last)
            if "error" in event:
                raise RankError(f"the stream broke off: {event['error']['message']}")
            for choice in event["choices"]:
                print(choice["delta"].get("content", ""), end="", flush=True)
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
    print(flush=True)
    if last != "[DONE]" or not num_tokens:
        raise RankError(f"the stream ended with {last!r} after {num_tokens} tokens")
    return num_tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="checkpoints/demo-moe")
    parser.add_argument("--predictors")
    parser.add_argument("--ep", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("demo-results/serve"))
    given = parser.parse_args()
    flags = ["--ep", str(given.ep)] + (["--predictors", given.predictors] if given.predictors else [])
    print(f"$ moeless serve {given.model} {' '.join(flags)}", flush=True)
    try:
        with running_server(given.model, flags, given.out / "server.log", 300) as url:
            print(f"ready at {url}\nuser: {QUESTION}\nassistant: ", end="", flush=True)
            num_tokens = ask(url, QUESTION, given.max_tokens)
    except (MoelessError, httpx.HTTPError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    print(f"{num_tokens} tokens streamed; the server ended with exit code 0 after SIGTERM")
    return 0


if __name__ == "__main__":
    sys.exit(main())
