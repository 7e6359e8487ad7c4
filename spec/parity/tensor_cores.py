"""Sums of tensor cores compared bit for bit with MMA-Sim's models: part of `make parity`.
Each kind of sum is tested MMA_PRODUCTS (1e5) times, over two steps. The kinds are Hopper's wgmma in
FP8 (the accumulator "hopper" of engine.fp8.matmul), and Blackwell's block-scaled tcgen05.mma
(engine.mx.matmul) for e4m3, for e5m2 and for e5m2 x e4m3 in blocks of 32, and for e2m1 in blocks of
32 and 16. Some kinds have scales of every size, so that sums reach zero, subnormals and Inf.
"""
import argparse
import os
import subprocess
import sys
import tempfile

import torch
from mmasim.nv_ptx.sim import TCGen05MMABlockScale, WGMMA
from safetensors.torch import load_file, save_file

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
PRODUCTS = int(float(os.environ.get("MMA_PRODUCTS", "1e5")))
STEPS = 2
TYPES = {"e4m3": (torch.float8_e4m3fn, 10), "e5m2": (torch.float8_e5m2, 11), "e2m1": (None, 13)}
RCEIL, NVFP4 = 3, 4                              # ENG_MX_*
KINDS = [("e4m3", "e4m3", RCEIL), ("e5m2", "e5m2", RCEIL), ("e5m2", "e4m3", RCEIL),
         ("e2m1", "e2m1", RCEIL), ("e2m1", "e2m1", NVFP4)]


def operand(name, rows, columns):
    """Random codes: in e2m1 two to a byte; in other formats a tenth of them is zero."""
    if name == "e2m1":
        return torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    x = torch.randn(rows, columns) * torch.exp2(torch.randint(-8, 8, (rows, columns)).float())
    x[torch.rand(rows, columns) < 0.1] = 0
    return x.to(TYPES[name][0]).view(torch.uint8)


def product(engine, tensors, *words):
    """The engine's product of a and b with their scales."""
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, folder + "/in")
        subprocess.run([engine, os.path.join(HERE, "tensor_cores.lua"), folder, *map(str, words)],
                       cwd=ROOT, check=True)
        return load_file(folder + "/out")["y"]


def differences(name, want, y):
    same = (want.view(torch.int32) == y.view(torch.int32)) | (torch.isnan(want) & torch.isnan(y))
    wrong = int((~same).sum())
    print("  %-43s %d differ" % (name, wrong), flush=True)
    return wrong


def hopper(engine, fa, fb, rows):
    """Each operand contains its format's largest number, so its scale is 1."""
    x = []
    for name in (fa, fb):
        kind, k = TYPES[name][0], STEPS * 32
        numbers = operand(name, rows, k).view(kind).float()
        numbers[0, 0] = torch.finfo(kind).max
        x.append(numbers)
    y = product(engine, {"a": x[0], "b": x[1]}, fa, fb)
    sums, want = WGMMA("Hopper", "m64n8k32.f32.%s.%s" % (fa, fb)), torch.zeros(rows, rows)
    a, b = x[0].to(TYPES[fa][0]), x[1].to(TYPES[fb][0])
    for at in range(0, STEPS * 32, 32):
        want = sums(a[:, at:at + 32], b[:, at:at + 32].T, want)
    return differences("Hopper, %s x %s" % (fa, fb), want, y)


def blackwell(engine, fa, fb, rule, far, rows):
    four, k = fa == "e2m1", 64 if fa == "e2m1" else 32
    block, scale_type = (16, "ue4m3") if rule == NVFP4 else (32, "ue8m0")
    low, high = (0, 127) if rule == NVFP4 else (0, 255) if far else (100, 150)
    a, b = operand(fa, rows, STEPS * k), operand(fb, rows, STEPS * k)
    scale = [torch.randint(low, high, (rows, STEPS * k // block), dtype=torch.uint8)
             for _ in range(2)]
    y = product(engine, {"a": a, "a_scale": scale[0], "b": b, "b_scale": scale[1]}, TYPES[fa][1],
                TYPES[fb][1], rule)
    kind = "mxf4nvf4" if four else "mxf8f6f4"
    sums = TCGen05MMABlockScale("Blackwell", "m128n8k%d.kind::%s.block%d.f32.%s.%s.%s" % (
        k, kind, block, fa, fb, scale_type))
    want, per, wide = torch.zeros(rows, rows), k // block, k // 2 if four else k
    if not four:
        a, b = a.view(TYPES[fa][0]), b.view(TYPES[fb][0])
    scale = [s.view(sums.s_type) for s in scale]
    for step in range(STEPS):
        at, here = slice(step * wide, (step + 1) * wide), slice(step * per, (step + 1) * per)
        want = sums(a[:, at].contiguous(), b[:, at].contiguous().T, want, scale[0][:, here],
                    scale[1][:, here].T)
    name = "Blackwell, %s x %s, %s%s" % (fa, fb, scale_type, ", every scale" if far else "")
    return differences(name, want, y)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="./engine")
    engine = os.path.abspath(parser.parse_args().engine)
    torch.manual_seed(1)
    rows = max(1, round(PRODUCTS ** 0.5))
    print("tensor cores against MMA-Sim, %d sums of each kind" % (rows * rows))
    bad = sum(hopper(engine, fa, fb, rows) for fa, fb, rule in KINDS if fa != "e2m1")
    for fa, fb, rule in KINDS:
        for far in (False, True)[:1 if rule == NVFP4 else 2]:
            bad += blackwell(engine, fa, fb, rule, far, rows)
    sys.exit(bad > 0)


main()
