"""The engine's numbers compared with PyTorch's: `make parity`. Prints a table; exits with 1 when a
row is outside its limit.

transformers writes a random GPT-2; the engine reads it; both train it on the same windows of one
.bin file.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
STEPS, BATCH, CONTEXT = 50, 4, 64
ADAMW = dict(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
CLIP = 1.0
# At HIGH_LR the gradients overflow a scale of 65536 in fp16, and the early steps amplify
# disturbances: a relative change of 1e-3 in the weights grows to 1 %.
LR, HIGH_LR = 5e-4, 1e-3


class Table:
    """Rows of measured differences and their limits."""

    def __init__(self):
        self.failed = 0
        print(f"{'what':<63} {'difference':>11} {'limit':>9}")

    def row(self, what, value, limit, note=""):
        good = limit is None or value <= limit          # a NaN is not good
        self.failed += not good
        verdict = "" if limit is None else "ok" if good else "FAILED"
        print(f"{what:<63} {value:>11.2e} {'-' if limit is None else format(limit, '.0e'):>9}  "
              f"{verdict}{'  ' + note if note else ''}", flush=True)


def relative(a, b):
    """Largest |a - b| / |b|, of equally long lists."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float("nan") if a.shape != b.shape else float(np.max(np.abs(a - b) / np.abs(b)))


def run_engine(engine, *arguments):
    done = subprocess.run([engine, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0:
        sys.stderr.write(done.stderr)
        sys.exit(
            f"parity: the engine ended with {done.returncode}: {' '.join(map(str, arguments))}")
    return done.stdout


# ------------------------------------------------------------------ GPT-2


def new_gpt2(directory, initializer_range, seed):
    torch.manual_seed(seed)
    config = transformers.GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=128, n_layer=4,
                                     n_head=4, initializer_range=initializer_range,
                                     resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                                     bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():                               # norms other than 1, biases other than 0
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.add_(torch.randn_like(p) * initializer_range)
    model.save_pretrained(directory)
    return model.eval()


def logits_of(model, ids):
    with torch.no_grad():
        return model(ids).logits


def engine_logits(engine, directory, ids, scratch):
    save_file({"ids": ids.to(torch.int32)}, f"{scratch}/ids.safetensors")
    run_engine(engine, f"{HERE}/logits.lua", directory, f"{scratch}/ids.safetensors",
               f"{scratch}/logits.safetensors")
    return load_file(f"{scratch}/logits.safetensors")["logits"]


def tokens(path):
    """The repository's own text as uint16 tokens, few enough that STEPS batches start over."""
    text = open(os.path.join(ROOT, "core", "ops.def"), "rb").read()[:10000]
    data = np.frombuffer(text, np.uint8).astype(np.uint16)
    data.tofile(path)
    return data


def torch_train(directory, data, lr, dtype=None):
    """STEPS attempts of AdamW on the windows of llm.c's loader: batch i, row b starts at token
    (i*B + b)*T. A dtype means autocast, fp16 also GradScaler. Returns the losses and the number of
    skipped steps."""
    model = transformers.GPT2LMHeadModel.from_pretrained(directory, attn_implementation="sdpa",
                                                         dtype=torch.float32).train()
    decay = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    opt = torch.optim.AdamW([{"params": decay}, {"params": plain, "weight_decay": 0.0}],
                            lr=lr, **ADAMW)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    per_epoch = (len(data) - 1) // (BATCH * CONTEXT)
    losses, skipped = [], 0
    for step in range(STEPS):
        at = (step % per_epoch) * BATCH * CONTEXT
        window = torch.from_numpy(data[at:at + BATCH * CONTEXT + 1].astype(np.int64))
        x, y = window[:-1].view(BATCH, CONTEXT), window[1:].view(BATCH, CONTEXT)
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            logits = model(x).logits
        loss = torch.nn.functional.cross_entropy(logits.float().view(-1, 256), y.reshape(-1))
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        before = scaler.get_scale()
        scaler.step(opt)
        scaler.update()
        skipped += scaler.get_scale() < before
        losses.append(loss.item())
    return losses, skipped


def engine_train(engine, directory, data_path, lr, precision, save=""):
    text = run_engine(engine, f"{ROOT}/examples/gpt2.lua", f"model={directory}",
                      f"data={data_path}", f"steps={STEPS}", f"batch={BATCH}", f"context={CONTEXT}",
                      f"lr={lr}", f"beta1={ADAMW['betas'][0]}", f"beta2={ADAMW['betas'][1]}",
                      f"eps={ADAMW['eps']}", f"weight_decay={ADAMW['weight_decay']}",
                      f"clip={CLIP}", f"precision={precision}", "seed=1", "shuffle=false",
                      "dropout=0", "log=json", f"save={save}")
    rows = [json.loads(line) for line in text.splitlines()]
    return [float(r["loss"]) for r in rows], rows[-1]["skipped"]


def check_gpt2(engine, table, scratch):
    torch.manual_seed(0)
    ids = torch.randint(0, 256, (3, CONTEXT))
    for initializer_range, what in ((0.02, "as initialised"), (0.2, "wide weights")):
        model = new_gpt2(f"{scratch}/wide", initializer_range, 1)
        ours, theirs = engine_logits(engine, f"{scratch}/wide", ids, scratch), logits_of(model, ids)
        scale = theirs.abs().max().item()
        table.row(f"logits of a GPT-2 of transformers, fp32, {what}",
                  (ours - theirs).abs().max().item() / max(1.0, scale), 1e-4,
                  f"largest logit {scale:.3g}")

    start = f"{scratch}/start"
    new_gpt2(start, 0.02, 2)
    data_path = f"{scratch}/train.bin"
    data = tokens(data_path)
    reference, _ = torch_train(start, data, LR)
    last = {}
    for precision, limit in (("fp32", 1e-3), ("bf16", 1e-2), ("fp16", 1e-2)):
        losses, skipped = engine_train(engine, start, data_path, LR, precision,
                                       f"{scratch}/trained-{precision}")
        last[precision] = losses[-1]
        table.row(f"{STEPS} AdamW steps, {precision}: losses against PyTorch's fp32",
                  relative(losses, reference), limit,
                  f"{losses[0]:.4f} -> {losses[-1]:.4f}, PyTorch {reference[-1]:.4f}")
    table.row("bf16 ends near fp32", relative([last["bf16"]], [last["fp32"]]), 1e-2)
    table.row("fp16 with dynamic scaling ends near fp32", relative([last["fp16"]], [last["fp32"]]),
              1e-2)
    theirs, their_skips = torch_train(start, data, HIGH_LR, torch.float16)
    ours, skips = engine_train(engine, start, data_path, HIGH_LR, "fp16")
    table.row("fp16 at a rate that overflows ends near autocast and GradScaler",
              relative(ours[-1:], theirs[-1:]), 1e-2,
              f"{ours[0]:.4f} -> {ours[-1]:.4f}, skipped {skips}; "
              f"PyTorch {theirs[-1]:.4f}, skipped {their_skips}")

    saved = f"{scratch}/trained-fp32"
    back = transformers.GPT2LMHeadModel.from_pretrained(saved, dtype="auto").eval()
    names = set(load_file(f"{saved}/model.safetensors")) ^ set(
        load_file(f"{start}/model.safetensors"))
    table.row("save=DIR: tensor names that differ from transformers' own", len(names), 0)
    theirs = logits_of(back, ids)
    table.row("save=DIR: logits of the model that transformers loads",
              (engine_logits(engine, saved, ids, scratch) - theirs).abs().max().item(), 1e-4)


# ------------------------------------------------------------------ optimizers


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, algorithm 2: the sign of an interpolation; decoupled decay."""

    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                direction = torch.sign(beta1 * m + (1 - beta1) * p.grad)
                p -= group["lr"] * (direction + group["weight_decay"] * p)
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1,
                                          weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1),
    "lion": lambda p: Lion(p, lr=0.003, weight_decay=0.1),
}


def check_optimizers(engine, table, scratch, steps=20):
    torch.manual_seed(3)
    start = {"x": torch.randn(64, 13), "y": torch.randn(64, 3), "w1": torch.randn(17, 13) * 0.3,
             "b1": torch.randn(17) * 0.1, "w2": torch.randn(3, 17) * 0.3}
    save_file(start, f"{scratch}/problem.safetensors")
    run_engine(engine, f"{HERE}/optimizers.lua", f"{scratch}/problem.safetensors", steps,
               f"{scratch}/solved.safetensors")
    ours = load_file(f"{scratch}/solved.safetensors")
    for name, make in OPTIMIZERS.items():
        p = {key: start[key].clone().requires_grad_() for key in ("w1", "b1", "w2")}
        opt, losses = make(list(p.values())), []
        for _ in range(steps):
            loss = torch.nn.functional.mse_loss(
                torch.tanh(start["x"] @ p["w1"].T + p["b1"]) @ p["w2"].T, start["y"])
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
        weights = max((ours[f"{name}.{key}"] - p[key].detach()).abs().max().item() /
                      p[key].abs().max().item() for key in p)
        table.row(f"{name}: losses of {steps} steps", relative(ours[f"{name}.losses"], losses),
                  1e-5, f"{losses[0]:.4f} -> {losses[-1]:.4f}")
        table.row(f"{name}: weights after them", weights, 1e-5)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default=os.path.join(ROOT, "engine"))
    engine = os.path.abspath(parser.parse_args().engine)
    transformers.logging.set_verbosity_error()
    print(f"engine and PyTorch {torch.__version__}, transformers {transformers.__version__}, "
          f"{torch.get_num_threads()} threads\n")
    table = Table()
    with tempfile.TemporaryDirectory() as scratch:
        check_gpt2(engine, table, scratch)
        check_optimizers(engine, table, scratch)
    print(f"\n{table.failed} rows failed" if table.failed else "\nall rows within their limits")
    sys.exit(1 if table.failed else 0)


main()
