"""Weights in bf16 without f32 masters: AdamW with a fixed sequence of gradients, so that only the
rounding of the weights (and of bf16 moments) tells the runs apart. Prints, for the engine and for
each package, how far the last weights are from the engine's with f32 masters: the root mean
square, and the mean as a sign of bias, both in units of the mean bf16 spacing at these weights.
Exits with 1 if the engine is further away than the package by more than 10 %, or biased.
"""
import argparse
import os
import subprocess
import sys
import tempfile

import numpy as np
import torch

HERE = os.path.dirname(os.path.abspath(__file__))
COUNT, STEPS, LR = 16384, 400, 1e-4


def package(w, g, make):
    p = torch.nn.Parameter(torch.from_numpy(w).bfloat16())
    optimizer = make([p])
    for t in range(STEPS):
        p.grad = torch.from_numpy(g[t]).bfloat16()
        optimizer.step()
    return p.detach().float().numpy()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="./engine")
    engine = parser.parse_args().engine
    random = np.random.default_rng(5)
    w = random.normal(0, 0.02, COUNT).astype(np.float32)
    g = random.normal(random.normal(0, 0.5, COUNT), 1, (STEPS, COUNT)).astype(np.float32)
    # bf16 numbers, which every side reads without rounding
    w, g = (torch.from_numpy(x).bfloat16().float().numpy() for x in (w, g))
    torch.manual_seed(5)
    options = dict(lr=LR, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1)
    packages = {}
    try:
        import optimi
        packages["kahan"] = "torch-optimi", lambda p: optimi.AdamW(p, kahan_sum=True, **options)
    except ImportError:
        pass
    try:
        from torchao.optim import _AdamW
        packages["stochastic"] = "torchao", lambda p: _AdamW(p, bf16_stochastic_round=True,
                                                             **options)
    except ImportError:
        pass
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        w.tofile(folder + "/w")
        g.tofile(folder + "/g")
        subprocess.run([engine, HERE + "/masters.lua", folder, str(COUNT), str(STEPS), str(LR)],
                       check=True)
        want = np.fromfile(folder + "/bf16", np.float32)
        step = np.mean(2.0 ** (np.floor(np.log2(np.abs(want))) - 7))

        def error(x):
            return np.sqrt(np.mean((x - want) ** 2)) / step, np.mean(x - want) / step

        print("%-12s %-14s %8s %9s" % ("masters", "", "rms", "mean"))
        for rounding in ("stochastic", "kahan"):
            size, mean = error(np.fromfile(folder + "/bf16_" + rounding, np.float32))
            print("%-12s %-14s %8.3f %9.4f" % (rounding, "engine", size, mean))
            failed |= abs(mean) > 5 * size / np.sqrt(COUNT)
            if rounding in packages:
                name, make = packages[rounding]
                other = error(package(w, g, make))
                print("%-12s %-14s %8.3f %9.4f" % ("", name, *other))
                failed |= size > 1.1 * other[0]
    sys.exit(1 if failed else 0)


main()
