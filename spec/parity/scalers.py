"""Loss scalers of other systems on 300 random traces each, with factors such as 1.1 and 1.7: every
scale after every step must equal the engine's, bit for bit. Prints a table; exits with 1 if a scale
differs.

The references below are written from the published semantics; PyTorch's GradScaler itself is run
where torch is installed. Everything else needs only Python's standard library.
"""
import argparse
import json
import math
import os
import random
import struct
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
TRACES, STEPS = 300, 120
FLT_MAX = (2 - 2 ** -23) * 2.0 ** 127


def f32(x):
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return math.inf


class Stop(Exception):
    """The original raises here and ends the run."""


class Scaler:
    """One step at a time: good() or overflow(). Options become attributes."""

    def __init__(self, options):
        for name, value in options.items():
            setattr(self, name, float(value) if isinstance(value, int) else value)
        self.good_steps = self.bad_steps = self.iteration = 0
        self.last_overflow = self.last_rescale = -1
        self.start()

    def start(self):
        pass

    def step(self, found):
        if found:
            self.overflow()
        else:
            self.good()
        return self.scale


class Dynamic(Scaler):                        # PyTorch: the scale is f32, the factors are doubles
    def start(self):
        self.scale = f32(self.init_scale)

    def overflow(self):
        self.scale, self.good_steps = f32(self.scale * self.backoff_factor), 0

    def good(self):
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.good_steps = 0
            larger = f32(self.scale * self.growth_factor)
            if math.isfinite(larger):
                self.scale = larger


class Nemo(Dynamic):                          # every good step refills the hysteresis
    def start(self):
        super().start()
        self.left = self.hysteresis

    def overflow(self):
        self.left -= 1
        self.good_steps = 0
        if self.left <= 0:
            super().overflow()

    def good(self):
        self.left = self.hysteresis
        super().good()


class Megatron(Scaler):                       # all factors are f32; growth refills the hysteresis
    def start(self):
        self.scale, self.left = f32(self.initial_scale), self.hysteresis

    def overflow(self):
        self.good_steps = 0
        self.left -= 1
        if self.left <= 0:
            self.scale = max(f32(self.scale * f32(self.backoff_factor)), f32(self.min_scale))

    def good(self):
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.good_steps, self.left = 0, self.hysteresis
            self.scale = f32(self.scale * f32(self.growth_factor))


class ColossalAI(Megatron):
    def good(self):
        super().good()
        if self.max_scale:
            self.scale = min(self.scale, f32(self.max_scale))


class DeepSpeedFused(Scaler):                 # a window of good steps since the last overflow
    def start(self):
        self.scale = self.init_scale

    def overflow(self):
        self.scale = max(self.scale / self.scale_factor, self.min_scale)
        self.last_overflow = self.iteration
        self.iteration += 1

    def due(self):
        stable = self.iteration - self.last_overflow - 1
        self.iteration += 1
        return stable > 0 and stable % self.scale_window == 0

    def good(self):
        if self.due():
            self.scale *= self.scale_factor


class DeepSpeed(DeepSpeedFused):
    def start(self):
        super().start()
        self.left = self.hysteresis

    def overflow(self):
        if self.hysteresis == 1 or self.left == 1:
            if self.scale == self.min_scale and self.raise_error_at_min_scale:
                raise Stop
            super().overflow()
        else:
            self.left -= 1
            self.last_overflow = self.iteration
            self.iteration += 1

    def good(self):
        if self.consecutive_hysteresis:
            self.left = self.hysteresis
        if self.due():
            self.left = self.hysteresis
            self.scale *= self.scale_factor


class Apex(Scaler):
    def start(self):
        self.scale = min(self.init_scale, self.max_loss_scale)

    def overflow(self):
        self.scale, self.good_steps = max(self.scale / 2, self.min_loss_scale), 0

    def good(self):
        self.good_steps += 1
        if self.good_steps == self.scale_window:
            self.scale, self.good_steps = min(self.scale * 2, self.max_loss_scale), 0


class TensorFlow(Scaler):
    def start(self):
        self.scale = f32(self.initial_loss_scale)

    def overflow(self):
        self.scale, self.good_steps = max(f32(self.scale / f32(self.multiplier)), 1.0), 0

    def good(self):
        self.good_steps += 1
        if self.good_steps >= self.increment_period:
            self.scale, self.good_steps = f32(self.scale * f32(self.multiplier)), 0


class Jmp(Scaler):
    def start(self):
        self.scale = f32(self.loss_scale)

    def overflow(self):
        self.good_steps = 0
        self.scale = max(f32(self.min_loss_scale), f32(self.scale / f32(self.factor)))

    def good(self):
        self.good_steps += 1
        if self.good_steps == self.period:
            self.scale, self.good_steps = f32(self.scale * f32(self.factor)), 0


class Keras(Scaler):
    def start(self):
        self.scale = f32(self.initial_scale)

    def overflow(self):
        self.scale, self.good_steps = f32(self.scale / 2), 0

    def good(self):
        self.good_steps += 1
        if self.good_steps == self.dynamic_growth_steps:
            self.scale, self.good_steps = f32(self.scale * 2), 0


class Flax(Scaler):
    def start(self):
        self.scale = f32(self.scale)

    def overflow(self):
        smaller = f32(self.scale * f32(self.backoff_factor))
        self.scale, self.good_steps = max(smaller, f32(self.minimum_scale)), 0

    def good(self):
        if self.good_steps == self.growth_interval:
            self.scale = min(f32(self.scale * f32(self.growth_factor)), FLT_MAX)
            self.good_steps = 0
        else:
            self.good_steps += 1


class MindSpore(Scaler):
    def start(self):
        self.scale, self.iteration, self.last_overflow = self.init_loss_scale, 1, 0

    def overflow(self):
        self.scale = max(self.scale * (1 / self.scale_factor), 1)
        self.last_overflow = self.iteration
        self.iteration += 1

    def good(self):
        if (self.iteration - self.last_overflow) % self.scale_window == 0:
            self.scale *= self.scale_factor
        self.iteration += 1


class Paddle(Scaler):
    def start(self):
        self.scale = f32(self.init_loss_scaling)

    def overflow(self):
        self.good_steps = 0
        self.bad_steps += 1
        if self.bad_steps == self.decr_every_n_nan_or_inf:
            self.scale, self.bad_steps = f32(self.scale * f32(self.decr_ratio)), 0
            if self.static_graph:
                self.scale = max(self.scale, 1.0)

    def good(self):
        self.bad_steps = 0
        self.good_steps += 1
        if self.good_steps == self.incr_every_n_steps:
            self.scale, self.good_steps = f32(self.scale * f32(self.incr_ratio)), 0


class Fairseq(Scaler):
    def start(self):
        self.scale, self.overflows, self.window = self.init_scale, 0, self.scale_window

    def good(self):
        if (self.iteration - self.last_overflow) % self.window == 0:
            self.scale *= self.scale_factor
            self.last_rescale = self.iteration
            self.grown()
        self.iteration += 1

    def grown(self):
        pass

    def shrunk(self):
        pass

    def floor(self, previous):
        if self.scale <= self.min_loss_scale:
            self.scale = previous
            raise Stop

    def overflow(self):
        previous = self.scale
        since = self.iteration - self.last_rescale
        self.last_overflow = self.iteration
        self.overflows += 1
        if self.overflows / since >= self.tolerance:
            self.scale = max(self.scale / self.scale_factor, self.threshold)
            self.last_rescale, self.overflows = self.iteration, 0
            self.shrunk()
        self.floor(previous)
        self.iteration += 1


class Metaseq(Fairseq):                       # the window follows the scale, and may be fractional
    def grown(self):
        self.window *= self.scale_factor

    def shrunk(self):
        self.window = max(int(self.window / self.scale_factor), 1)

    def floor(self, previous):
        if self.scale < self.min_loss_scale:
            self.scale = previous


class OpenSeq2Seq(Scaler):
    def start(self):
        self.scale = f32(self.scale_max)

    def overflow(self):
        smaller = f32(self.scale / f32(self.step_factor))
        self.scale = max(smaller, f32(self.scale_min))
        self.last_overflow = self.iteration
        self.iteration += 1

    def good(self):
        if (self.iteration - self.last_overflow) % self.step_window == 0:
            self.scale = min(f32(self.scale * f32(self.step_factor)), f32(self.scale_max))
        self.iteration += 1


class BMTrain(Scaler):
    def start(self):
        self.scale = self.loss_scale

    def overflow(self):
        if self.scale > self.min_loss_scale:
            self.scale, self.good_steps = self.scale / self.loss_scale_factor, 0

    def good(self):
        self.good_steps += 1
        if self.good_steps >= self.loss_scale_steps:
            self.scale, self.good_steps = self.scale * self.loss_scale_factor, 0


class MXNet(Scaler):                          # a change takes effect one step later
    def start(self):
        self.scale = self.following = self.init_scale

    def overflow(self):
        self.scale, self.good_steps = self.following, 0
        self.following = self.scale / 2

    def good(self):
        self.scale = self.following
        self.good_steps += 1
        if self.good_steps == self.scale_seq_len:
            self.following, self.good_steps = min(self.max_loss_scale, self.scale * 2), 0


class GradScaler:
    """torch.amp.GradScaler itself, fed one gradient a step."""

    def __init__(self, options):
        import torch
        self.torch = torch
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.0)
        self.scaler = torch.amp.GradScaler("cpu", **options)
        self.scaler.scale(self.weight)

    def step(self, found):
        self.weight.grad = self.torch.tensor([math.inf if found else 0.0])
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale()


# What a policy's options are drawn from; strict=False lets windows be fractional.
FACTORS, BACKOFFS, SCALES = [1.1, 1.3, 1.7, 2, 2.5, 3], [0.3, 0.5, 0.7, 0.9], [256, 1000.5, 65536]
WHOLE, WINDOWS, LEAST = [1, 2, 3, 5, 8], [1, 2, 3, 5, 1.1, 2.5, 3.3], [0.5, 1, 3.7]
GROWTH = dict(growth_factor=FACTORS, backoff_factor=BACKOFFS, growth_interval=WHOLE)
HYSTERESIS = [1, 2, 3]
SYSTEMS = {
    "dynamic": (Dynamic, dict(GROWTH, init_scale=SCALES)),
    "nemo": (Nemo, dict(GROWTH, init_scale=SCALES, hysteresis=HYSTERESIS)),
    "megatron": (Megatron, dict(GROWTH, initial_scale=SCALES, min_scale=LEAST,
                                hysteresis=HYSTERESIS)),
    "colossalai": (ColossalAI, dict(GROWTH, initial_scale=SCALES, min_scale=LEAST,
                                    max_scale=[0, 2 ** 20], hysteresis=HYSTERESIS)),
    "deepspeed_fused": (DeepSpeedFused, dict(init_scale=SCALES, scale_factor=FACTORS,
                                             scale_window=WINDOWS, min_scale=LEAST)),
    "deepspeed": (DeepSpeed, dict(init_scale=SCALES, scale_factor=FACTORS, scale_window=WINDOWS,
                                  min_scale=LEAST, hysteresis=HYSTERESIS,
                                  consecutive_hysteresis=[False, True],
                                  raise_error_at_min_scale=[False, True])),
    "apex": (Apex, dict(init_scale=SCALES, scale_window=WHOLE, min_loss_scale=[0, 3.7],
                        max_loss_scale=[2 ** 17, 70000.5])),
    "tensorflow": (TensorFlow, dict(initial_loss_scale=SCALES, multiplier=FACTORS,
                                    increment_period=WINDOWS)),
    "jmp": (Jmp, dict(loss_scale=SCALES, factor=FACTORS, period=WHOLE, min_loss_scale=LEAST)),
    "keras": (Keras, dict(initial_scale=SCALES, dynamic_growth_steps=WHOLE)),
    "flax": (Flax, dict(GROWTH, scale=SCALES, minimum_scale=LEAST)),
    "mindspore": (MindSpore, dict(init_loss_scale=SCALES, scale_factor=FACTORS,
                                  scale_window=WINDOWS)),
    "paddle": (Paddle, dict(init_loss_scaling=SCALES, incr_ratio=FACTORS, decr_ratio=BACKOFFS,
                            incr_every_n_steps=WHOLE, decr_every_n_nan_or_inf=HYSTERESIS,
                            static_graph=[False, True])),
    "fairseq": (Fairseq, dict(init_scale=SCALES, scale_factor=FACTORS, scale_window=WINDOWS,
                              tolerance=[0, 0.25, 0.4], threshold=[0, 3.7],
                              min_loss_scale=[1e-4, 2])),
    "metaseq": (Metaseq, dict(init_scale=SCALES, scale_factor=FACTORS, scale_window=WINDOWS,
                              tolerance=[0, 0.25, 0.4], threshold=[0, 3.7],
                              min_loss_scale=[2 ** -5, 2])),
    "openseq2seq": (OpenSeq2Seq, dict(scale_min=LEAST, scale_max=SCALES, step_factor=FACTORS,
                                      step_window=WINDOWS)),
    "bmtrain": (BMTrain, dict(loss_scale=SCALES, loss_scale_factor=FACTORS,
                              loss_scale_steps=WINDOWS, min_loss_scale=LEAST)),
    "mxnet": (MXNet, dict(init_scale=SCALES, max_loss_scale=[2 ** 17, 70000.5],
                          scale_seq_len=WHOLE)),
}


def expected(make, options, trace):
    """The scales as the engine prints them. Steps past an infinite scale are left out: the engine
    keeps the last finite one by design."""
    scaler, words = make(options), []
    for found in trace:
        try:
            scale = scaler.step(found == "x")
        except Stop:
            return words + [float(scaler.scale)], True
        if math.isinf(scale) or scale == 0:
            break
        words.append(float(scale))
    return words, False


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default=os.path.join(ROOT, "engine"))
    engine = os.path.abspath(parser.parse_args().engine)
    systems = [(name, name, *system) for name, system in SYSTEMS.items()]
    try:
        import torch
        systems.append((f"torch {torch.__version__}", "dynamic", GradScaler, SYSTEMS["dynamic"][1]))
    except ImportError:
        print("torch is not installed: its GradScaler is not run")
    draw, failed = random.Random(5), 0
    print(f"{'scaler':<20} {'traces':>6} {'scales':>7} {'wrong':>6}")
    for title, policy, make, choices in systems:
        cases = []
        for _ in range(TRACES):
            rate = draw.choice([0.02, 0.1, 0.3, 0.6])
            cases.append(({name: draw.choice(values) for name, values in choices.items()},
                          "".join("x" if draw.random() < rate else "." for _ in range(STEPS))))
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            for options, trace in cases:
                file.write(json.dumps(dict(policy=policy, trace=trace,
                                           options=dict(options, strict=False))) + "\n")
            file.flush()
            done = subprocess.run([engine, os.path.join(HERE, "scalers.lua"), file.name], cwd=ROOT,
                                  capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(done.stderr)
        wrong = count = 0
        for (options, trace), line in zip(cases, done.stdout.splitlines(), strict=True):
            scales, stops = expected(make, options, trace)
            words = line.split()
            got = [float.fromhex(word) for word in words if word != "stop"][:len(scales)]
            count += len(scales)
            if got != scales or stops and words[-1] != "stop":
                if not wrong:
                    at = next((i for i, (a, b) in enumerate(zip(got, scales)) if a != b), len(got))
                    print(f"  {policy} {options} {trace}: step {at + 1}, engine "
                          f"{got[at:at + 1]}, expected {scales[at:at + 1]}")
                wrong += 1
        failed += wrong
        print(f"{title:<20} {len(cases):>6} {count:>7} {wrong:>6}", flush=True)
    sys.exit(1 if failed else 0)


main()
