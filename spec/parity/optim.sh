# make parity: optimizers written in Lua and policies that act on updates, against the originals.
# Installs two of the originals' packages.
have='from importlib.metadata import version as v; import optimi, sys
sys.exit(v("pytorch_optimizer") != "4.1.0")'
"${VENV:?}/bin/python" -c "$have" 2>/dev/null \
  || "$VENV/bin/pip" install --quiet --no-deps --retries 1 --timeout 15 \
    torch-optimi==0.3.3 pytorch_optimizer==4.1.0 || true
exec "$VENV/bin/python" "$(dirname "$0")/optim.py" --engine "${ENGINE:-./engine}"
