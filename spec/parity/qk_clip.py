"""The policy qk_clip against Megatron-LM's SelfAttention.clip_qk (megatron-core 0.16.1), whose own
code runs in float64 and with its own logits: after each of 100 steps, the query and key weights of
random attention layers must be the same within 1e-6 of the largest. The two agree only where each
head has its own keys (policies/qk_clip.lua names the differences) and where every head's largest
logit is above 0, because Megatron-LM takes the root of threshold / logit. Prints a summary; exits
with 1 if a weight differs by more or if no head was clipped.
"""
import argparse
import importlib.util
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import types
import warnings

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
CASES, STEPS, LIMIT = 40, 100, 1e-6


def made(folder):
    draw = random.Random(7)
    for i in range(CASES):
        yield dict(seed=i + 1, heads=draw.choice([1, 2, 3, 8]), head_width=draw.choice([4, 6, 16]),
                   length=draw.choice([5, 9, 33]), threshold=draw.choice([0.5, 3, 30]),
                   growth=draw.choice([0.99, 1.01, 1.04]), steps=STEPS,
                   out=os.path.join(folder, f"{i}.safetensors"))


class Megatron:
    """The fields of a Megatron-LM layer that clip_qk reads. Its matrix holds the queries, keys and
    values of one head after another; the engine's holds all queries, all keys and all values."""

    def __init__(self, case, weight):
        import torch
        from megatron.core.transformer.attention import SelfAttention
        self.torch, self.case = torch, case
        heads, size = case["heads"], case["heads"] * case["head_width"]
        by_head = weight.double().view(3, heads, case["head_width"], size).transpose(0, 1)
        self.layer = types.SimpleNamespace(
            config=types.SimpleNamespace(qk_clip=True, qk_clip_threshold=case["threshold"],
                                         qk_clip_alpha=0.5),
            core_attention=types.SimpleNamespace(current_max_attn_logits=None),
            num_attention_heads_per_partition=heads, num_query_groups_per_partition=heads,
            query_projection_size=size, kv_projection_size=size,
            linear_qkv=types.SimpleNamespace(
                weight=torch.nn.Parameter(by_head.reshape(3 * size, size).clone())))
        self.layer._clip_linear_qkv = lambda w: SelfAttention._clip_linear_qkv(self.layer, w)
        self.clip_qk = lambda: SelfAttention.clip_qk(self.layer)

    def weight(self):
        """The weight of q, k and v, with rows in the engine's order."""
        heads, width = self.case["heads"], self.case["head_width"]
        by_head = self.layer.linear_qkv.weight.detach().view(heads, 3, width, heads * width)
        return by_head.transpose(0, 1).reshape(3 * heads * width, heads * width)

    def step(self, x):
        torch, heads, width = self.torch, self.case["heads"], self.case["head_width"]
        batch, length, _ = x.shape
        q, k, _ = (x.double() @ self.weight().T).view(batch, length, 3, heads, width).unbind(2)
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(width)
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        most = scores.masked_fill(hidden, -math.inf).amax((0, 2, 3))
        assert most.min() > 0, "a head without a logit above 0"
        self.layer.core_attention.current_max_attn_logits = most
        self.clip_qk()
        return int((most > self.case["threshold"]).sum())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default=os.path.join(ROOT, "engine"))
    engine = os.path.abspath(parser.parse_args().engine)
    if not all(map(importlib.util.find_spec, ("megatron", "torch", "safetensors"))):
        print("qk_clip: megatron-core, torch or safetensors is not installed: nothing is compared")
        return
    warnings.simplefilter("ignore")
    from safetensors.torch import load_file
    worst, clipped, wrong = 0.0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        cases = list(made(folder))
        with open(os.path.join(folder, "cases"), "w") as file:
            file.writelines(json.dumps(case) + "\n" for case in cases)
        done = subprocess.run([engine, os.path.join(HERE, "qk_clip.lua"), file.name], cwd=ROOT,
                              capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(done.stderr)
        for case in cases:
            kept = load_file(case["out"])
            original = Megatron(case, kept["weight.0"])
            for step in range(1, STEPS + 1):
                clipped += original.step(kept[f"x.{step}"])
                want = original.weight()
                far = ((kept[f"weight.{step}"].double() - want).abs().max() / want.abs().max())
                worst = max(worst, far.item())
                if not far.item() <= LIMIT:
                    print(f"  {case}: step {step}: {far.item():.2g} apart")
                    wrong += 1
                    break
    print(f"qk_clip against megatron-core: {CASES} layers, {CASES * STEPS} steps, {clipped} heads "
          f"clipped, largest difference {worst:.1e} (limit {LIMIT:g}), {wrong} wrong")
    sys.exit(1 if wrong or not clipped else 0)


main()
