# run.sh [FOLDER]: every figure of the CUDA device in one call of some minutes, one file per command. On a machine with an NVIDIA card; for the
# comparison its python3 has PyTorch. PARTS chooses: rates, step.
out=${1:-build/bench-cuda}
engine=${ENGINE:-./engine}
here=$(dirname "$0")
mkdir -p "$out"
nvidia-smi --query-gpu=name,driver_version,clocks.sm,memory.total --format=csv >"$out/card.txt" 2>&1
date -u +%Y-%m-%d >>"$out/card.txt"
for part in ${PARTS:-rates step}; do
  case $part in
  rates)
    $engine "$here/rates.lua" 2>&1 | tee "$out/rates.txt"
    python3 "$here/torch_rates.py" 2>&1 | tee "$out/torch_rates.txt" ;;
  step)
    for precision in bf16 fp16 fp32; do
      batch=64; [ $precision = fp32 ] && batch=16
      $engine "$here/step.lua" $precision 12 768 12 50304 1024 $batch sync
      $engine "$here/step.lua" $precision 12 768 12 50304 1024 $batch lagged
      python3 "$here/torch_step.py" $precision 12 768 12 50304 1024 $batch eager
      python3 "$here/torch_step.py" $precision 12 768 12 50304 1024 $batch compile
    done 2>&1 | tee "$out/step.txt" ;;
  esac
done
