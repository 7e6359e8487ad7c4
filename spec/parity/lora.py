"""make parity: adapters against Hugging Face's PEFT on a tiny GPT-2. LoRA and DoRA with random
adapters: logits, 20 AdamW steps in f32, the logits after them; the adapter that the engine trained
and saved, loaded by PEFT; 5 steps of DPO whose reference is the model without adapters. Also the
adapter files of a tiny Llama and of classifiers, read and written. `--golden DIR` also writes the
numbers for spec/nn/lora_spec.lua.
"""
import argparse
import os
import shutil
import subprocess
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

HERE = os.path.dirname(os.path.abspath(__file__))
MODEL = os.path.join(os.path.dirname(HERE), "golden", "gpt2")
LIMIT = 1e-5
STEPS = 20


def fresh():
    model = transformers.GPT2LMHeadModel.from_pretrained(MODEL)
    return model.float()


def adapted(dora):
    """A PEFT model whose adapters already change the logits."""
    torch.manual_seed(5 + dora)
    config = peft.LoraConfig(r=4, lora_alpha=6, lora_dropout=0.0, use_dora=dora, bias="none",
                             target_modules=["c_attn", "mlp.c_proj"], task_type="CAUSAL_LM",
                             fan_in_fan_out=True)
    model = peft.get_peft_model(fresh(), config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.2)
            if "magnitude" in name:
                p.mul_(1 + 0.2 * torch.randn_like(p))
    return model


def train(model, x, y):
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2,
                            weight_decay=0.1)
    losses = []
    for _ in range(STEPS):
        loss = torch.nn.functional.cross_entropy(model(x).logits.reshape(-1, 13), y.reshape(-1))
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def tiny_llama():
    torch.manual_seed(3)
    config = transformers.LlamaConfig(vocab_size=13, hidden_size=16, intermediate_size=24,
                                      num_hidden_layers=2, num_attention_heads=4,
                                      num_key_value_heads=2, max_position_embeddings=12,
                                      initializer_range=0.3, rms_norm_eps=1e-6,
                                      tie_word_embeddings=False, bos_token_id=0, eos_token_id=0)
    return transformers.LlamaForCausalLM(config).float()


def llama_rows(engine, ids, dora):
    """Adapters of q, v and down: the engine joins q, k and v, and divides them again."""
    folder = tempfile.mkdtemp()
    model = tiny_llama()
    model.save_pretrained(folder)
    config = peft.LoraConfig(r=3, lora_alpha=5, use_dora=dora, task_type="CAUSAL_LM",
                             target_modules=["q_proj", "v_proj", "down_proj"])
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.2)
            if "magnitude" in name:
                p.mul_(1 + 0.2 * torch.randn_like(p))
    model.save_pretrained(os.path.join(folder, "adapter"))
    x = ids[:, :-1].long()
    save_file({"ids": x.to(torch.int32).contiguous()}, os.path.join(folder, "ids.safetensors"))
    subprocess.run([engine, os.path.join(HERE, "lora.lua"), folder], check=True)
    got = load_file(os.path.join(folder, "engine.safetensors"))["logits"]
    back = peft.PeftModel.from_pretrained(tiny_llama(), os.path.join(folder, "saved"))
    expected = model(x).logits.detach()
    again = back(x).logits.detach()
    shutil.rmtree(folder)
    return [("Llama, an A for each of q and v", got, expected),
            ("Llama, the engine's file in PEFT", again, expected)]


def classifier_rows(engine, ids):
    """Classifiers: PEFT's file also has the head, and so has the file that the engine writes."""
    rows = []
    for kind, more in (("Llama", dict(num_key_value_heads=2)), ("Bert", {}),
                       ("GPT2", dict(n_embd=16, n_head=4, n_layer=2, n_inner=24))):
        torch.manual_seed(4)
        config = getattr(transformers, f"{kind}Config")(
            **dict(dict(vocab_size=13, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                        num_attention_heads=4) if kind != "GPT2" else dict(vocab_size=13), **more,
                   num_labels=3, pad_token_id=0))
        make = getattr(transformers, f"{kind}ForSequenceClassification")
        with tempfile.TemporaryDirectory() as folder:
            make(config).save_pretrained(folder)
            target = {"Llama": ["q_proj", "v_proj"], "Bert": ["query", "dense"],
                      "GPT2": ["c_attn"]}[kind]
            model = peft.get_peft_model(make.from_pretrained(folder), peft.LoraConfig(
                r=3, lora_alpha=5, task_type="SEQ_CLS", target_modules=target,
                fan_in_fan_out=kind == "GPT2"))
            with torch.no_grad():
                for name, p in model.named_parameters():
                    if "lora_B" in name or "modules_to_save" in name:
                        p.normal_(0, 0.2)
            model.save_pretrained(f"{folder}/adapter")
            x = ids[:, :-1].long()
            save_file({"ids": x.to(torch.int32).contiguous()}, f"{folder}/ids.safetensors")
            subprocess.run([engine, os.path.join(HERE, "lora.lua"), folder], check=True)
            got = load_file(f"{folder}/engine.safetensors")["logits"]
            back = peft.PeftModel.from_pretrained(make.from_pretrained(folder), f"{folder}/saved")
            expected = model.eval()(x).logits.detach()
            rows += [(f"{kind} classifier", got, expected),
                     (f"{kind} classifier, saved, in PEFT", back(x).logits.detach(), expected)]
    return rows


def log_probability(model, x, y):
    logits = model(x).logits.log_softmax(-1)
    return logits.gather(-1, y.unsqueeze(-1)).squeeze(-1).sum(-1)


def train_dpo(model, x, y, beta=0.5, smoothing=0.1):
    """The losses, and the rewards of the last step. The first half of the rows are the chosen."""
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2,
                            weight_decay=0.1)
    result = []
    for _ in range(5):
        with torch.no_grad(), model.disable_adapter():
            fixed = log_probability(model, x, y)
        reward = beta * (log_probability(model, x, y) - fixed)
        h = reward[:len(x) // 2] - reward[len(x) // 2:]
        log_sigmoid = torch.nn.functional.logsigmoid
        loss = (-(1 - smoothing) * log_sigmoid(h) - smoothing * log_sigmoid(-h)).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        result.append(loss.item())
    return torch.tensor(result + reward.tolist(), dtype=torch.float64)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="./engine")
    parser.add_argument("--golden", help="a folder to write the numbers to")
    args = parser.parse_args()
    failed = False
    ids = load_file(os.path.join(MODEL, "expected.safetensors"))["ids"]
    x, y = ids[:, :-1].long(), ids[:, 1:].long()
    print(f"peft {peft.__version__}, torch {torch.__version__}, limit {LIMIT:g}")
    for kind in ("lora", "dora"):
        folder = tempfile.mkdtemp()
        model = adapted(kind == "dora")
        model.save_pretrained(folder)
        expected = {"ids": ids.contiguous(), "before": model(x).logits.detach().contiguous()}
        expected["losses"] = torch.tensor(train(model, x, y), dtype=torch.float64)
        expected["after"] = model(x).logits.detach().contiguous()
        merged = model.merge_and_unload()(x).logits.detach()
        dpo = train_dpo(adapted(kind == "dora"), x[:2], y[:2])
        if args.golden:
            out = os.path.join(args.golden, kind)
            shutil.copytree(folder, out, dirs_exist_ok=True)
            for name in os.listdir(out):
                if not name.startswith("adapter_"):
                    os.remove(os.path.join(out, name))
            save_file(expected, os.path.join(out, "expected.safetensors"),
                      {"peft": peft.__version__, "torch": torch.__version__})
        subprocess.run([args.engine, os.path.join(HERE, "lora.lua"), MODEL, folder, str(STEPS)],
                       check=True)
        got = load_file(os.path.join(folder, "engine.safetensors"))
        back = peft.PeftModel.from_pretrained(fresh(), os.path.join(folder, "saved"))
        rows = [("logits", got["before"], expected["before"]),
                ("losses of 20 steps", got["losses"], expected["losses"]),
                ("logits after them", got["after"], expected["after"]),
                ("merged", got["merged"], merged),
                ("the engine's adapter in PEFT", back(x).logits.detach(), got["after"]),
                ("DPO, adapters off as reference", got["dpo"], dpo)]
        rows += llama_rows(args.engine, ids, kind == "dora")
        rows += classifier_rows(args.engine, ids) if kind == "lora" else []
        for name, ours, theirs in rows:
            worst = (ours.double() - theirs.double()).abs().max().item()
            good = worst <= LIMIT
            failed = failed or not good
            print(f"{kind}  {name:<33} {worst:9.2e}  {'ok' if good else 'OUTSIDE THE LIMIT'}")
        shutil.rmtree(folder)
    return 1 if failed else 0


sys.exit(main())
