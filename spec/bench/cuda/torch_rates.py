"""torch_rates.py: PyTorch's products and attention on the same card, timed as in rates.lua:
sustained, and ten runs after a rest, on random data."""
import time

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

REPEAT = 20


def seconds_of(f):
    for _ in range(3):
        f()
    torch.cuda.synchronize()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(REPEAT):
            f()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / REPEAT)
    return sorted(times)[2]


def burst_of(f):
    torch.cuda.synchronize()
    time.sleep(1)
    for _ in range(3):
        f()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        f()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / 10


def line(name, flops, f):
    seconds, burst = seconds_of(f), burst_of(f)
    rest = f"ten runs after a rest {flops / burst / 1e12:8.1f} TFLOP/s"
    rate = f"{flops / seconds / 1e12:8.1f} TFLOP/s  {1e3 * seconds:8.3f} ms"
    print(f"{name:44s} {rate}   {rest}", flush=True)


def main():
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}", flush=True)
    for dtype, n in ((torch.bfloat16, 8192), (torch.float16, 8192), (torch.float32, 4096)):
        x, w = (torch.randn(n, n, device="cuda").to(dtype) for _ in range(2))
        line(f"product {dtype} {n}^3", 2 * n**3, lambda x=x, w=w: x @ w.t())
    for N, K in ((768, 768), (2304, 768), (3072, 768), (768, 3072)):   # of GPT-2
        M = 32768
        x, w, dy = (torch.randn(*size, device="cuda").bfloat16()
                    for size in ((M, K), (N, K), (M, N)))
        line(f"product bf16 {M} x {N} x {K}", 2 * M * N * K, lambda: x @ w.t())
        line("  dx", 2 * M * N * K, lambda: dy @ w)
        line("  dw", 2 * M * N * K, lambda: dy.t() @ x)
    n = 8192
    a, b = (torch.randn(n, n, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    line(f"product e4m3 {n}^3, one scale, fast", 2 * n**3,
         lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16,
                                  use_fast_accum=True))
    for B, T, H, D in ((16, 2048, 16, 64), (16, 2048, 16, 128), (32, 1024, 12, 64)):
        # in memory as [B x T x H x D], as in rates.lua
        q, k, v, dy = (torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16)
                       .transpose(1, 2) for _ in range(4))
        flops = 4 * B * H * T * T * D / 2
        inputs = [x.detach().requires_grad_(True) for x in (q, k, v)]
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            with sdpa_kernel(backend):
                line(f"attention bf16, T {T} D {D}, {backend.name[:5].lower()}", flops,
                     lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
                y = F.scaled_dot_product_attention(*inputs, is_causal=True)
                line("  its gradient", 2.5 * flops,
                     lambda: torch.autograd.grad(y, inputs, dy, retain_graph=True))


main()
