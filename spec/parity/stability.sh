# make parity: policies that guard updates, against the originals. Installs the packages of two.
have='import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ("zclip", "olmo_core"))))'
"${VENV:?}/bin/python" -c "$have" \
  || "$VENV/bin/pip" install --quiet --no-deps --retries 1 --timeout 15 \
    zclip==1.0.0 ai2-olmo-core==3.0.0 || true
exec "$VENV/bin/python" "$(dirname "$0")/stability.py" --engine "${ENGINE:-./engine}"
