# run.sh [FOLDER]: measures the whole CUDA device in under ten minutes on an H200; writes one file
# per part. Needs an NVIDIA card and, for the comparison, a python3 with PyTorch. PARTS lists the
# parts to run, by default "rates step fp8 specs". There are also "more" (steps in fp16, fp32,
# mxfp8, nvfp4) and "sanitizer" (compute-sanitizer on the quick specs; takes longer). TRIAL=1: tiny
# sizes, to check that everything runs. Exits with 1 when a command failed or timed out, with 2 for
# an unknown part.
out=${1:-build/bench-cuda}
engine=${ENGINE:-./engine}
here=$(dirname "$0")
# layers width heads vocab context batch
size=1 gpt2="12 768 12 50304 1024 64" large="24 2304 36 50304 1024 8" python=${PYTHON:-python3}
if [ -n "$TRIAL" ]; then
  size=0.002 gpt2="1 64 1 128 64 2" large="1 128 2 128 64 2"
  export ENGINE_TEST_STEPS=2 WARM=1 STEPS=2 REPEAT=1
fi
parts=${PARTS:-rates step fp8 specs}
for part in $parts; do
  case $part in
  specs | rates | step | fp8 | more | sanitizer) ;;
  *)
    echo "run.sh: unknown part '$part'; PARTS is a list of: specs rates step fp8 more sanitizer" >&2
    exit 2 ;;
  esac
done
mkdir -p "$out"
: >"$out/failed.txt"
nvidia-smi --query-gpu=name,driver_version,clocks.sm,memory.total --format=csv >"$out/card.txt" 2>&1
date -u +%Y-%m-%d >>"$out/card.txt"

# say FILE SECONDS COMMAND...: shows the output and appends it to the file; ends the command after
# SECONDS. Failures go to failed.txt.
say() {
  file=$1 most=$2
  shift 2
  {
    echo "# $*"
    timeout -k 5 "$most" "$@" 2>&1 || echo "# ended with $?: $*" | tee -a "$out/failed.txt"
  } | tee -a "$out/$file"
}

for part in $parts; do
  rm -f "$out/$part.txt"
  case $part in
  specs)
    say specs.txt 150 $engine spec/cuda/run.lua ;;
  rates)
    say rates.txt 80 $engine "$here/rates.lua" cuda $size
    say rates.txt 40 $python "$here/torch_rates.py" ;;
  step)
    say step.txt 40 $engine "$here/step.lua" bf16 $gpt2 sync
    say step.txt 40 env PROFILE=1 $engine "$here/step.lua" bf16 $gpt2 lagged
    say step.txt 100 $python "$here/torch_step.py" bf16 $gpt2 compile ;;
  fp8)   # at 1.6 B parameters
    for precision in bf16 fp8_block fp8_current; do
      say fp8.txt 45 $engine "$here/step.lua" $precision $large lagged
    done ;;
  more)
    for precision in mxfp8 nvfp4; do
      say more.txt 60 $engine "$here/step.lua" $precision $large lagged
    done
    for precision in fp16 fp32; do
      [ $precision = fp32 ] && gpt2="12 768 12 50304 1024 16"
      say more.txt 60 $engine "$here/step.lua" $precision $gpt2 sync
      say more.txt 60 $engine "$here/step.lua" $precision $gpt2 lagged
      say more.txt 120 $python "$here/torch_step.py" $precision $gpt2 eager
      say more.txt 120 $python "$here/torch_step.py" $precision $gpt2 compile
    done ;;
  sanitizer)   # without LuaJIT's compiler: compute-sanitizer ends a process in compiled Lua code
    for tool in memcheck racecheck initcheck synccheck; do
      say sanitizer.txt 280 env ENGINE_TEST_STEPS=2 compute-sanitizer --tool $tool $engine -e '
        require("jit").off()
        arg = {}
        for name in ("params/gradstats cpu/optimizer_kernel cpu/lagged_kernel cpu/wire_kernel")
          :gmatch("%S+") do arg[#arg + 1] = "spec/" .. name .. "_spec.lua" end
        dofile "spec/cuda/run.lua"'
    done ;;
  esac
done
[ -s "$out/failed.txt" ] || exit 0
echo "run.sh: failed:" >&2
cat "$out/failed.txt" >&2
exit 1
