"""`make gpu-check`: whether the engine is exact on one GPU, and what that GPU costs at the shape of Mixtral's experts.

Everything is a function of the device, so that tests run the same code on a CPU at a smaller shape. Needs about 5 GB of
GPU memory, 2 GB of disk and a few minutes.

Legend: E experts, H hidden, F expert ffn, T tokens.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, MixtralConfig, MixtralForCausalLM

from moeless.bench.layers_experts import RandomExperts, write_random_experts
from moeless.config.model import ModelConfig
from moeless.engine.calibrate import calibrate, device_clock
from moeless.engine.ep import LocalGroup
from moeless.engine.expert_layers import ExpertSettings, build_expert_layers
from moeless.engine.expert_pool import ExpertPool
from moeless.files import write_json
from moeless.models.expert_store import expert_bytes
from moeless.models.weights import load_skeleton
from moeless.policy.balancers import make_balancer
from moeless.policy.cost import CostModel
from moeless.policy.types import EpShape

_NUM_NEW = 12


def main() -> int:
    """Run all checks on the first GPU; prints what was found and writes it to `gpu-check/`."""
    if not torch.cuda.is_available():
        print("gpu-check: there is no CUDA device here; the CUDA paths stay untested on this machine", file=sys.stderr)
        return 1
    device, out = torch.device("cuda:0"), Path("gpu-check")
    print(f"device: {torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(device), "source": "live"}
    with tempfile.TemporaryDirectory(prefix="moeless-gpu-") as folder:
        found["exact"] = check_exact(device, Path(folder))
        found["grouped"] = check_grouped(device, Path(folder), hidden=1024, ffn=2048)
        costs, cluster = measure_costs(device, Path(folder), hidden=4096, ffn=14_336, dtype=torch.bfloat16)
    found |= {"costs": costs, "planning_us": measure_planning(costs), "cluster": cluster}
    write_json(out / "gpu-check.json", found)
    write_json(out / "cluster.json", cluster)
    for key, value in found.items():
        print(f"{key}: {value}")
    print(f"written: {out / 'gpu-check.json'}; use it with: moeless bench simulate --cluster {out / 'cluster.json'}")
    return 0 if found["exact"]["tokens_equal"] and found["grouped"]["close"] else 1


def check_exact(device: torch.device, folder: Path) -> dict[str, Any]:
    """A small Mixtral over expert slots against transformers: all experts resident, and with room for a third."""
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    MixtralForCausalLM(config).save_pretrained(folder / "model")
    model = MixtralForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).to(device).eval()  # type: ignore[arg-type]
    prompt = torch.randint(3, 256, (3, 9), generator=torch.Generator().manual_seed(1)).to(device)
    settings = GenerationConfig(max_new_tokens=_NUM_NEW, do_sample=False, pad_token_id=0)
    settings.eos_token_id = None
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)
    equal, differences, cold = [], [], []
    for share in (None, 1 / 3):
        loaded, store = load_skeleton(ModelConfig(model=str(folder / "model"), dtype="float32", device=str(device)))
        budget = None if share is None else round((share * 4 * 8 + 1) * expert_bytes(store))
        layers = build_expert_layers(
            loaded.model, loaded.layers, store, LocalGroup(device), ExpertSettings(budget_bytes=budget)
        )
        layers.load_initial()
        ids = prompt
        with torch.inference_mode():
            for step in range(_NUM_NEW):
                layers.begin_step(step)
                logits = loaded.model(ids, use_cache=False).logits
                ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
            differences.append(float((logits - model(ids[:, :-1], use_cache=False).logits).abs().max()))
        equal.append(torch.equal(ids, expected))
        cold.append(layers.controller.meters.cold)
        layers.close()
    return {"tokens_equal": all(equal), "largest_logit_difference": max(differences), "cold_starts": cold}


def check_grouped(device: torch.device, folder: Path, *, hidden: int, ffn: int) -> dict[str, Any]:
    """Neighbouring slots computed by one grouped product against the plain loop, in bfloat16."""
    path = folder / "grouped.safetensors"
    write_random_experts(path, num_experts=6, hidden=hidden, ffn=ffn, dtype=torch.bfloat16, seed=0)
    source = RandomExperts(path)
    generator = torch.Generator().manual_seed(2)
    counts = [40, 1, 0, 300, 17, 64]
    rows = torch.randn(sum(counts), hidden, generator=generator).to(device, torch.bfloat16)
    outputs = []
    for grouped in (False, True):
        pool = ExpertPool(source, 6, device, grouped=grouped)
        for expert in (0, 1, 3, 4, 5):
            pool.load_now(0, expert)
        outputs.append(pool.compute(0, rows, counts).float())
        pool.close()
    difference = float((outputs[0] - outputs[1]).abs().max() / outputs[0].abs().max())
    return {"close": difference < 0.02, "largest_relative_difference": difference}


def measure_costs(
    device: torch.device, folder: Path, *, hidden: int, ffn: int, dtype: torch.dtype
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what an expert and its load cost, with a router's time; the same as a cluster file for `bench simulate`).

    One GPU alone has no link to measure, so the cluster's link rate is that of its memory.
    """
    path = folder / "experts.safetensors"
    write_random_experts(path, num_experts=4, hidden=hidden, ffn=ffn, dtype=dtype, seed=0)
    clock = device_clock(device)
    with torch.inference_mode():
        pool = ExpertPool(RandomExperts(path), 4, device)
        found = calibrate(LocalGroup(device), pool, clock)
        pool.close()
        costs = found.as_dict() | {"prediction_us": _prediction_us(device, hidden, dtype, clock)}
    cluster = dataclasses.asdict(found.cluster(8, 3 * hidden * ffn, hidden, dtype.itemsize))
    return costs, cluster | {"link_bytes_per_s": cluster["memory_bytes_per_s"]}


def measure_planning(costs: dict[str, Any]) -> dict[str, float]:
    """Median host time of one plan and of one split of the default balancer: E = 64 experts on 8 ranks."""
    shape = EpShape(num_experts=64, num_ranks=8, num_slots=72)
    names = [field.name for field in dataclasses.fields(CostModel)]
    balancer = make_balancer("moeless-roofline", shape, 1, CostModel(**{name: costs[name] for name in names}))
    rng = np.random.default_rng(0)
    popularity = rng.dirichlet(np.full(64, 0.7))
    placement = balancer.initial(0)
    plans, splits = [], []
    for iteration in range(200):
        counts_E = rng.multinomial(4_096, popularity).astype(np.int64)
        begin = time.perf_counter()
        placement = balancer.plan(iteration, 0, None, placement).placement
        planned = time.perf_counter()
        shares_EG = balancer.split(0, counts_E, placement)
        splits.append(time.perf_counter() - planned)
        plans.append(planned - begin)
        balancer.observe(iteration, 0, counts_E, shares_EG)
    mean_plan = 1e6 * statistics.fmean(plans)  # most iterations keep the plan, so the mean is what counts
    return {"plan_mean": mean_plan, "split_median": 1e6 * statistics.median(splits)}


def _prediction_us(device: torch.device, hidden: int, dtype: torch.dtype, clock: Callable[[], float]) -> float:
    """Median time to predict 256 tokens' experts with a gate of 64: product, softmax, top-k, count."""
    x_TH = torch.randn(256, hidden, device=device, dtype=dtype)
    gate_EH = torch.randn(64, hidden, device=device, dtype=dtype)
    times = []
    for _ in range(20):
        begin = clock()
        torch.bincount((x_TH @ gate_EH.T).softmax(-1).topk(4).indices.reshape(-1), minlength=64)
        times.append(clock() - begin)
    return 1e6 * statistics.median(times[5:])


if __name__ == "__main__":
    raise SystemExit(main())
