# make parity: adapters trained by commands alone, in PEFT and transformers (lora.sh installs them).
exec "${VENV:?}/bin/python" "$(dirname "$0")/finetune.py" --engine "${ENGINE:-./engine}"
