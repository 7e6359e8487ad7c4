# make parity: tokenizers, against the package `tokenizers`.
"${VENV:?}/bin/python" -c "import tokenizers, numpy" 2>/dev/null \
  || "$VENV/bin/pip" install --quiet --retries 1 --timeout 15 tokenizers numpy
exec "$VENV/bin/python" "$(dirname "$0")/tokenizer.py" --engine "${ENGINE:-./engine}"
