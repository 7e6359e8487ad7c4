"""make parity: Hugging Face's models in and out, against transformers itself. For each architecture
a tiny random model, for tokens and for labels: logits, 30 steps of AdamW, 200 greedy tokens, the
same for padded batches, and the files that the engine saves, read by AutoModel. `hf.py --golden`
writes spec/golden/hf.json for spec/nn/hf_spec.lua.
"""
import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
import torch
import transformers
from safetensors.torch import load_file, save_file

HERE = os.path.dirname(os.path.abspath(__file__))
VOCAB, CONTEXT, STEPS, TOKENS = 61, 256, 30, 200
LENGTHS, PROMPTS = (24, 17, 5), (7, 4, 2)      # of the sequences of a padded batch

DECODER = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
               num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT,
               bos_token_id=None, eos_token_id=None, pad_token_id=None)
LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=32)
MODELS = {
    "gpt2": ("GPT2", dict(vocab_size=VOCAB, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=4,
                          resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None,
                          eos_token_id=None)),
    "gpt2_untied": ("GPT2", dict(vocab_size=VOCAB, n_positions=CONTEXT, n_embd=32, n_layer=2,
                                 n_head=4, n_inner=40, activation_function="gelu",
                                 resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                                 tie_word_embeddings=False, bos_token_id=None, eos_token_id=None)),
    "llama": ("Llama", dict(DECODER)),
    "llama3": ("Llama", dict(DECODER, rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "llama_linear": ("Llama", dict(DECODER, head_dim=12, attention_bias=True, mlp_bias=True,
                                   rope_parameters=dict(rope_type="linear", rope_theta=10000.0,
                                                        factor=4.0))),
    "llama_yarn": ("Llama", dict(DECODER, rope_parameters=dict(
        rope_type="yarn", rope_theta=10000.0, factor=8.0, beta_fast=16.0,
        original_max_position_embeddings=32))),
    "llama_yarn_mscale": ("Llama", dict(DECODER, rope_parameters=dict(
        rope_type="yarn", rope_theta=1000.0, factor=4.0, mscale=1.0, mscale_all_dim=0.5,
        truncate=False, original_max_position_embeddings=64))),
    "llama_dynamic": ("Llama", dict(DECODER, max_position_embeddings=8, rope_parameters=dict(
        rope_type="dynamic", rope_theta=10000.0, factor=32.0))),
    "mistral": ("Mistral", dict(DECODER, sliding_window=6)),
    "qwen2": ("Qwen2", dict(DECODER, use_sliding_window=True, sliding_window=5,
                            max_window_layers=1)),
    "qwen3": ("Qwen3", dict(DECODER, head_dim=16, tie_word_embeddings=True)),
    "mixtral": ("Mixtral", dict(DECODER, num_local_experts=4, num_experts_per_tok=2)),
    "bert": ("Bert", dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2,
                          num_attention_heads=4, intermediate_size=48, type_vocab_size=2,
                          max_position_embeddings=CONTEXT, hidden_dropout_prob=0.0,
                          attention_probs_dropout_prob=0.0, pad_token_id=None)),
}


# Not Mixtral: rounding may choose another expert, which changes a loss over so few tokens.
for base in ("gpt2", "llama_yarn", "mistral", "qwen2", "qwen3", "bert"):
    MODELS[f"{base}_classifier"] = (MODELS[base][0],
                                    dict(MODELS[base][1], num_labels=3, pad_token_id=0))


def numbers(count, seed):
    """Pseudo-random numbers in (-1, 1) that spec/nn/hf_spec.lua computes too."""
    state, values = seed, []
    for _ in range(count):
        state = state * 16807 % 2147483647
        values.append(state / 2147483647 * 2 - 1)
    return torch.tensor(values, dtype=torch.float64)


def build(kind, fields, scale=0.15):
    config = getattr(transformers, f"{kind}Config")(**fields)
    config._attn_implementation = "eager"
    if "num_labels" in fields:
        name = f"{kind}ForSequenceClassification"
    else:
        name = {"Bert": "BertForMaskedLM", "GPT2": "GPT2LMHeadModel"}.get(kind,
                                                                         f"{kind}ForCausalLM")
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        for p in model.parameters():
            norm = p.ndim == 1 and bool((p == 1).all())
            p.copy_(torch.randn(p.shape, dtype=torch.float64) * scale + (1 if norm else 0))
    return model.eval()


def reload(folder, **more):
    name = json.load(open(f"{folder}/config.json"))["architectures"][0]
    return getattr(transformers, name).from_pretrained(folder, attn_implementation="eager", **more).eval()


def train(model, x, y, steps, lr=1e-3, mask=None):
    model.train()
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    opt = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
                            lr=lr, weight_decay=0.1)
    losses = []
    for _ in range(steps):
        logits = model(x, attention_mask=mask).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]),
                                                 y.reshape(-1).long())
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def batch_of(kind, classifies, length=24):
    # In classifiers token 0 is padding, whose embedding transformers does not train.
    ids = torch.randint(int(classifies), VOCAB, (3, length + 1))
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    if classifies:
        return x, torch.randint(0, 3, (3,))
    if kind == "Bert":
        y = torch.where(torch.rand(x.shape) < 0.3, x, torch.tensor(-100))
    return x, y


def greedy(model, prompts, count, mask=None):
    mask = torch.ones_like(prompts) if mask is None else mask
    with torch.no_grad():
        return model.generate(prompts, attention_mask=mask, max_new_tokens=count, do_sample=False,
                              use_cache=True, eos_token_id=None, pad_token_id=0)


def mask_of(lengths, length, left):
    """[B x length]: 1 at the tokens of sequences of these lengths, 0 at padding before or after."""
    mask = (torch.arange(length)[None] < torch.tensor(lengths)[:, None]).long()
    return mask.flip(-1) if left else mask


def padded_logits(model, x, mask):
    """A language model's logits, 0 at padding. A classifier gets token 0 wherever mask is 0."""
    if model.config.architectures[0].endswith("ForSequenceClassification"):
        return model(torch.where(mask > 0, x, 0), attention_mask=mask).logits.detach()
    logits = model(x, attention_mask=mask).logits
    return torch.where(mask[..., None] > 0, logits, 0.0).detach().contiguous()


def apart(a, b):
    """The largest difference, relative to the largest value."""
    return ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()


def defined(name, p):
    """A parameter without the bias of keys where no rotation follows. Softmax ignores this bias,
    its gradient is rounding noise, and Adam turns noise into steps of full size."""
    if name.endswith("key.bias"):
        return torch.ones(1)
    if name.endswith("c_attn.bias"):
        return torch.cat((p[:p.numel() // 3], p[2 * p.numel() // 3:]))
    return p


def flat(model):
    return torch.cat([defined(n, p).detach().double().flatten()
                      for n, p in sorted(model.named_parameters())])


def prepare(folder, kind, fields, dtype):
    model = build(kind, fields).to(dtype)
    model.save_pretrained(folder, max_shard_size="40KB" if dtype != torch.float32 else "5GB")
    with open(f"{folder}/tokenizer.json", "w") as f:
        f.write('{"not": "weights"}\n')
    model = reload(folder, dtype=torch.float32)
    classifies = "num_labels" in fields
    x, y = batch_of(kind, classifies)
    out = {"x": x.int(), "y": y.int(), "logits": model(x).logits.detach().contiguous()}
    for side in ("right", "left"):
        out[side] = mask_of(LENGTHS, x.shape[1], side == "left").int()
        if not (kind == "Bert" and classifies and side == "left"):
            out[f"{side}_logits"] = padded_logits(model, x, out[side])
    if kind != "Bert" and not classifies:
        out["tokens"] = greedy(model, x[:, :7], TOKENS).int().contiguous()
        out["unequal"] = greedy(model, x[:, :7], TOKENS, mask_of(PROMPTS, 7, True)) \
            [:, 7:].int().contiguous()
    save_file(out, f"{folder}/in.bin")
    if not classifies:
        out["padded_losses"] = torch.tensor(
            train(reload(folder, dtype=torch.float32), x,
                  torch.where(out["left"] > 0, y, torch.tensor(-100)), STEPS, mask=out["left"]),
            dtype=torch.float64)
    # A fresh model: with dynamic scaling, a model keeps the RoPE base of its longest sequence.
    model = reload(folder, dtype=torch.float32)
    out["losses"] = torch.tensor(train(model, x, y, STEPS), dtype=torch.float64)
    out["model"] = model
    return out


def bits_differ(a, b):
    """Names whose tensors differ between two folders."""
    read = lambda folder: {k: v for f in sorted(os.listdir(folder)) if f.endswith(".safetensors")
                           for k, v in load_file(f"{folder}/{f}").items()}
    a, b = read(a), read(b)
    return [k for k in sorted(set(a) | set(b)) if k not in a or k not in b
            or a[k].dtype != b[k].dtype or not torch.equal(a[k], b[k])]


def check(engine, root):
    torch.manual_seed(5)
    torch.set_num_threads(1)
    rows, expected = [], {}
    for name, (kind, fields) in MODELS.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            key = name + {torch.float32: "", torch.bfloat16: "_bf16", torch.float16: "_fp16"}[dtype]
            if dtype == torch.float32 or name in ("llama3", "gpt2", "mixtral", "bert"):
                expected[key] = prepare(f"{root}/{key}", kind, fields, dtype)
    subprocess.run([engine, f"{HERE}/hf.lua", root, str(STEPS), str(TOKENS), *expected], check=True)

    def row(key, what, value, limit):
        rows.append(value <= limit)
        print(f"{key:21} {what:37} {value:10.2e}   limit {limit:g}  "
              f"{'ok' if rows[-1] else 'FAILED'}")

    for key, want in expected.items():
        folder, model = f"{root}/{key}", want.pop("model")
        got = load_file(f"{folder}/out.bin")
        row(key, "logits", apart(got["logits"], want["logits"]), 2e-6)
        row(key, f"losses of {STEPS} AdamW steps", apart(got["losses"], want["losses"]), 1e-4)
        for side in ("right", "left"):
            if f"{side}_logits" in want:
                row(key, f"logits, padded on the {side}",
                    apart(got[f"{side}_logits"], want[f"{side}_logits"]), 2e-6)
        if "padded_losses" in want:
            row(key, f"losses of {STEPS} AdamW steps, padded",
                apart(got["padded_losses"], want["padded_losses"]), 1e-4)
        for tokens in ("tokens", "unequal") if "tokens" in want else ():
            row(key, f"greedy tokens that differ, {tokens} ({TOKENS})",
                int((got[tokens] != want[tokens]).sum()), 0)
        row(key, "tensors whose bits differ", len(bits_differ(folder, f"{folder}/saved")), 0)
        texts = {open(f"{path}/tokenizer.json").read() for path in (folder, f"{folder}/saved")}
        row(key, "tokenizer.json differs", len(texts) - 1, 0)
        saved = reload(f"{folder}/saved", dtype=torch.float32)
        row(key, "AutoModel of saved: logits",
            apart(saved(want["x"]).logits, want["logits"]), 0)
        trained = reload(f"{folder}/trained", dtype=torch.float32)
        p, q = flat(trained), flat(model)
        row(key, "trained weights, read by AutoModel", ((p - q).norm() / q.norm()).item(), 1e-4)
    for kind in sorted(os.listdir(f"{root}/new")):
        got, model = load_file(f"{root}/new/{kind}/out.bin"), reload(f"{root}/new/{kind}")
        row(kind, "new_model, read by AutoModel: logits",
            apart(got["logits"], model(got["x"]).logits), 2e-6)
    return 0 if all(rows) else 1


def golden(path):
    """Weights come from numbers(), so the file has their shapes instead of the weights."""
    torch.manual_seed(5)
    torch.set_num_threads(1)
    out = {"transformers": transformers.__version__, "torch": torch.__version__, "models": {}}
    for name, (kind, fields) in MODELS.items():
        if name == "gpt2":   # spec/golden/gpt2
            continue
        small = dict(fields, vocab_size=17)
        for key, value in dict(hidden_size=16, intermediate_size=20, n_embd=16).items():
            if key in small:
                small[key] = value
        if "head_dim" in small:
            small["head_dim"] = 6
        model = build(kind, small)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            files = load_file(f"{folder}/model.safetensors")
            config = json.load(open(f"{folder}/config.json"))
            # one seed for each tensor, by its place among the sorted names, as in the spec
            for i, (key, x) in enumerate(sorted(files.items())):
                norm = x.ndim == 1 and "norm" in key.lower().replace("ln_", "norm") \
                    and key.endswith("weight")
                x.copy_(numbers(x.numel(), i + 1).reshape(x.shape) * 0.25 + (1 if norm else 0))
            save_file(files, f"{folder}/model.safetensors", {"format": "pt"})
            model = reload(folder, dtype=torch.float32)
        classifies = "num_labels" in small
        ids = torch.randint(int(classifies), 17, (2, 11))
        x, y = ids[:, :-1], torch.tensor([2, 0]) if classifies else ids[:, 1:]
        entry = {"config": {k: v for k, v in config.items() if k != "transformers_version"},
                 "shapes": {k: list(v.shape) for k, v in files.items()}, "ids": ids.tolist(),
                 "logits": [round(v, 7) for v in
                            model(x).logits[0].reshape(-1, model(x).logits.shape[-1])[-1].tolist()],
                 "sum": float(f"{model(x).logits.abs().sum().item():.7g}")}
        untouched = copy.deepcopy(model)
        for side in ("right",) if kind == "Bert" and classifies else ("right", "left"):
            padded = padded_logits(model, x, mask_of((10, 4), 10, side == "left"))
            entry[side] = float(f"{padded.abs().sum().item():.7g}")
        if kind != "Bert" and not classifies:
            entry["tokens"] = greedy(model, x[:, :4], 16).tolist()
            entry["unequal"] = greedy(model, x[:, :4], 12, mask_of((4, 2), 4, True))[:, 4:].tolist()
        entry["losses"] = [round(v, 7) for v in train(untouched, x, y, 4, 1e-2)]
        out["models"][name] = entry
    with open(path, "w") as f:
        json.dump(out, f, separators=(",", ":"))
        f.write("\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="./engine")
    parser.add_argument("--golden", action="store_true")
    args = parser.parse_args()
    if args.golden:
        return golden(os.path.join(os.path.dirname(HERE), "golden", "hf.json"))
    with tempfile.TemporaryDirectory() as root:
        return check(args.engine, root)


sys.exit(main())
