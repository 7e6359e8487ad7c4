"""FP8 compared with other libraries: part of `make parity`. Conversions must equal those of
ml_dtypes (any NaN equals any NaN) on every f16 and bf16, on every f32 at a rounding boundary and
its neighbours, and on FP8_NUMBERS random f32 (1e8). Quantizers must equal the projects' own
formulas in PyTorch.
"""
import argparse
import os
import subprocess
import sys
import tempfile

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import load_file, save_file

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
NUMBERS = int(float(os.environ.get("FP8_NUMBERS", "1e8")))
CHUNK = 1 << 22
FORMATS = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 448.0, torch.float8_e4m3fn),
    "e5m2": (ml_dtypes.float8_e5m2, 57344.0, torch.float8_e5m2)
}


class Engine:
    """A process that casts and quantizes the tensors in a folder."""

    def __init__(self, engine, folder):
        self.folder = folder
        command = [engine, os.path.join(HERE, "fp8.lua"), folder]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True, cwd=ROOT)

    def ask(self, what, x, *words):
        save_file({"x": x}, os.path.join(self.folder, "a.in"))
        self.process.stdin.write(" ".join([what, "a", *words]) + "\n")
        self.process.stdin.flush()
        if self.process.stdout.readline() != "done\n":
            sys.exit("parity: the engine ended without an answer")
        return load_file(os.path.join(self.folder, "a.out"))


def codes(x):
    return x.view(torch.uint8).numpy()


def is_nan(code, name):
    return (code & 0x7F) == 0x7F if name == "e4m3" else (code & 0x7F) > 0x7C


def wrong(got, want, name):
    """How many codes differ, except between NaNs."""
    return int(np.count_nonzero((got != want) & ~(is_nan(got, name) & is_nan(want, name))))


def casts(engine, x):
    """How many codes of the four casts of x differ from ml_dtypes'."""
    out, bad = engine.ask("cast", x), 0
    numbers = x.float().numpy()
    for name, (dtype, largest, _) in FORMATS.items():
        with np.errstate(all="ignore"):
            bad += wrong(codes(out[name]), numbers.astype(dtype).view(np.uint8), name)
            bad += wrong(codes(out[name + "_sat"]),
                         np.clip(numbers, -largest, largest).astype(dtype).view(np.uint8), name)
    return bad


def turning_points():
    """All numbers of both formats and their midpoints, in f32, each with its neighbours."""
    points = [np.array([0.0, np.inf, np.nan], np.float32)]
    for dtype, largest, _ in FORMATS.values():
        every = np.arange(128, dtype=np.uint8).view(dtype).astype(np.float64)
        every = np.append(every[np.isfinite(every)], 2 * largest - every[every < largest].max())
        both = np.concatenate([every, (every[1:] + every[:-1]) / 2]).astype(np.float32)
        points += [both, np.nextafter(both, np.float32(np.inf)), np.nextafter(both, np.float32(0))]
    points = np.concatenate(points)
    return torch.from_numpy(np.concatenate([points, -points]))


# ------------------------------------------------------------------ quantizers
# x [rows x columns], blocks of high x wide


def blocks_of(x, high, wide):
    """x padded with zeros to whole blocks, as [down, high, across, wide]."""
    rows, columns = x.shape
    padded = torch.nn.functional.pad(x, (0, -columns % wide, 0, -rows % high))
    return padded.view((rows + high - 1) // high, high, (columns + wide - 1) // wide, wide)


def deepgemm(x, largest, pow2):
    """per_token_cast_to_fp8, per_block_cast_to_fp8 of DeepGEMM: the scale and the scaled x."""
    scale = x.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4) / largest
    if pow2:
        bits = scale.view(torch.int32)
        exponent = ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).int()
        scale = (exponent.clamp(1, 254) << 23).view(torch.float32)
    return scale, x.float() * (1.0 / scale)


def deepseek(x, largest, pow2):
    """act_quant of DeepSeek-V3's inference kernels."""
    scale = x.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4) / largest
    if pow2:
        scale = torch.exp2(torch.ceil(torch.log2(scale.double()))).float()
    return scale, x.float() / scale


def torchao(x, largest, pow2):
    """amax_to_scale and to_fp8_saturated of torchao."""
    amax = x.abs().float().amax(dim=(1, 3), keepdim=True)
    factor = (largest / amax.double().clamp(min=1e-12)).float()
    if pow2:
        factor = (factor.view(torch.int32) & -0x800000).view(torch.float32)
    return factor.reciprocal(), (x.float() * factor).clamp(-largest, largest)


def transformer_engine(x, largest, pow2):
    """compute_scale_from_amax of TransformerEngine."""
    amax = x.abs().float().amax(dim=(1, 3), keepdim=True)
    # largest / amax would compute amax.reciprocal() * largest
    factor = torch.full_like(amax, largest) / amax
    factor = torch.where(amax > 0, factor, torch.ones_like(amax))
    factor = torch.where(torch.isinf(factor),
                         torch.full_like(factor, torch.finfo(torch.float32).max), factor)
    if pow2:
        factor = (factor.view(torch.int32) & -0x800000).view(torch.float32)
    return factor.reciprocal(), x.float() * factor


def quantizers(engine):
    """Yields each rule, how many of its codes and dequantized numbers differ, and their count."""
    torch.manual_seed(3)
    x = torch.randn(300, 700)
    x[torch.rand_like(x) < 0.01] *= 2.0 ** 14
    x[torch.rand_like(x) < 0.05] = 0
    x[:40, :256] *= 2.0 ** -120
    x[200:, 300:] = 0
    for rule in (deepgemm, deepseek, torchao, transformer_engine):
        bad = count = 0
        for name, (dtype, largest, _) in FORMATS.items():
            for high, wide in ((1, 128), (128, 128), (128, 1), (1, 700), (300, 700)):
                for pow2 in (False, True):
                    out = engine.ask("quantize", x, rule.__name__, name, f"{high}x{wide}",
                                     "pow2" if pow2 else "-")
                    scale, y = rule(blocks_of(x, high, wide), largest, pow2)
                    want = y.reshape(scale.shape[0] * high, -1)[:300, :700].contiguous()
                    want = want.numpy().astype(dtype).view(np.uint8)
                    spread = scale.expand(-1, high, -1, wide)
                    spread = spread.reshape(scale.shape[0] * high, -1)[:300, :700]
                    back = torch.from_numpy(want.copy()).view(FORMATS[name][2]).float() * spread
                    bad += wrong(codes(out["q"]), want, name) + int((out["back"] != back).sum())
                    count += 2 * x.numel()
        yield rule.__name__, bad, count


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default=os.path.join(ROOT, "engine"))
    options = parser.parse_args()
    failed = 0

    def row(what, bad, count):
        nonlocal failed
        failed += bad > 0
        print(f"{what:<63} {bad:>11d} of {count:.3g}  {'FAILED' if bad else 'ok'}", flush=True)

    print(f"{'FP8: what':<63} {'differ':>11}")
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(options.engine, folder)
        every = np.arange(65536, dtype=np.uint16)
        row("every f16 to e4m3 and e5m2, saturating and not",
            casts(engine, torch.from_numpy(every.copy()).view(torch.float16)), 4 * 65536)
        row("every bf16",
            casts(engine, torch.from_numpy(every.copy()).view(torch.bfloat16)), 4 * 65536)
        points = turning_points()
        row("f32 numbers and midpoints, and their neighbours", casts(engine, points),
            4 * len(points))
        random, bad, count = np.random.default_rng(11), 0, 0
        while count < NUMBERS:
            n = min(CHUNK, NUMBERS - count)
            bits = random.integers(0, 1 << 32, n, dtype=np.uint32)
            if count // CHUNK % 2:   # half of them within the formats' range
                bits = (bits & 0x807FFFFF) | (random.integers(104, 146, n, dtype=np.uint32) << 23)
            bad += casts(engine, torch.from_numpy(bits.view(np.float32)))
            count += n
        row("random f32", bad, 4 * count)
        for rule, bad, count in quantizers(engine):
            row(f"quantizers as {rule}: codes and their values", bad, count)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
