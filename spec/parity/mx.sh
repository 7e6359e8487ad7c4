# make parity: microscaling formats compared with ml_dtypes.
# MX_NUMBERS: how many random f32 numbers per format (1e7).
exec "${VENV:?}/bin/python" "$(dirname "$0")/mx.py" --engine "${ENGINE:-./engine}"
