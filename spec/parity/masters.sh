# make parity: bf16 master weights against torch-optimi's Kahan AdamW and torchao's AdamW with
# stochastic rounding. Installs the two packages if they are missing.
"${VENV:?}/bin/python" -c "import optimi, torchao" 2>/dev/null \
  || "$VENV/bin/pip" install --quiet --no-deps --retries 1 --timeout 15 \
    torch-optimi==0.3.3 torchao==0.18.0 || true
exec "$VENV/bin/python" "$(dirname "$0")/masters.py" --engine "${ENGINE:-./engine}"
