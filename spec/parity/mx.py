"""Microscaling formats compared with ml_dtypes and NumPy: part of `make parity`. Every code must
decode to the same number. Every f16 and bf16, every midpoint and its neighbours, and MX_NUMBERS
random f32 (1e7) must encode to the same code.
"""
import argparse
import os
import subprocess
import sys
import tempfile

import ml_dtypes
import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
NUMBERS = int(float(os.environ.get("MX_NUMBERS", "1e7")))
CHUNK = 1 << 22
np.seterr(all="ignore")


def by_ml_dtypes(dtype):
    return lambda x: x.astype(dtype).view(np.uint8).astype(np.int64)


def tf32(x):
    """The top 19 bits of an f32, rounded to nearest even."""
    bits = x.view(np.uint32).astype(np.int64)
    return np.where(np.isnan(x), 0x3FE00, (bits + 0xFFF + ((bits >> 13) & 1)) >> 13)


def integer(fraction, least):
    return lambda x: np.clip(np.rint(x.astype(np.float64) * 2**fraction), least,
                             127).astype(np.int64) & 0xFF


# format: (encoding of f32, mode of eng_small_encode, codes, dtype of decoding or None, which of
# the random numbers are compared)
ANY, NUMBER = (lambda x: np.ones(x.shape, bool)), (lambda x: ~np.isnan(x))
FORMATS = {
    "e2m1": (ml_dtypes.float4_e2m1fn, 0, 16, NUMBER),       # NaN is not defined there
    "e2m3": (ml_dtypes.float6_e2m3fn, 0, 64, NUMBER),
    "e3m2": (ml_dtypes.float6_e3m2fn, 0, 64, NUMBER),
    "e4m3": (ml_dtypes.float8_e4m3fn, 0, 256, ANY),
    "e5m2": (ml_dtypes.float8_e5m2, 0, 256, ANY),
    "e4m3_ieee": (ml_dtypes.float8_e4m3, 0, 256, ANY),
    "ue4m3": (ml_dtypes.float8_e4m3fn, 0, 128, lambda x: ~np.signbit(x)),
    "ue8m0": (ml_dtypes.float8_e8m0fnu, 4, 256, ANY),
    "tf32": (tf32, 0, 1 << 19, ANY),
    "int8": (integer(0, -128), 0, 256, NUMBER),
    "mxint8": (integer(6, -127), 0, 256, NUMBER),
}


class Engine:
    """A process that encodes and decodes the numbers in a file."""

    def __init__(self, engine, folder):
        self.folder = folder
        command = [engine, os.path.join(HERE, "mx.lua"), folder]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True, cwd=ROOT)

    def ask(self, x, result, *words):
        x.tofile(os.path.join(self.folder, "a.in"))
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        if self.process.stdout.readline() != "done\n":
            sys.exit("parity: the engine ended")
        return np.fromfile(os.path.join(self.folder, "a.out"), result)


def values(name, reference, codes):
    """What each code stands for, in f64."""
    every = np.arange(codes)
    if name == "tf32":
        return (every << 13).astype(np.uint32).view(np.float32).astype(np.float64)
    if "int8" in name:
        return every.astype(np.uint8).view(np.int8) / (64.0 if name == "mxint8" else 1.0)
    return every.astype(np.uint8).view(reference).astype(np.float64)


def midpoints(decoded):
    """All numbers of a format and their midpoints, in f32, each with its neighbours."""
    every = np.unique(decoded[np.isfinite(decoded)])
    past = np.abs(every[-1]) * np.array([1.01, 1.5, 2.0])
    both = np.concatenate([every, (every[1:] + every[:-1]) / 2, past, -past])
    every = (2 * every[-1] - every[-2] + every[-1]) / 2      # half a unit past the largest
    both = np.append(both, [every, -every]).astype(np.float32)
    return np.concatenate([both, np.nextafter(both, np.float32(np.inf)),
                           np.nextafter(both, np.float32(-np.inf))])


def formats(engine):
    bad = 0
    halves = np.arange(1 << 16).astype(np.uint16)
    halves = np.concatenate([halves.view(np.float16).astype(np.float32),
                             halves.view(ml_dtypes.bfloat16).astype(np.float32)])
    rng = np.random.default_rng(1)
    for name, (reference, mode, codes, compared) in FORMATS.items():
        encode = reference if name in ("tf32", "int8", "mxint8") else by_ml_dtypes(reference)
        want = values(name, reference, codes)
        got = engine.ask(np.arange(codes, dtype=np.int32), np.float64, "decode", name)
        wrong = np.count_nonzero(~((got == want) & (np.signbit(got) == np.signbit(want)) |
                                   np.isnan(got) & np.isnan(want)))

        def count(x):
            x = x[compared(x)]
            want_code = encode(x)
            got_code = engine.ask(x, np.int32, "encode", name, mode)
            nan = np.isnan(want[want_code]) & np.isnan(want[got_code])
            return len(x), np.count_nonzero((got_code != want_code) & ~nan)

        total, left = 0, NUMBERS
        chunks = [halves, midpoints(want)]
        while left > 0 or chunks:
            if chunks:
                x = chunks.pop()
            else:   # all bit patterns, and as many within the format's range
                n = min(CHUNK, left)
                x = rng.integers(0, 1 << 32, n, dtype=np.uint32).view(np.float32)
                x[1::2] = rng.normal(0, 1, n // 2) * np.exp2(rng.uniform(-12, 10, n // 2))
                left -= n
            n, differ = count(x)
            total, wrong = total + n, wrong + differ
        print(f"  {name:10} {codes:6} codes, {total} numbers: {wrong} differ")
        bad += wrong
    return bad


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="./engine")
    engine_path = os.path.abspath(parser.parse_args().engine)
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(engine_path, folder)
        print("microscaling formats against ml_dtypes " + ml_dtypes.__version__)
        bad = formats(engine)
    sys.exit(1 if bad else 0)


main()
