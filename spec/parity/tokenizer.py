"""make parity: tokenizers against the package `tokenizers`.

Makes 12 MB of text from files of this machine (source code, catalogs of many languages) and from a
generator (every script, emoji, malformed UTF-8, odd white space), trains a tokenizer of every
family, and compares the engine's ids and decoded texts with the package's. Also compares speed on
one thread. `--real FILE` adds a tokenizer.json to those that are trained."""
import argparse
import collections
import gettext
import glob
import json
import os
import random
import subprocess
import sys
import tempfile
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"
import numpy as np
from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers,
                        processors, trainers)

GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
          r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")


def unicode_text(rng, n):
    """Random text: words of all scripts, white space, emoji, contractions, single code points."""
    spaces = [" ", " ", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2028",
              " \n ", "\u0085", "\x0b", "\u200b", "\u200d", "\ufeff"]
    bits = ["'s", "'T", "'re", "'LL", "'\u017f", "can't", "I'd", "...", "!?", "---", "#include",
            "https://x.org/?a=1&b=2", "3.14159", "1234567", "\u0663\u0664\u0665", "\u00bd", "\u2167",
            "e\u0301", "\u0301", "\u1100\u1161\u11a8", "\ufb01", "\u0130", "\u1e9e", "\u2460",
            "\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea",
            "\U0001f44d\U0001f3fd", "<s>", "</s>", "<unk>", "[MASK]", "<|endoftext|>", "<0x41>",
            "\u2581", "\u4f60\u597d", "\x00", "\x7f", "\u00ad", "\ufffd", "_", "a_b", "__init__"]
    ranges = [(0x20, 0x7f), (0xa0, 0x250), (0x370, 0x530), (0x590, 0x700), (0x900, 0xe00),
              (0xe00, 0x1100), (0x1e00, 0x2000), (0x2000, 0x2c00), (0x3040, 0x3100),
              (0x4e00, 0x9fff), (0xac00, 0xd7a4), (0xf900, 0xfb00), (0x1d400, 0x1d800),
              (0x1f300, 0x1f700), (0, 0xd800), (0xe000, 0x110000)]
    out = []
    while n > 0:
        kind = rng.randrange(10)
        if kind < 3:
            piece = rng.choice(spaces)
        elif kind < 5:
            piece = rng.choice(bits)
        else:
            low, high = rng.choice(ranges)
            piece = "".join(chr(rng.randrange(low, high)) for _ in range(rng.randrange(1, 9)))
        out.append(piece)
        n -= len(piece.encode())
    return "".join(out)


def documents(megabytes):
    """A list of documents as bytes, most of up to 8 KB; some are not UTF-8."""
    rng = random.Random(5)
    here = os.path.dirname(os.path.abspath(__file__))
    files = glob.glob(here + "/../../core/*/*.[ch]") + glob.glob(here + "/../../lua/engine/*/*.lua")
    files += glob.glob(here + "/../../docs/*.md")
    files += glob.glob(os.path.dirname(os.__file__) + "/*.py")
    files += glob.glob("/usr/share/vim/vim*/tutor/*.utf-8")
    docs, want = [], megabytes * 1000000
    for path in sorted(files):
        text = open(path, "rb").read(200000)
        docs += [text[i:i + 8000] for i in range(0, len(text), 8000)]     # cuts characters, too
    rng.shuffle(docs)
    docs = cut(docs, want * 0.45)
    catalogs = []
    for path in glob.glob("/usr/share/locale/*/LC_MESSAGES/*.mo"):
        try:
            with open(path, "rb") as f:
                values = gettext.GNUTranslations(f)._catalog.values()
        except Exception:
            continue
        text = "\n".join(v for v in values if isinstance(v, str)).encode()
        catalogs += [text[i:i + 4000] for i in range(0, len(text), 4000)]
    catalogs.sort()
    rng.shuffle(catalogs)
    docs += cut(catalogs, want * 0.3)
    size = sum(map(len, docs))
    while size < want:
        data = unicode_text(rng, rng.randrange(1, 4000)).encode("utf-8", "replace")
        if rng.randrange(3) == 0:                         # malformed UTF-8
            data = bytearray(data)
            for _ in range(rng.randrange(1, 20)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            data = bytes(data)
        docs.append(data)
        size += len(data)
    docs += [b"", b" ", b"\n", b"a", b"\xff", b"\xe2\x82", b"x" * 3000, b" " * 5000, b"ab" * 2000,
             "你好".encode() * 900, b"\n" * 700 + b"a", b"=" * 9999]
    return docs


def cut(docs, size):
    out, n = [], 0
    for d in docs:
        if n >= size:
            break
        out.append(d)
        n += len(d)
    return out


def trained(texts):
    """Name -> Tokenizer."""
    special = ["<unk>", "<s>", "</s>", "<|endoftext|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()

    def byte_level(pattern, normalizer=None, **model):
        t = Tokenizer(models.BPE(**model))
        if pattern is None:
            t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        else:
            t.pre_tokenizer = pre_tokenizers.Sequence([
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        if normalizer:
            t.normalizer = normalizer
        t.decoder = decoders.ByteLevel()
        t.train_from_iterator(texts, trainers.BpeTrainer(
            vocab_size=6000, special_tokens=special[1:], initial_alphabet=alphabet,
            show_progress=False))
        return t

    out = {}
    out["gpt2"] = byte_level(None)
    out["gpt2 pattern"] = byte_level(GPT2)
    out["llama3"] = byte_level(LLAMA3, ignore_merges=True)
    out["llama3"].post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[
            ("<s>", out["llama3"].token_to_id("<s>"))])])
    out["qwen2"] = byte_level(QWEN2, normalizers.NFC())

    byte_tokens = ["<0x%02X>" % i for i in range(256)]
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    t.pre_tokenizer = pre_tokenizers.Metaspace()
    t.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=6000, special_tokens=special + byte_tokens, limit_alphabet=800,
        show_progress=False))
    spm_decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                     decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    t.decoder = spm_decoder
    frame = processors.TemplateProcessing(single="<s> $A </s>", pair="<s> $A </s> $B </s>",
                                          special_tokens=[("<s>", 1), ("</s>", 2)])
    t.post_processor = frame
    state = json.loads(t.to_str())
    state["added_tokens"] = state["added_tokens"][:4]    # byte tokens belong to the model alone
    out["mistral (metaspace)"] = Tokenizer.from_str(json.dumps(state))
    state["normalizer"] = {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}
    state["pre_tokenizer"] = None
    out["llama2 (one word)"] = Tokenizer.from_str(json.dumps(state))
    state["model"]["byte_fallback"] = False
    state["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first",
                              "split": False}
    state["normalizer"] = None
    out["bpe, unknowns fused"] = Tokenizer.from_str(json.dumps(state))

    # The unigram trainer puts every character into the vocabulary, so rare ones are left out.
    common = {c for c, _ in collections.Counter("".join(texts)).most_common(1200)}
    usual = ["".join(c for c in text if c in common) for text in texts]
    for name, fallback, normalizer in [
            ("t5 unigram", False, normalizers.Sequence([
                normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])),
            ("unigram, bytes", True, None)]:
        t = Tokenizer(models.Unigram())
        if normalizer:
            t.normalizer = normalizer
        t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        t.decoder = decoders.Metaspace()
        t.train_from_iterator(usual, trainers.UnigramTrainer(
            vocab_size=5000, special_tokens=special + (byte_tokens if fallback else []),
            unk_token="<unk>", show_progress=False))
        if fallback:
            state = json.loads(t.to_str())
            state["model"]["byte_fallback"] = True
            state["added_tokens"] = state["added_tokens"][:4]
            state["decoder"] = json.loads(spm_decoder.__getstate__())
            t = Tokenizer.from_str(json.dumps(state))
        t.post_processor = frame
        out[name] = t

    bert = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    for name, lowercase in [("bert uncased", True), ("bert cased", False)]:
        t = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        t.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
        t.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        t.decoder = decoders.WordPiece()
        t.train_from_iterator(texts, trainers.WordPieceTrainer(
            vocab_size=6000, special_tokens=bert, limit_alphabet=1000, show_progress=False))
        t.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
        out[name] = t

    t = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    t.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(),
                                         normalizers.Lowercase(), normalizers.Strip()])
    t.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.Punctuation("merged_with_previous")])
    t.decoder = decoders.BPEDecoder()
    t.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=4000, special_tokens=special, limit_alphabet=500, end_of_word_suffix="</w>",
        show_progress=False))
    out["bpe, suffix"] = t

    t = Tokenizer.from_str(out["gpt2 pattern"].to_str())
    t.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.Lowercase()])
    t.add_tokens([AddedToken("init", single_word=True), AddedToken("The", normalized=True),
                  AddedToken("the file", normalized=True, lstrip=True),
                  AddedToken("é", normalized=True), AddedToken("RETURN", normalized=True)])
    t.add_special_tokens([AddedToken("[MASK]", lstrip=True, rstrip=True, special=True),
                          AddedToken("error", single_word=True, rstrip=True, special=True),
                          AddedToken("<|", special=True), AddedToken("...", special=True)])
    out["added tokens"] = t
    return out


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="./engine")
    parser.add_argument("--real", action="append", default=[])
    parser.add_argument("--megabytes", type=float, default=12)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    docs = documents(given.megabytes)
    texts = [d.decode("utf-8", "replace") for d in docs]
    rng = random.Random(3)
    every = {"file:" + os.path.basename(os.path.dirname(p)): Tokenizer.from_file(p)
             for p in given.real}
    every.update(trained(rng.sample(texts, len(texts) // 30)))
    with tempfile.TemporaryDirectory() as folder:
        sizes = np.array([len(d) for d in docs], dtype=np.uint32)
        sizes.tofile(folder + "/sizes")
        open(folder + "/text", "wb").write(b"".join(docs))
        rows = []
        for number, (name, t) in enumerate(every.items()):
            if given.only not in name:
                continue
            t.save("%s/%d.json" % (folder, number))
            fresh = Tokenizer.from_str(t.to_str())              # with an empty cache
            start = time.process_time()
            ids = fresh.encode_batch_fast(texts)
            encode = time.process_time() - start
            ids = [e.ids for e in ids]
            np.array([len(e) for e in ids], dtype=np.uint32).tofile("%s/%d.counts" % (folder,
                                                                                      number))
            np.array([i for e in ids for i in e], dtype=np.uint32).tofile("%s/%d.ids" % (folder,
                                                                                         number))
            back = [t.decode(e, skip_special_tokens=True) for e in ids]
            kept = [t.decode(e, skip_special_tokens=False) for e in ids]
            for which, list_of in (("skip", back), ("keep", kept)):
                data = [b.encode() for b in list_of]
                np.array([len(b) for b in data], dtype=np.uint32).tofile(
                    "%s/%d.%s.sizes" % (folder, number, which))
                open("%s/%d.%s" % (folder, number, which), "wb").write(b"".join(data))
            rows.append({"name": name, "number": number, "encode": encode})
        json.dump(rows, open(folder + "/rows.json", "w"))
        here = os.path.dirname(os.path.abspath(__file__))
        return subprocess.call([given.engine, here + "/tokenizer.lua", folder])


if __name__ == "__main__":
    sys.exit(main())
