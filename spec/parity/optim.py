"""The optimizers written in Lua, 100 steps on given gradients, against their originals: Muon and
Adafactor of torch, StableAdamW of torch-optimi 0.3.3, Lamb of pytorch_optimizer 4.1.0. The policies
that act on updates likewise, against AdaGC, SPAM and StableSPAM of pytorch_optimizer. Every weight
must agree to 1e-6 of the largest weight of its tensor. optim.lua has the problem, and also saves
and loads each optimizer at every step. Prints a table; exits with 1 when a row is outside its
limit.

torch's Muon computes Newton-Schulz steps in bf16, where another order of sums moves a result by a
bf16 ulp. So its own code runs with f32 in place of bf16, and once as it is, with a wider limit.
The cosine of pytorch_optimizer's SPAM is a step ahead of the authors', so the package's SPAM runs
with the authors' cosine. The package's StableSPAM counts a reset differently for each tensor, so
resets are compared with the authors' rule as restated here.

Without a package its rows are left out. With --golden FILE it writes a short run of the originals,
which lua_optim_spec.lua compares with: spec/golden/optimizers.json.
"""
import argparse
import importlib.util
import inspect
import json
import math
import os
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_file, save_file

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
STEPS = 100
SHAPES = {"wide": (13, 17), "tall": (29, 8), "square": (16, 16), "cube": (3, 5, 6), "vector": (17,),
          "zero": (7,)}


class Muon:
    """torch's Muon for matrices and AdamW for the rest, as one optimizer."""

    def __init__(self, params, adamw_lr=0.02, f32=True, **options):
        from torch.optim import _muon
        if not hasattr(_muon, "bf16_steps"):
            _muon.bf16_steps = _muon._zeropower_via_newtonschulz
            text = inspect.getsource(_muon.bf16_steps).replace("torch.bfloat16", "torch.float32")
            scope = dict(vars(_muon))
            exec(text, scope)
            _muon.f32_steps = scope["_zeropower_via_newtonschulz"]
        self.module, self.f32 = _muon, f32
        matrices = [p for p in params if p.ndim == 2]
        rest = [p for p in params if p.ndim != 2]
        self.all = (torch.optim.Muon(matrices, **{"lr": 0.02, **options}),
                    torch.optim.AdamW(rest, lr=adamw_lr, betas=(0.9, 0.95),
                                      weight_decay=options.get("weight_decay", 0.1)))

    def zero_grad(self):
        for one in self.all:
            one.zero_grad()

    def step(self):
        self.module._zeropower_via_newtonschulz = (
            self.module.f32_steps if self.f32 else self.module.bf16_steps)
        for one in self.all:
            one.step()


def stableadamw(params, **options):
    from optimi import StableAdamW
    return StableAdamW(params, foreach=False, triton=False, **options)


def lamb(params, **options):
    from pytorch_optimizer import Lamb
    # without adam_debias the rate would be divided by 1 - beta1^t, unlike version 3 of the paper
    return Lamb(params, weight_decouple=False, adam_debias=True, foreach=False, **options)


class StableSpam(torch.optim.Optimizer):
    """The authors' rule without total_T, restated: limits on elements, norms, resets, AdamW."""

    def __init__(self, params, lr, weight_decay, interval, theta=0.999, eps=1e-8):
        super().__init__(params, {})
        self.lr, self.decay, self.interval = lr, weight_decay, interval
        self.theta, self.eps, self.total, self.number = theta, eps, 0, 0

    @torch.no_grad()
    def step(self):
        self.total, self.number = self.total + 1, self.number + 1
        before, reset = self.number, self.total % self.interval == 0
        self.number = 1 if reset else before
        for p in self.param_groups[0]["params"]:
            kept, g = self.state[p], p.grad.double()
            if not kept:
                kept.update(top=0.0, norm=0.0, square=0.0, m=torch.zeros_like(p),
                            v=torch.zeros_like(p))
            p.mul_(1 - self.lr * self.decay)
            largest = g.abs().max()
            kept["top"] = self.theta * kept["top"] + (1 - self.theta) * largest
            limit = kept["top"] / (1 - self.theta ** before)
            g = torch.where(g.abs() > limit, g / largest * limit, g)
            norm = g.norm()
            kept["norm"] = 0.7 * kept["norm"] + 0.3 * norm
            kept["square"] = 0.9 * kept["square"] + 0.1 * norm ** 2
            ratio = kept["norm"] / (1 - 0.7 ** before) / (
                (kept["square"] / (1 - 0.9 ** before)).sqrt() + self.eps)
            g = (g / norm * ratio).float()
            if reset:
                kept["m"].zero_()
                kept["v"].zero_()
            kept["m"].lerp_(g, 0.1)
            kept["v"].mul_(0.999).addcmul_(g, g, value=0.001)
            bottom = (kept["v"] / (1 - 0.999 ** self.number)).sqrt() + self.eps
            p.addcdiv_(kept["m"], bottom, value=-self.lr / (1 - 0.9 ** self.number))


def third(name, **options):
    """An optimizer of pytorch_optimizer, whose SPAM gets the authors' cosine."""
    import pytorch_optimizer
    from pytorch_optimizer.optimizer import spam
    spam.CosineDecay.get_death_rate = lambda self, step: 0.0 if step >= self.t_max else (
        0.99 * (1 + math.cos(math.pi * step / (self.t_max + 1))) / 2)
    return lambda params: getattr(pytorch_optimizer, name)(params, foreach=False, **options)


# name: (package, constructor, limit)
RUNS = {
    "muon": ("torch", lambda p: Muon(p), 1e-6),
    "muon_plain": ("torch", lambda p: Muon(p, nesterov=False, weight_decay=0, momentum=0.9), 1e-6),
    "muon_match_rms_adamw": (
        "torch", lambda p: Muon(p, adjust_lr_fn="match_rms_adamw", lr=1e-3), 1e-6),
    "muon_spectral_unclamped": (
        "torch", lambda p: Muon(p, adjust_lr_fn="spectral_unclamped"), 1e-6),
    "muon_bf16": ("torch", lambda p: Muon(p, f32=False), 3e-2),
    "adafactor": ("torch", lambda p: torch.optim.Adafactor(p, foreach=False), 1e-6),
    "adafactor_decay": ("torch", lambda p: torch.optim.Adafactor(
        p, lr=0.05, weight_decay=0.1, beta2_decay=-0.5, d=1.5, foreach=False), 1e-6),
    "stableadamw": ("optimi", lambda p: stableadamw(p, lr=0.01), 1e-6),
    "stableadamw_decay": (
        "optimi", lambda p: stableadamw(p, lr=0.02, betas=(0.9, 0.95), weight_decay=0.1), 1e-6),
    "adagc": ("pytorch_optimizer", lambda p: third(
        "AdaGC", lr=0.01, weight_decay=0.1, warmup_steps=30)(p), 1e-6),
    "spam": ("pytorch_optimizer", lambda p: third(
        "SPAM", lr=0.01, eps=1e-12, threshold=20, grad_accu_steps=3, update_proj_gap=30,
        warmup_epoch=10)(p), 1e-6),
    "stable_spam": ("pytorch_optimizer", lambda p: third(
        "StableSPAM", lr=0.01, weight_decay=0.1)(p), 1e-6),
    "stable_spam_reset": ("torch", lambda p: StableSpam(p, 0.01, 0.1, 30), 1e-6),
    "lamb": ("pytorch_optimizer", lambda p: lamb(p, lr=0.01), 1e-6),
    "lamb_decay": (
        "pytorch_optimizer", lambda p: lamb(p, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1), 1e-6),
}


def original(make, start, steps=STEPS):
    weights = {name[2:]: start[name].clone().requires_grad_() for name in sorted(start)
               if name.startswith("w.")}
    opt = make(list(weights.values()))
    for t in range(steps):
        loss = sum((w * start["g." + name][t]).sum() + (w * w).sum() * 0.05
                   for name, w in weights.items())
        opt.zero_grad()
        loss.backward()
        opt.step()
    return weights


def problem(shapes, steps, digits=None):
    torch.manual_seed(5)
    start = {}
    for name, shape in shapes.items():
        start["w." + name] = torch.zeros(shape) if name == "zero" else torch.randn(shape) * 0.3
        start["g." + name] = torch.randn(steps, *shape) * torch.logspace(-3, 1, steps).view(
            -1, *[1] * len(shape))
    if digits:                                          # short numbers for a file
        start = {name: (x * digits).round() / digits for name, x in start.items()}
    return start


def write_golden(path, steps=6):
    start = problem({"wide": (3, 5), "tall": (4, 2), "vector": (3,), "zero": (2,)}, steps, 2 ** 12)
    runs = {}
    for name, (_, make, _) in RUNS.items():
        if name not in ("muon_bf16", "adagc", "spam") and not name.startswith("stable_spam"):
            runs[name] = {key: w.detach().flatten().tolist()
                          for key, w in original(make, start, steps).items()}
    golden = {"steps": steps, "shapes": {name: list(x.shape) for name, x in start.items()},
              "start": {name: x.flatten().tolist() for name, x in start.items()}, "runs": runs}
    with open(path, "w") as file:
        file.write(json.dumps(golden, indent=0).replace(",\n", ", ").replace("}, ", "},\n") + "\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default=os.path.join(ROOT, "engine"))
    parser.add_argument("--golden")
    arguments = parser.parse_args()
    if arguments.golden:
        return write_golden(arguments.golden)
    engine, start = os.path.abspath(arguments.engine), problem(SHAPES, STEPS)
    failed, absent = 0, set()
    print(f"{STEPS} steps of each optimizer{'difference':>40} {'limit':>9}")
    with tempfile.TemporaryDirectory() as scratch:
        save_file(start, f"{scratch}/start.safetensors")
        done = subprocess.run([engine, f"{HERE}/optim.lua", f"{scratch}/start.safetensors",
                               str(STEPS), f"{scratch}/out.safetensors"], cwd=ROOT)
        if done.returncode != 0:
            sys.exit(f"parity: the engine ended with {done.returncode}")
        ours = load_file(f"{scratch}/out.safetensors")
    for name, (package, make, limit) in RUNS.items():
        if importlib.util.find_spec(package) is None:
            absent.add(package)
            continue
        theirs = {key: w.detach() for key, w in original(make, start).items()}
        worst = max((ours[f"{name}.{key}"] - w).abs().max().item() / w.abs().max().item()
                    for key, w in theirs.items())
        failed += not worst <= limit
        print(f"{name:<52} {worst:>11.2e} {limit:>9.0e}  {'ok' if worst <= limit else 'FAILED'}")
    for package in sorted(absent):
        print(f"{package} is not installed: its rows are left out")
    print(f"\n{failed} rows failed" if failed else "\nall rows within their limits")
    sys.exit(1 if failed else 0)


main()
