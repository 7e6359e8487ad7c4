"""torch_step.py PRECISION LAYERS WIDTH HEADS VOCAB CONTEXT BATCH VARIANT: step.lua's
counterpart in PyTorch.

VARIANT is eager or compile, with -half for fp16 weights and fp32 masters that are updated and
copied back (otherwise fp16 and bf16 use autocast). fp16 uses GradScaler either way.
Reads a number of steps from a line of stdin, makes them, and prints the seconds of each.
"""
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        B, T, C = x.shape
        qkv = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, C // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, layers, width, heads, vocab, context):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(p, 0, 0.02)

    def forward(self, x, y):
        h = self.wte(x) + self.wpe(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        logits = F.linear(self.norm(h), self.wte.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), y.view(-1))


def main():
    precision, variant = sys.argv[1], sys.argv[8]
    layers, width, heads, vocab, context, batch = map(int, sys.argv[2:8])
    torch.manual_seed(1)
    model = GPT(layers, width, heads, vocab, context).train()
    half = variant.endswith("-half")
    masters = weights = list(model.parameters())
    if half:
        masters = [p.detach().clone().requires_grad_() for p in weights]
        model = model.half()
        weights = list(model.parameters())
    decay = [p for p in masters if p.ndim >= 2]
    plain = [p for p in masters if p.ndim < 2]
    x, y = torch.randint(0, vocab, (batch, context)), torch.randint(0, vocab, (batch, context))
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    run = torch.compile(model) if variant.startswith("compile") else model

    def optimizer(fused):
        return torch.optim.AdamW([{"params": decay}, {"params": plain, "weight_decay": 0.0}],
                                 lr=1e-4, weight_decay=0.1, fused=fused)

    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")

    def backward():
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16,
                            enabled=dtype is not None and not half):
            loss = run(x, y)
        scaler.scale(loss).backward()
        return loss

    def hand_over():
        if half:
            for master, p in zip(masters, weights):
                master.grad = p.grad.float()

    # Times AdamW fused and not fused, and keeps the faster one.
    backward()
    hand_over()
    best, opt = float("inf"), None
    for fused in (True, False):
        candidate = optimizer(fused)
        candidate.step()
        start = time.perf_counter()
        for _ in range(3):
            candidate.step()
        seconds = time.perf_counter() - start
        if seconds < best:
            best, opt = seconds, candidate

    def step():
        for p in weights:
            p.grad = None
        loss = backward()
        hand_over()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        scaler.step(opt)
        scaler.update()
        if half:
            with torch.no_grad():
                torch._foreach_copy_(weights, masters)
        return loss.item()

    step()
    print(f"ready {sum(p.numel() for p in model.parameters())}", flush=True)
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            start = time.perf_counter()
            step()
            seconds.append(f"{time.perf_counter() - start:.6f}")
        print(" ".join(seconds), flush=True)


if __name__ == "__main__":
    main()
