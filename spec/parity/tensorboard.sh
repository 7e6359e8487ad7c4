# make parity: the engine's event files, live and exported, read by TensorBoard.
# VENV is a Python environment with tensorboard.
exec "${VENV:?}/bin/python" "$(dirname "$0")/tensorboard_events.py" --engine "${ENGINE:-./engine}"
