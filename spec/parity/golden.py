"""Writes spec/golden/gpt2, a tiny GPT-2 saved by transformers, with its logits and five losses of
training, so that gpt2_spec.lua can compare the engine with PyTorch's numbers without PyTorch:
`$VENV/bin/python spec/parity/golden.py`.
"""
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import transformers
from safetensors.torch import save_file

HERE = os.path.dirname(os.path.abspath(__file__))
OUT = os.path.join(os.path.dirname(HERE), "golden", "gpt2")


def main():
    torch.manual_seed(7)
    config = transformers.GPT2Config(vocab_size=13, n_positions=12, n_embd=8, n_layer=2, n_head=2,
                                     initializer_range=0.3, layer_norm_epsilon=1e-4,
                                     resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                                     bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(torch.randn_like(p) * 0.3)
    model.save_pretrained(OUT)
    os.remove(os.path.join(OUT, "generation_config.json"))
    ids = torch.randint(0, 13, (3, 11))
    x, y = ids[:, :-1], ids[:, 1:]
    expected = {"ids": ids.to(torch.int32).contiguous(),
                "logits": model(x).logits.detach().contiguous()}
    decay = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    opt = torch.optim.AdamW([{"params": decay}, {"params": plain, "weight_decay": 0.0}],
                            lr=1e-2, weight_decay=0.1)
    losses = []
    for _ in range(5):
        loss = torch.nn.functional.cross_entropy(model(x).logits.reshape(-1, 13), y.reshape(-1))
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        losses.append(loss.item())
    expected["losses"] = torch.tensor(losses, dtype=torch.float64)
    save_file(expected, os.path.join(OUT, "expected.safetensors"),
              {"torch": torch.__version__, "transformers": transformers.__version__})
    print(OUT, losses)


sys.exit(main())
