"""Blackwell's block-scaled sums (engine.mx.matmul) compared bit for bit with MMA-Sim's model of
tcgen05.mma: part of `make parity`. MMA_PRODUCTS (1e5) sums of two steps each, for e4m3, e5m2 and
both in blocks of 32, and e2m1 in blocks of 32 and 16; half of them with scales of every size, so
that sums reach zero, subnormals and Inf.
"""
import argparse
import os
import subprocess
import sys
import tempfile

import torch
from mmasim.nv_ptx.sim import TCGen05MMABlockScale
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
    """Codes, two to a byte in e2m1; a tenth of the others are zeros."""
    if name == "e2m1":
        return torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    x = torch.randn(rows, columns) * torch.exp2(torch.randint(-8, 8, (rows, columns)).float())
    x[torch.rand(rows, columns) < 0.1] = 0
    return x.to(TYPES[name][0]).view(torch.uint8)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="./engine")
    engine = os.path.abspath(parser.parse_args().engine)
    torch.manual_seed(1)
    bad, rows = 0, max(1, round((PRODUCTS / 2) ** 0.5))
    print("Blackwell's sums against MMA-Sim, %d of each kind" % (2 * rows * rows))
    for (fa, fb, rule), far in ((kind, far) for kind in KINDS
                                for far in (False, True)[:1 if kind[2] == NVFP4 else 2]):
        four, k = fa == "e2m1", 64 if fa == "e2m1" else 32
        block, scale_type = (16, "ue4m3") if rule == NVFP4 else (32, "ue8m0")
        low, high = (0, 255) if far else (100, 150)
        if rule == NVFP4:
            low, high = 0, 127
        a, b = operand(fa, rows, STEPS * k), operand(fb, rows, STEPS * k)
        scale = [torch.randint(low, high, (rows, STEPS * k // block), dtype=torch.uint8)
                 for _ in range(2)]
        with tempfile.TemporaryDirectory() as folder:
            save_file({"a": a, "a_scale": scale[0], "b": b, "b_scale": scale[1]}, folder + "/in")
            subprocess.run([engine, os.path.join(HERE, "blackwell.lua"), folder,
                            str(TYPES[fa][1]), str(TYPES[fb][1]), str(rule)], cwd=ROOT, check=True)
            y = load_file(folder + "/out")["y"]
        kind = "mxf4nvf4" if four else "mxf8f6f4"
        sums = TCGen05MMABlockScale("Blackwell", "m128n8k%d.kind::%s.block%d.f32.%s.%s.%s" % (
            k, kind, block, fa, fb, scale_type))
        want, per, wide = torch.zeros(rows, rows), k // block, k // 2 if four else k
        view = lambda x, name: x if name == "e2m1" else x.view(TYPES[name][0])
        scale = [s.view(sums.s_type) for s in scale]
        for step in range(STEPS):
            at, here = slice(step * wide, (step + 1) * wide), slice(step * per, (step + 1) * per)
            want = sums(view(a[:, at].contiguous(), fa), view(b[:, at].contiguous(), fb).T, want,
                        scale[0][:, here], scale[1][:, here].T)
        nan = torch.isnan(want)
        same = (want.view(torch.int32) == y.view(torch.int32)) | (nan & torch.isnan(y))
        wrong = int((~same).sum())
        print("  %s x %s, %s%s: %d differ" % (fa, fb, scale_type, ", every scale" if far else "",
                                              wrong), flush=True)
        bad += wrong
    sys.exit(bad > 0)


main()
