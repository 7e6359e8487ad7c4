# make parity: the policy qk_clip against Megatron-LM's own code. Installs its package.
have='import importlib.util as u, sys; sys.exit(u.find_spec("megatron") is None)'
"${VENV:?}/bin/python" -c "$have" \
  || "$VENV/bin/pip" install --quiet --no-deps --retries 1 --timeout 15 \
    megatron-core==0.16.1 || true
exec "$VENV/bin/python" "$(dirname "$0")/qk_clip.py" --engine "${ENGINE:-./engine}"
