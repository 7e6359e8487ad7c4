# make parity: numbers compared with PyTorch's.
# VENV is a Python environment with torch, transformers, numpy and safetensors.
exec "${VENV:?}/bin/python" "$(dirname "$0")/parity.py" --engine "${ENGINE:-./engine}"
