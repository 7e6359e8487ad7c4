# make parity: optimizers written in Lua, against the originals. Installs two of them.
"${VENV:?}/bin/python" -c "import optimi, pytorch_optimizer" 2>/dev/null \
  || "$VENV/bin/pip" install --quiet --no-deps --retries 1 --timeout 15 \
    torch-optimi==0.3.3 pytorch_optimizer==4.1.0 || true
exec "$VENV/bin/python" "$(dirname "$0")/optim.py" --engine "${ENGINE:-./engine}"
