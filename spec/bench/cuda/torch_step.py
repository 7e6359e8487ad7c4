"""torch_step.py PRECISION LAYERS WIDTH HEADS VOCAB CONTEXT BATCH VARIANT: PyTorch's step on a card:
the model of ../torch_step.py with autocast, scaled_dot_product_attention, fused AdamW and, for the
variant compile, torch.compile. Prints the median time of a step."""
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from torch_step import GPT  # noqa: E402


def main():
    precision, variant = sys.argv[1], sys.argv[8]
    layers, width, heads, vocab, context, batch = map(int, sys.argv[2:8])
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("highest")
    with torch.device("cuda"):
        model = GPT(layers, width, heads, vocab, context).train()
    params = list(model.parameters())
    groups = [{"params": [p for p in params if p.ndim >= 2]},
              {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, lr=1e-4, weight_decay=0.1, fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    run = torch.compile(model) if variant == "compile" else model
    x, y = (torch.randint(0, vocab, (batch, context), device="cuda") for _ in range(2))

    def step():
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = run(x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(opt)
        scaler.update()
        return loss

    for _ in range(5):
        loss = step()
    torch.cuda.synchronize()
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        loss = step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    start = time.perf_counter()
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    whole = (time.perf_counter() - start) / 20
    seconds.sort()
    median = min(seconds[len(seconds) // 2], whole)
    print(f"torch {torch.__version__} {variant} {precision}: {1e3 * median:.2f} ms a step, "
          f"{batch * context / median:.0f} tokens/s, loss {loss.item():.4f}, "
          f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)


main()
