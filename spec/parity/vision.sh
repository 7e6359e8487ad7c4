# make parity: convolution, pooling, norms and resnet18 compared with PyTorch.
# VISION_SHAPES: how many random shapes of each operation (300). VISION_STEPS: of resnet18 (50).
exec "${VENV:?}/bin/python" "$(dirname "$0")/vision.py" --engine "${ENGINE:-./engine}"
