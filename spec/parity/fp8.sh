# make parity: FP8 beside ml_dtypes and the formulas of other projects in PyTorch. FP8_NUMBERS: how many random f32 (1e8).
exec "${VENV:?}/bin/python" "$(dirname "$0")/fp8.py" --engine "${ENGINE:-./engine}"
