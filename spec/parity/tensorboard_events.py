"""Event files that the engine writes, live (tensorboard=true) and by `engine export`, read by a
real TensorBoard.

Every number must equal the recorded one as a float32. The buckets of every histogram must have
rising limits and sum to its number of elements. Prints a table; exits with 1 when a row fails.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile

import numpy as np

try:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
except ImportError:
    sys.exit("parity: TensorBoard is not in the environment; "
             f"hint: {sys.prefix}/bin/pip install tensorboard")

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
STEPS, MORE = 120, 150
TAGS = {
    "train/loss": "loss",
    "train/learning_rate": "lr",
    "scaling/scale": "scale",
    "gradients/norm": "norm",
    "gradients/amax": "amax"
}
failed = 0


def report(what, good, note=""):
    global failed
    failed += not good
    print(f"{what:<75} {'ok' if good else 'FAILED'}  {note}", flush=True)


def engine(words, cwd):
    done = subprocess.run(words, capture_output=True, text=True, cwd=cwd)
    if done.returncode != 0:
        sys.stderr.write(done.stderr)
        sys.exit(f"parity: the engine ended with {done.returncode}: {' '.join(words)}")
    return done.stdout


def read(folder):
    events = EventAccumulator(folder, size_guidance=dict(scalars=0, histograms=0, tensors=0))
    events.Reload()
    return events


def same_float(a, b):
    a, b = np.float32(a), np.float32(b)
    return a == b or (np.isnan(a) and np.isnan(b))


def number(x):
    return float(x) if isinstance(x, str) else x


def compare(name, events, rows):
    for tag, column in TAGS.items():
        seen = {e.step: e.value for e in events.Scalars(tag)}
        good = len(seen) == len(rows) and all(
            same_float(seen[r["step"]], number(r[column])) for r in rows)
        report(f"{name}: {tag}, {len(seen)} steps", good)
    skipped = {e.step: e.value for e in events.Scalars("scaling/skipped")}
    report(f"{name}: skipped steps",
           all((skipped[r["step"]] == 1) == (r["action"] != "step") for r in rows),
           f"{int(sum(skipped.values()))} of them")
    tags = events.Tags()["histograms"]
    good = len(tags) >= 3
    for tag in tags:
        for h in events.Histograms(tag):
            v = h.histogram_value
            good = (good and len(v.bucket) == len(v.bucket_limit) and sum(v.bucket) == v.num
                    and v.max <= v.bucket_limit[-1])
            good = good and all(a < b for a, b in zip(v.bucket_limit, v.bucket_limit[1:]))
    report(f"{name}: histograms of {len(tags)} layers", good)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="./engine")
    binary = os.path.abspath(parser.parse_args().engine)
    with tempfile.TemporaryDirectory() as folder:
        train = [binary, os.path.join(ROOT, "examples/gpt.lua"), "layers=2", "width=32", "batch=4",
                 "sample=0", "log=quiet", "run=a",
                 "policy=dynamic:init_scale=2^22,growth_interval=20", "tensorboard=true",
                 f"data={os.path.join(ROOT, 'README.md')}"]
        engine(train + [f"steps={STEPS}"], folder)
        engine(train + [f"steps={MORE}", "resume=auto"], folder)
        engine([binary, "export", "a", "--jsonl", "a.jsonl", "--tensorboard", "exported"], folder)
        with open(os.path.join(folder, "a.jsonl"), encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        report(f"the run has {MORE} steps", len(rows) == MORE)
        compare("live, in two files", read(os.path.join(folder, "runs/a/tensorboard")), rows)
        exported = read(os.path.join(folder, "exported"))
        compare("exported", exported, rows)
        texts = {
            tag: exported.Tensors(tag)[0].tensor_proto.string_val[0].decode()
            for tag in exported.Tags()["tensors"]
        }
        report("exported: the policy's source",
               any("growth_interval" in text for tag, text in texts.items()
                   if tag.startswith("policy/")))
        report("exported: the settings", "| width | 32 |" in texts.get("settings", ""))
    sys.exit(1 if failed else 0)


main()
