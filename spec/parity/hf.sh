# make parity: models of Hugging Face's transformers, in and out.
exec "${VENV:?}/bin/python" "$(dirname "$0")/hf.py" --engine "${ENGINE:-./engine}"
