# make bench: speed compared with PyTorch, as ratios of one run.
# VENV is a Python environment with torch and numpy.
# BENCH_QUICK=1: fewer rounds, no torch.compile, no GPT-2 124M.
# BENCH_ONLY=start,parts,step,large: selected parts.
exec "${VENV:?}/bin/python" "$(dirname "$0")/bench.py" --engine "${ENGINE:-./engine}"
