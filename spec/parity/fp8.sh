# make parity: FP8 compared with ml_dtypes and with other projects' formulas in PyTorch.
# FP8_NUMBERS: how many random f32 numbers (1e8).
exec "${VENV:?}/bin/python" "$(dirname "$0")/fp8.py" --engine "${ENGINE:-./engine}"
