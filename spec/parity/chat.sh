# make parity: chat templates, against the package `transformers`.
"${VENV:?}/bin/python" -c "import transformers, jinja2" 2>/dev/null \
  || "$VENV/bin/pip" install --quiet --retries 1 --timeout 15 transformers jinja2
exec "$VENV/bin/python" "$(dirname "$0")/chat.py"
