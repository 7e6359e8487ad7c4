# make parity: adapters trained by the engine's commands alone, then loaded by PEFT (which lora.sh
# installs) and transformers.
exec "${VENV:?}/bin/python" "$(dirname "$0")/finetune.py" --engine "${ENGINE:-./engine}"
