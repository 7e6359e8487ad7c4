# make parity: NF4 compared with bitsandbytes. NF4_NUMBERS: how many numbers (1e7).
"${VENV:?}/bin/python" -c 'import bitsandbytes' 2>/dev/null \
  || "$VENV/bin/pip" install --quiet --no-deps --retries 1 --timeout 15 bitsandbytes==0.50.2 || true
exec "$VENV/bin/python" "$(dirname "$0")/nf4.py" --engine "${ENGINE:-./engine}"
