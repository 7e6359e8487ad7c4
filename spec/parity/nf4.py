"""NF4 compared with bitsandbytes on a CPU: part of `make parity`. NF4_NUMBERS (1e7) numbers in f32,
bf16 and f16, with extreme blocks, three block sizes and a last block that is not full: codes,
absmaxes, their codes and groups, and dequantized numbers must be equal. The mean that double
quantization subtracts is taken from bitsandbytes: an f32 sum whose order depends on the machine.
The last column says how many codes of absmaxes differ under the engine's own mean, which is summed
in f64.
"""
import argparse
import logging
import os
import subprocess
import sys
import tempfile

logging.disable(logging.WARNING)
import bitsandbytes
import bitsandbytes.functional as bnb
import torch
from safetensors.torch import load_file, save_file

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
NUMBERS = int(float(os.environ.get("NF4_NUMBERS", "1e7")))


def numbers(n, dtype, extreme):
    """Normal numbers; the first half in blocks of 64 of different magnitudes. extreme: also some
    blocks of zeros, tiny and huge numbers."""
    x = torch.randn(n)
    size = torch.exp2(torch.randint(-12, 6, (n // 64 + 1,)).float()).repeat_interleave(64)[:n]
    x[: n // 2] *= size[: n // 2]
    for at, factor in ((3, 0.0), (7, 1e-38), (9, 1e-42), (11, 1e30)) if extreme else ():
        x[64 * at:64 * at + 64] *= factor
    return x.to(dtype)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="./engine")
    engine = os.path.abspath(parser.parse_args().engine)
    torch.manual_seed(1)
    bad = 0
    print("NF4 against bitsandbytes " + bitsandbytes.__version__)
    for dtype, n, block, extreme in (
            (torch.float32, NUMBERS // 2, 64, False), (torch.bfloat16, NUMBERS // 4, 64, False),
            (torch.float16, NUMBERS // 4, 64, False), (torch.float32, 100_001, 64, True),
            (torch.bfloat16, 100_001, 64, True), (torch.float32, 99_999, 32, False),
            (torch.bfloat16, 1 << 17, 4096, False)):
        x = numbers(n, dtype, extreme)
        q, state = bnb.quantize_4bit(x, blocksize=block, quant_type="nf4",
                                     compress_statistics=True)
        plain, plain_state = bnb.quantize_4bit(x, blocksize=block, quant_type="nf4")
        want = {"q": q.flatten(), "absmax": plain_state.absmax, "code": state.absmax,
                "group": state.state2.absmax}
        for name in ("float32", "bfloat16", "float16"):
            state.dtype = plain_state.dtype = getattr(torch, name)
            want[name] = bnb.dequantize_4bit(q, state).flatten()
            want[name + " plain"] = bnb.dequantize_4bit(plain, plain_state).flatten()
        with tempfile.TemporaryDirectory() as folder:
            save_file({"x": x, "offset": state.offset.reshape(1)}, folder + "/in")
            subprocess.run([engine, os.path.join(HERE, "nf4.lua"), folder, str(block)], cwd=ROOT,
                           check=True)
            got = load_file(folder + "/out")
        differ = {}
        for name, values in want.items():
            if name.startswith("bfloat16"):     # AVX512_BF16 flushes results below 2^-126 to zero
                low = got[name].abs() < 2.0**-126
                values, got[name] = values.masked_fill(low, 0), got[name].masked_fill(low, 0)
            bits = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[values.element_size()]
            count = int((got[name].view(bits) != values.view(bits)).sum())
            if count:
                differ[name] = count
        own = int((got["own code"] != state.absmax).sum())
        print(f"  {str(dtype)[6:]:8} {n:8} numbers in blocks of {block:4}: "
              f"{differ or '0 differ'}; with the engine's mean ({float(got['own offset']):.9g}, not "
              f"{float(state.offset):.9g}) {own} of {len(state.absmax)} codes")
        bad += len(differ)
    sys.exit(1 if bad else 0)


main()
