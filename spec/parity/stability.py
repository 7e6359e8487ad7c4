"""The policies that guard updates, on random norms and losses with spikes, zeros, NaN and overflow:
every decision must be the original's, and every number within 1e-6 of the original's. Prints a
table; exits with 1 if a decision or a number differs.

Two originals run from their own packages: zclip 1.0.0, which clips the gradient of a parameter, and
the SkipStepOptimizer of ai2-olmo-core 3.0.0. Without a package its row is left out. The others are
compared with their rules as restated here: AdaGC as in pytorch_optimizer, levanter's clipping of
updates, SPAM's schedule as in galore_torch, Stable-SPAM, Megatron-LM's threshold and rerun machine
(parts of a framework that needs CUDA), and FP8-LM's scaling, whose code is not public.
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

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
CASES, STEPS = 60, 300
INF, NAN = math.inf, math.nan


class Original:
    """One step at a time: step(loss, norm) returns what the engine's line must hold."""

    def __init__(self, options):
        self.options = options
        self.start(**options)

    def start(self):
        pass


# ------------------------------------------------------------------ originals from packages

class ZClip(Original):
    """Clips a parameter whose gradient is the norm itself, so the result shows the clip."""

    def start(self, **options):
        import torch
        from zclip.zclip import ZClip as Clipper
        options = {k: None if v == INF else v for k, v in options.items() if k != "keep_nan"}
        if options.get("clip_option") == "percentile":
            options["mode"] = options.pop("clip_option")
        self.torch, self.model = torch, torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        self.clipper = Clipper(**options)

    def step(self, loss, norm):
        clipper, logs = self.clipper, {}
        if clipper.initialized:
            std = clipper.var ** 0.5
            logs = dict(mean=clipper.mean, std=std, z=(norm - clipper.mean) / (std + clipper.eps))
        self.model.weight.grad = self.torch.full_like(self.model.weight, norm)
        clipper.step(self.model)
        return dict(kept=self.model.weight.grad.item(), logs=logs)


class SkipStep(Original):
    def start(self, rolling_interval_length, sigma_factor, keep_nan):
        import torch
        self.torch = torch
        self.optimizer = olmo().SkipStepOptimizer(
            [torch.nn.Parameter(torch.zeros(1))], {}, rolling_interval_length, sigma_factor)

    def step(self, loss, norm):
        f64 = lambda x: self.torch.tensor(x, dtype=self.torch.float64)
        self.optimizer.latest_loss, self.optimizer.latest_grad_norm = f64(loss), f64(norm)
        logs, history = {}, self.optimizer._losses[:-1]
        if len(history) > 1:
            std, mean = self.torch.std_mean(self.torch.stack(history))
            logs = dict(loss_mean=mean.item(), loss_std=std.item())
        skipped = not self.optimizer.get_step_factor().item()
        return dict(skipped=skipped, logs=logs)


def olmo():
    """Loads one file of olmo_core, because the package imports much else."""
    place = importlib.util.find_spec("olmo_core").submodule_search_locations[0]
    utils = types.ModuleType("olmo_core.utils")
    utils.get_default_device, utils.move_to_device = lambda: "cpu", lambda x, device: x
    sys.modules.setdefault("olmo_core.utils", utils)
    spec = importlib.util.spec_from_file_location(
        "skip_step_optimizer", os.path.join(place, "optim", "skip_step_optimizer.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------ rules restated here

class NormSkip(Original):
    def start(self, grad_norm_skip_threshold):
        self.threshold = grad_norm_skip_threshold

    def step(self, loss, norm):
        return dict(skipped=norm > self.threshold, logs={})


class Rerun(Original):
    """Each entry is one attempt; an attempt after a retry is the rerun."""

    def start(self, factor, samples, on_fault):
        self.values, self.iteration, self.rejected = [], 0, None
        self.factor, self.samples = factor, samples

    def large(self, loss):
        if not math.isfinite(loss):
            return False
        if len(self.values) < self.samples:
            self.values.append(abs(loss))
            return False
        return abs(loss) >= max(self.values) * self.factor

    def step(self, loss, norm):
        limit = max(self.values) * self.factor if len(self.values) == self.samples else None
        logs = {} if limit is None else dict(limit=limit)
        if self.rejected is not None:
            same, self.rejected = loss == self.rejected, None
            bad = not math.isfinite(loss) or limit <= abs(loss)
            action = "skip" if not same and bad else "step"
        else:
            action = "step"
            if self.iteration > 0 and self.large(loss):
                action, self.rejected = "retry", loss
            self.iteration += 1
        if action == "step" and not math.isfinite(norm):
            action = "skip"
        return dict(action=action, logs=logs)


class AdaGC(Original):
    def start(self, beta, lambda_abs, lambda_rel, warmup_steps):
        self.count, self.gamma = 0, [None, None]
        self.beta, self.most, self.rel, self.warm = beta, lambda_abs, lambda_rel, warmup_steps

    def step(self, *norms):
        self.count += 1
        factors = []
        for i, norm in enumerate(norms):
            gamma = self.gamma[i]
            if self.count < self.warm:
                h = min(self.most / (math.hypot(*norms) + 1e-8), 1)
                self.gamma[i] = h * norm if self.count == 1 else min(gamma, h * norm)
            else:
                h = min(self.rel * gamma / norm, 1)
                self.gamma[i] = self.beta * gamma + (1 - self.beta) * h * norm
            factors.append(h)
        return dict(numbers=factors)


class UpdateClip(Original):
    def start(self, rolling_interval_length, sigma_factor):
        self.length, self.sigma, self.norms = rolling_interval_length, sigma_factor, []

    def step(self, norm, _):
        n, factor = len(self.norms), 1.0
        if n >= max(2, self.length // 2):
            mean = math.fsum(self.norms) / n
            std = math.sqrt(math.fsum((x - mean) ** 2 for x in self.norms) / n)
            threshold = mean + self.sigma * max(std, 1e-6)
            factor = threshold / max(norm, 1e-6) if norm > threshold else 1.0
        self.norms = (self.norms + [norm])[-self.length:]
        return dict(numbers=[factor])


class Spam(Original):
    """total_step and current_step as in galore_torch/SPAM.py, without a mask."""

    def start(self, interval, threshold, grad_accu_steps, warmup_epoch):
        self.total, self.current = 0, warmup_epoch + 1
        self.interval, self.threshold = interval, threshold
        self.accu, self.warm = grad_accu_steps, warmup_epoch

    def step(self, *_):
        rate = 1.0
        if self.current < self.warm:
            rate -= 0.99 * (1 + math.cos(math.pi * self.current / (self.warm + 1))) / 2
        number = self.total + 1
        reset = float(number % self.interval == 0)
        spikes = number >= self.accu and number % self.interval >= self.accu
        self.total, self.current = number, self.current + 1
        if (number + 1) % self.interval == 0:
            self.current = 0
        return dict(numbers=[rate, reset, float(self.threshold if spikes else 0)])


class StableSpam(Original):
    """As the authors' StableSPAM without total_T, for gradients of one element: |g| above the
    unbiased mean of maxima becomes that mean; then the norm is set."""

    def start(self, gamma1, gamma2, theta, interval):
        self.gamma1, self.gamma2, self.theta, self.interval = gamma1, gamma2, theta, interval
        self.total, self.number, self.kept = 0, 0, [[0.0] * 3 for _ in range(2)]

    def step(self, *gradients):
        self.total, self.number = self.total + 1, self.number + 1
        results = []
        for kept, g in zip(self.kept, gradients):
            kept[0] = self.theta * kept[0] + (1 - self.theta) * g
            g = min(g, kept[0] / (1 - self.theta ** self.number))
            kept[1] = self.gamma1 * kept[1] + (1 - self.gamma1) * g
            kept[2] = self.gamma2 * kept[2] + (1 - self.gamma2) * g * g
            first = kept[1] / (1 - self.gamma1 ** self.number)
            second = kept[2] / (1 - self.gamma2 ** self.number)
            results.append(first / (math.sqrt(second) + 1e-8))
        reset = self.interval > 0 and self.total % self.interval == 0
        if reset:
            self.number = 1
        return dict(numbers=results + [float(reset), float(self.number)])


class Fp8Lm(Original):
    """mu starts at 1 / amax and doubles over growth_interval steps; a tensor keeps 1 / mu."""

    def start(self, threshold, growth_interval):
        self.mu, self.threshold, self.interval = None, threshold, growth_interval

    def step(self, amax, clipped):
        if self.mu is None:
            self.mu = 1 / amax
        elif clipped / 1e6 > self.threshold:
            self.mu /= 2
        else:
            self.mu *= 2 ** (1 / self.interval)
        return dict(top=1 / self.mu)


# ------------------------------------------------------------------ cases

def spiky(draw, finite):
    """Losses and norms of a run: falling, noisy, with spikes, rarely zero or not finite."""
    steps, level = [], draw.choice([1e-3, 1, 50])
    for i in range(STEPS):
        fall = level * (0.5 + math.exp(-i / 80))
        loss = fall * math.exp(draw.gauss(0, 0.05))
        norm = fall * math.exp(draw.gauss(0, 0.3))
        event = draw.random()
        if event < 0.03:
            norm *= draw.choice([3, 10, 1e4])
        elif event < 0.05:
            loss *= draw.choice([1e3, draw.uniform(1, 40)])
        elif event < 0.055:
            norm = 0.0
        elif event < 0.06 and not finite:
            loss, norm = draw.choice([(loss, INF), (loss, NAN), (NAN, NAN)])
        steps.append((loss, norm))
    return steps


def repeated(draw, finite):
    """Every step, half of them twice with equal losses, as in a rerun without a fault."""
    steps = []
    for loss, norm in spiky(draw, finite):
        steps.append((loss, norm))
        if draw.random() < 0.5:
            steps.append((loss, norm))
    return steps


def saturating(draw, finite):
    return [(math.exp(draw.gauss(0, 1)), draw.choice([0, 0, 0, 9, 10, 11, 500]))
            for _ in range(STEPS)]


def positive(draw, finite):
    return [(norm, norm * math.exp(draw.gauss(0, 1)))
            for _, norm in spiky(draw, True) if norm > 0]


MEANS = dict(beta=[0.9, 0.98], lambda_abs=[1.0, 0.1], lambda_rel=[1.05, 1.5],
             warmup_steps=[2, 30, 100])
EARLY = dict(z_thresh=[1.5, 2.5], alpha=[0.9, 0.97], warmup_steps=[5, 25],
             max_grad_norm=[1.0, INF], clip_factor=[1.0, 0.7], skip_update_on_spike=[False, True])
ROWS = [
    ("zclip 1.0.0, adaptive", "zclip", ZClip, spiky, dict(EARLY, clip_option=["adaptive_scaling"])),
    ("zclip 1.0.0, mean", "zclip", ZClip, spiky, dict(EARLY, clip_option=["mean"])),
    ("zclip 1.0.0, percentile", "zclip", ZClip, spiky, dict(EARLY, clip_option=["percentile"])),
    ("ai2-olmo-core 3.0.0", "skip_step", SkipStep, spiky,
     dict(rolling_interval_length=[8, 32, 128], sigma_factor=[2, 6])),
    ("Megatron threshold*", "norm_skip", NormSkip, spiky, dict(grad_norm_skip_threshold=[1, 60])),
    ("Megatron rerun*", "rerun", Rerun, repeated,
     dict(factor=[2, 10], samples=[10, 100], on_fault=["step"])),
    ("AdaGC*", "adagc", AdaGC, positive, MEANS),
    ("levanter update clip*", "update_clip", UpdateClip, positive,
     dict(rolling_interval_length=[3, 16, 128], sigma_factor=[0.5, 3])),
    ("SPAM schedule*", "spam", Spam, positive,
     dict(interval=[30, 100], threshold=[5000], grad_accu_steps=[1, 20], warmup_epoch=[5, 150])),
    ("Stable-SPAM*", "stable_spam", StableSpam, positive,
     dict(gamma1=[0.7, 0.85], gamma2=[0.9, 0.999], theta=[0.9, 0.999], interval=[0, 30, 1000])),
    ("FP8-LM*", "fp8_lm", Fp8Lm, saturating, dict(threshold=[1e-5], growth_interval=[10, 1000])),
]


def near(a, b):
    return a == b or math.isnan(a) and math.isnan(b) or abs(a - b) <= 1e-6 * max(abs(a), abs(b))


def kept(norm, clip):
    """The norm after the engine's clipping (clip_factor in core/base/numerics.h)."""
    return norm * (clip / (norm + 1e-6)) if norm > clip else norm


def disagreement(line, want, norm):
    """How the engine's line differs from `want`, or None."""
    words = line.split()
    if "top" in want:
        got = float.fromhex(words[0])
        return None if near(got, want["top"]) else f"amax {got}, expected {want['top']}"
    if "numbers" in want:
        got = [float.fromhex(word) for word in words]
        fits = all(near(a, b) for a, b in zip(got, want["numbers"]))
        return None if fits else f"{got}, expected {want['numbers']}"
    action, clip = words[0], float.fromhex(words[1])
    logs = {name: float.fromhex(x) if x != "nan" else NAN
            for name, x in (word.split("=") for word in words[2:])}
    if "skipped" in want:                     # the engine always skips gradients with inf or nan
        skipped = want["skipped"] or not math.isfinite(norm)
        if (action == "skip") != skipped:
            return f"{action}, expected skipped = {skipped}"
    if "action" in want and action != want["action"]:
        return f"{action}, expected {want['action']}"
    if "kept" in want and math.isfinite(norm) and not near(kept(norm, clip), want["kept"]):
        return f"keeps {kept(norm, clip)} of the norm {norm}, expected {want['kept']}"
    for name, x in want["logs"].items():
        if not near(logs.get(name, NAN), x):
            return f"{name} = {logs.get(name)}, expected {x}"
    return None


def cases(draw, policy, steps_of, choices):
    """Half of the cases are finite, because inf and nan stay in the originals' statistics."""
    for i in range(CASES):
        options = {name: draw.choice(values) for name, values in choices.items()}
        if policy in ("zclip", "skip_step"):
            options["keep_nan"] = True
        yield options, steps_of(draw, i % 2 == 0)


def spelled(policy, loss, norm):
    if policy == "fp8_lm":
        return [loss.hex(), norm]
    if policy in ("adagc", "update_clip", "spam", "stable_spam"):
        return [loss.hex(), norm.hex()]
    finite = 0.0 if not math.isfinite(norm) else norm
    return [loss.hex(), finite.hex(), int(math.isinf(norm)), int(math.isnan(norm))]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default=os.path.join(ROOT, "engine"))
    engine = os.path.abspath(parser.parse_args().engine)
    draw, failed = random.Random(11), 0
    print(f"{'original (* restated)':<26} {'cases':>6} {'steps':>7} {'wrong':>6}")
    for title, policy, make, steps_of, choices in ROWS:
        package = {"zclip": "zclip", "skip_step": "olmo_core"}.get(policy)
        if package and not all(map(importlib.util.find_spec, (package, "torch"))):
            print(f"{title:<26} its package or torch is not installed")
            continue
        made = list(cases(draw, policy, steps_of, choices))
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            for options, steps in made:
                options = {k: "inf" if v == INF else v for k, v in options.items()}
                file.write(json.dumps(dict(policy=policy, options=options, steps=[
                    spelled(policy, *step) for step in steps])) + "\n")
            file.flush()
            done = subprocess.run([engine, os.path.join(HERE, "stability.lua"), file.name],
                                  cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(done.stderr)
        lines, wrong, count = iter(done.stdout.splitlines()), 0, 0
        for options, steps in made:
            original = make(options)
            for i, (loss, norm) in enumerate(steps):
                count += 1
                problem = disagreement(next(lines), original.step(loss, norm), norm)
                if problem:
                    if not wrong:
                        print(f"  {policy} {options}: step {i}, input ({loss}, {norm}): {problem}")
                    wrong += 1
        if next(lines, None) is not None:
            sys.exit(f"{title}: the engine printed more lines than there are steps")
        failed += wrong
        print(f"{title:<26} {len(made):>6} {count:>7} {wrong:>6}", flush=True)
    sys.exit(1 if failed else 0)


main()
