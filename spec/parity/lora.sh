# make parity: adapters against PEFT. Installs it and what it imports.
"${VENV:?}/bin/python" -c "import peft" 2>/dev/null \
  || "$VENV/bin/pip" install --quiet --no-deps --retries 1 --timeout 15 \
    peft==0.21.2 accelerate==1.15.0 psutil || true
exec "$VENV/bin/python" "$(dirname "$0")/lora.py" --engine "${ENGINE:-./engine}"
