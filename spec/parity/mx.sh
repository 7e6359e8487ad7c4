# make parity: microscaling formats compared with ml_dtypes, quantizers with torchao.
# MX_NUMBERS: how many random f32 numbers per format (1e7).
"${VENV:?}/bin/python" -c 'import torchao' 2>/dev/null || "$VENV/bin/pip" install --quiet torchao
exec "$VENV/bin/python" "$(dirname "$0")/mx.py" --engine "${ENGINE:-./engine}"
