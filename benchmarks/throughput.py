"""Offline throughput of moeless against transformers and vLLM: the same prompts, greedy, fp32, on one machine.

    python benchmarks/throughput.py [MODEL] [--streams 16] [--tokens 64] [--rounds 5] [--json FILE]

Each peer is a process of its own that loads the model and then stands still; rounds go round all of them in turn, so
that what else the machine does hits all alike, and one that polls while it waits hits none. A peer that isn't installed
is skipped, and one that fails is named. vLLM may live in another environment: --vllm-python PATH. Everyone's tokens are
compared with those of transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
Tokens = list[list[int]]


def load_moeless(model: str, ep: int) -> Callable[[Tokens, int], Tokens]:
    from moeless import LLM
    from moeless.engine.request import SamplingParams

    llm = LLM(model, ep=ep, dtype="float32")

    def generate(prompts: Tokens, num_tokens: int) -> Tokens:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]

    return generate


def load_transformers(model: str) -> Callable[[Tokens, int], Tokens]:
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    loaded.generation_config.eos_token_id = None
    loaded.generation_config.pad_token_id = 0

    def generate(prompts: Tokens, num_tokens: int) -> Tokens:
        ids = torch.tensor(prompts)  # of one length, so nothing is padded
        mask = torch.ones_like(ids)
        with torch.inference_mode():
            made = loaded.generate(ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False)
        return made[:, ids.shape[1] :].tolist()

    return generate


def load_vllm(model: str) -> Callable[[Tokens, int], Tokens]:
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype="float32", enforce_eager=True)

    def generate(prompts: Tokens, num_tokens: int) -> Tokens:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(output.outputs[0].token_ids) for output in llm.generate(inputs, params, use_tqdm=False)]

    return generate


PEERS: dict[str, Callable[[str], Callable[[Tokens, int], Tokens]]] = {
    "transformers": load_transformers,
    "moeless --ep 1": lambda model: load_moeless(model, 1),
    "moeless --ep 2": lambda model: load_moeless(model, 2),
    "vllm": load_vllm,
}


def work(peer: str, model: str) -> None:
    """A peer's process: load, say so, then a line of JSON out for every line in."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    generate = PEERS[peer](model)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        begin_s = time.perf_counter()
        tokens = generate(order["prompts"], order["num_tokens"])
        seconds = time.perf_counter() - begin_s
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers, flush=True)


class Peer:
    """A peer's process as the parent sees it."""

    def __init__(self, name: str, model: str, python: str) -> None:
        env = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ}
        command = [python, __file__, model, "--work", name]
        self.name, self.error = name, ""
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=env,
            start_new_session=True,
        )
        if self._line() != "ready\n":
            self._fail()
        self._signal(signal.SIGSTOP)

    def run(self, prompts: Tokens, num_tokens: int) -> dict[str, Any] | None:
        """One round, in which all other peers stand still: seconds and tokens; None when the peer has failed."""
        self._signal(signal.SIGCONT)
        answer = self._ask(prompts, num_tokens)
        self._signal(signal.SIGSTOP)
        return answer

    def _ask(self, prompts: Tokens, num_tokens: int) -> dict[str, Any] | None:
        assert self._process.stdin is not None
        try:
            print(json.dumps({"prompts": prompts, "num_tokens": num_tokens}), file=self._process.stdin, flush=True)
            answer: dict[str, Any] = json.loads(self._line())
        except (BrokenPipeError, ValueError):
            self._fail()
            return None
        return answer

    def close(self) -> None:
        """End it, and whatever it has started: vLLM's own processes outlive a parent that is merely killed."""
        self._signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=20)  # the end of its input is the word to go
        self._signal(signal.SIGKILL)
        self._process.communicate()
        self._said.close()

    def _signal(self, number: signal.Signals) -> None:
        """To the peer and all it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def _fail(self) -> None:
        self._process.communicate()
        self._said.seek(0)
        lines = self._said.read().strip().splitlines()
        self.error = lines[-1] if lines else "ended without a word"


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All rounds of all peers."""
    vocab_size = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
    rng = random.Random(args.seed)
    prompts = [[rng.randrange(10, vocab_size) for _ in range(args.prompt_tokens)] for _ in range(args.streams)]
    peers, skipped = start_peers(args)
    seconds: dict[str, list[float]] = {peer.name: [] for peer in peers}
    tokens: dict[str, Tokens] = {}
    for number in range(args.rounds + 1):  # the first one warms up
        for peer in peers:
            if not peer.error and (answer := peer.run(prompts, args.tokens)) is not None:
                tokens[peer.name] = answer["tokens"]
                seconds[peer.name] += [answer["seconds"]] * (number > 0)
                print(f"round {number} {peer.name}: {answer['seconds']:.2f} s", file=sys.stderr, flush=True)
    for peer in peers:
        peer.close()
        if peer.error:
            skipped[peer.name] = peer.error
    made = args.streams * args.tokens
    rows = [row(name, made, seconds[name], tokens, args) for name in seconds if name not in skipped]
    host = {"platform": platform.platform(), "num_cpus": os.cpu_count(), "load_average": os.getloadavg()[0]}
    return {"schema": "moeless.throughput/1", "source": "live", "host": host, "peers": rows, "skipped": skipped}


def start_peers(args: argparse.Namespace) -> tuple[list[Peer], dict[str, str]]:
    """The peers asked for that are installed, loaded one after the other; and why others are not there."""
    peers, skipped = [], {}
    for name in args.peers:
        python = args.vllm_python if name == "vllm" else sys.executable
        package = name.split()[0]
        if subprocess.run(
            [python, "-c", f"import importlib.util as u; exit(u.find_spec({package!r}) is None)"]
        ).returncode:
            skipped[name] = "not installed"
            continue
        peer = Peer(name, args.model, python)
        if peer.error:
            skipped[name] = peer.error
        else:
            peers.append(peer)
    return peers, skipped


def row(
    name: str, made: int, seconds: list[float], tokens: dict[str, Tokens], args: argparse.Namespace
) -> dict[str, Any]:
    """A peer's numbers; `same_streams` are those whose every token is transformers'."""
    reference = tokens.get("transformers")
    pairs = None if reference is None else zip(tokens[name], reference, strict=True)
    return {
        "name": name,
        "tokens_per_s_median": made / statistics.median(seconds),
        "tokens_per_s_best": made / min(seconds),
        "seconds": seconds,
        "same_streams": None if pairs is None else sum(ours == theirs for ours, theirs in pairs),
        "streams": args.streams,
        "tokens": args.tokens,
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(ROOT / "checkpoints" / "demo-moe"))
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="tokens to make for each stream")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--vllm-python", default=sys.executable, help="interpreter of an environment that has vLLM")
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--work", choices=list(PEERS), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    if args.work:
        work(args.work, args.model)
        return
    result = measure(args)
    print(f"{args.streams} greedy streams of {args.tokens} tokens, fp32, {args.rounds} rounds; output tokens a second")
    print(f"{'peer':<16}{'median':>10}{'best':>10}{'same as transformers':>24}")
    for peer in result["peers"]:
        same = "-" if peer["same_streams"] is None else f"{peer['same_streams']} of {peer['streams']}"
        print(f"{peer['name']:<16}{peer['tokens_per_s_median']:>10.1f}{peer['tokens_per_s_best']:>10.1f}{same:>24}")
    for name, reason in result["skipped"].items():
        print(f"{name:<16}skipped: {reason}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
