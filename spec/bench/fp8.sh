# FP8: casts and quantizers compared with copying and ml_dtypes, products with bf16 products,
# Hopper's accumulator with a scalar loop.
others=$("${VENV:?}/bin/python" - <<'PYTHON'
import time

import ml_dtypes
import numpy as np

x = np.random.default_rng(1).standard_normal(1 << 22, dtype=np.float32)
best = float("inf")
for _ in range(7):
    began = time.perf_counter()
    x.astype(ml_dtypes.float8_e4m3fn)
    best = min(best, time.perf_counter() - began)
print(best / x.size)
PYTHON
)
exec "${ENGINE:-./engine}" spec/bench/fp8.lua "$others"
