# make bench: speed beside PyTorch, in ratios of one run. VENV is a Python environment with torch and numpy.
# BENCH_QUICK=1: fewer rounds, no torch.compile, no GPT-2 124M.   BENCH_ONLY=start,parts,step,large: some parts.
exec "${VENV:?}/bin/python" "$(dirname "$0")/bench.py" --engine "${ENGINE:-./engine}"
