# make parity: loss scalers of other systems on random traces.
exec "${VENV:?}/bin/python" "$(dirname "$0")/scalers.py" --engine "${ENGINE:-./engine}"
