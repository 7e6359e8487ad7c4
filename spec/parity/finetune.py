"""make parity: fine-tuning from the command line alone. A tiny Llama and its tokenizer, made by
transformers; SFT and DPO with examples/finetune.lua; then PEFT loads the adapters, and transformers
the merged model and its tokenizer. Both must give the same logits, and the merged model must give
the engine's greedy answer."""
import argparse
import json
import os
import subprocess
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import peft
import torch
import transformers
from tokenizers import Tokenizer, decoders, models

TEMPLATE = ("{{ bos_token }}{% for m in messages %}{{ '<' + m.role[0] + '>' + m.content }}"
            "{% endfor %}{% if add_generation_prompt %}{{ '<a>' }}{% endif %}")


def make(folder):
    characters = "\n 0123456789?abcdefghijklmnopqrstuvwxyz"
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(characters)}, [],
                                     unk_token="?"))
    tokenizer.decoder = decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>",
                                                additional_special_tokens=["<u>", "<a>"])
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64,
                                      num_hidden_layers=2, num_attention_heads=4,
                                      num_key_value_heads=2, max_position_embeddings=64,
                                      tie_word_embeddings=False)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return fast


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="./engine")
    engine, root = parser.parse_args().engine, tempfile.mkdtemp()
    base, chats, pairs = root + "/base", root + "/chats.jsonl", root + "/pairs.jsonl"
    make(base)
    with open(chats, "w") as file, open(pairs, "w") as other:
        for i in range(9):
            file.write(json.dumps({"messages": [{"role": "user", "content": f"after {i}?"},
                                                {"role": "assistant", "content": f"{i + 1}\n"}]})
                       + "\n")
            other.write(json.dumps({"prompt": f"<s><u>after {i}?<a>", "chosen": f"{i + 1}\n",
                                    "rejected": f"{(i + 3) % 10}\n"}) + "\n")
    common = ["model=" + base, "match=attn,mlp,head", "batch=9", "context=32", "lr=1e-2",
              "precision=fp32", "log=quiet"]

    def run(*words):
        done = subprocess.run([engine, *words], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(words)}: {done.stderr}")
        return done.stdout

    failed = False
    run("examples/finetune.lua", *common, "data=" + chats, "steps=300", "out=" + root + "/sft")
    run("examples/finetune.lua", *common, "data=" + pairs, "steps=20", "method=dpo",
        "lr=1e-3", "from=" + root + "/sft", "out=" + root + "/dpo")
    for stage in "sft", "dpo":
        out = f"{root}/{stage}"
        tokenizer = transformers.AutoTokenizer.from_pretrained(out + "/merged")
        merged = transformers.AutoModelForCausalLM.from_pretrained(out + "/merged").eval().float()
        plain = transformers.AutoModelForCausalLM.from_pretrained(base).float()
        adapted = peft.PeftModel.from_pretrained(plain, out + "/adapter").eval()
        text = tokenizer.apply_chat_template([{"role": "user", "content": "after 6?"}],
                                             tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.no_grad():
            a, b = merged(ids).logits, adapted(ids).logits
            answer = merged.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2,
                                     do_sample=False, pad_token_id=0)[0]
        off = ((a - b).abs().max() / b.abs().max()).item()
        theirs = tokenizer.decode(answer, skip_special_tokens=True)
        ours = run("generate", out + "/merged", "--prompt", text, "--temperature", "0",
                   "--max_tokens", "2")
        good = off < 1e-5 and theirs.strip() == ours.strip()
        failed |= not good
        print(f"{stage}: merged in transformers and adapter in PEFT differ by {off:.1e}; "
              f"answers {theirs.strip()!r} and {ours.strip()!r}: {'good' if good else 'DIFFER'}")
    sys.exit(failed)


main()
