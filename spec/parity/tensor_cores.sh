# make parity: Hopper's and Blackwell's sums compared with MMA-Sim. MMA_PRODUCTS: how many of each
# kind (1e5).
"${VENV:?}/bin/python" -c 'import mmasim.nv_ptx' 2>/dev/null \
  || "$VENV/bin/pip" install --quiet --no-deps mmasim ninja || true
exec "$VENV/bin/python" "$(dirname "$0")/tensor_cores.py" --engine "${ENGINE:-./engine}"
